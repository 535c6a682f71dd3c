"""Shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measured costs are not the user's, nor those of an earlier run; worker processes inherit where they lie."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPECOMPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
