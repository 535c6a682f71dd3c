"""Shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured costs in a folder of this run, which worker processes inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPECOMPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
