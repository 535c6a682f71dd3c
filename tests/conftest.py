"""Shared by all tests."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import settings

# `make test` draws some examples for each property, `make bench` all.
settings.register_profile("some", settings.get_profile("ci"), max_examples=12)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what nearly every test needs, in the processes that run tests."""
    if not session.config.getoption("numprocesses", None):
        importlib.import_module("tests.preloaded")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave all but one in `period` cases of a test marked `one_case_in(period)` for the sweep.

    The pages of docs/ come first: they are the longest file, and with several workers one that
    began last would leave the others idle.
    """
    items.sort(key=lambda item: item.path.parent.name != "docs")
    seen = Counter[str]()
    for item in items:
        mark = item.get_closest_marker("one_case_in")
        if mark is None or item.get_closest_marker("sweep") is not None:
            continue
        test = item.nodeid.partition("[")[0]
        if seen[test] % mark.args[0]:
            item.add_marker("sweep")
        seen[test] += 1


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep measured costs in a folder of this run, which worker processes inherit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPECOMPILE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
