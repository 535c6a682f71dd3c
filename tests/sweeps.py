"""Cases for `make bench`: of many that are alike `make test` runs some, a sweep the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

__all__ = ["examples", "one_in", "sweep"]


def examples(count: int) -> int:
    """Return how many examples to draw where `make bench` draws `count`; at least one."""
    return max(1, count * settings.default.max_examples // 100)


def sweep(*values: Any) -> Any:
    """Return a case that only `pytest -m sweep` runs."""
    return pytest.param(*values, marks=pytest.mark.sweep)


def one_in(period: int, cases: Iterable[Any]) -> list[Any]:
    """Return each `period`-th case as it is and the others for the sweep.

    A case is a value or a tuple of values.
    """
    many = [case if type(case) is tuple else (case,) for case in cases]
    return [
        pytest.param(*case) if index % period == 0 else sweep(*case)
        for index, case in enumerate(many)
    ]
