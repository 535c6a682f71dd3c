"""The processes that all tests of ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.workers import Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """Up to eight processes, which start when a test first needs them."""
    group = Workers(8)
    yield group
    group.close()
