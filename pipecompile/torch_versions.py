"""The versions of torch that this package is for, of which the tests run on the one in
constraints.txt; pyproject.toml has the same range.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, version

__all__ = ["NEWEST", "OLDEST", "check_torch"]

OLDEST, NEWEST = (2, 11), (2, 15)
SWITCH = "PIPECOMPILE_ANY_TORCH"


def check_torch() -> None:
    """Raise ImportError if the torch that is installed is older or newer than those.

    Captures patch torch where it has no hook, and gradients must stay exact: what nobody has tried
    may be wrong. With PIPECOMPILE_ANY_TORCH in the environment it is tried (`make newest`).
    """
    try:
        installed = version("torch")
    except PackageNotFoundError:
        return  # plans are read and checked without it
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST:
        return
    if SWITCH not in os.environ:
        (major, minor), (_, last) = OLDEST, NEWEST
        raise ImportError(
            f"pipecompile works with torch {major}.{minor} to {major}.{last}, but {installed} is "
            f"installed; pip install 'torch>={major}.{minor},<{major}.{last + 1}', or try it "
            f"unproven with {SWITCH}=1"
        )
