"""Measured costs are kept: what was measured once, of one graph on one device, is not measured again.

Entries lie in $PIPECOMPILE_CACHE, else in `pipecompile` under $XDG_CACHE_HOME or ~/.cache, one file each, named by the
SHA-256 of all that the costs depend on. Needs no PyTorch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pipecompile.errors import FormatError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.serde import Value, encode, read, write

__all__ = ["cache_folder", "remembered"]


class Entry(Value, frozen=True, kw_only=True):
    """A cost graph, all that it depends on, and the SHA-256 of its bytes."""

    schema: Literal["pipecompile/measured-costs/1"] = "pipecompile/measured-costs/1"
    depends_on: dict[str, str]
    digest: str
    graph: CostGraph


def cache_folder() -> Path:
    """Where entries lie; it need not exist."""
    if given := os.environ.get("PIPECOMPILE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipecompile"


def remembered(depends_on: Mapping[str, str], measure: Callable[[], CostGraph], *, fresh: bool) -> CostGraph:
    """The costs that depend on nothing else, as they were measured before or, if they were not or if `fresh`, now.

    An entry that is damaged, or is not what its name says, is measured anew. What happens is said on standard error.
    """
    path = cache_folder() / f"{_digest(dict(depends_on))}.json"
    found = None if fresh else _recalled(path, depends_on)
    if found is not None:
        print(f"costs were measured before: reused from {path}", file=sys.stderr)
        return found
    graph = measure()
    _keep(path, Entry(depends_on=dict(depends_on), digest=_digest(graph), graph=graph))
    return graph


def _recalled(path: Path, depends_on: Mapping[str, str]) -> CostGraph | None:
    if not path.exists():
        return None
    try:
        return _checked(read(path, Entry), path, depends_on)
    except FormatError as error:
        print(f"{error}; measuring again", file=sys.stderr)
        return None


def _checked(entry: Entry, path: Path, depends_on: Mapping[str, str]) -> CostGraph:
    if entry.depends_on != depends_on:
        raise FormatError(f"{path}: is of other costs than its name says")
    if entry.digest != _digest(entry.graph):
        raise FormatError(f"{path}: its costs were changed after they were measured")
    return entry.graph


def _keep(path: Path, entry: Entry) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, encode(entry))
    except (OSError, FormatError) as error:
        print(f"measured costs are not kept: {error}", file=sys.stderr)


def _digest(value: object) -> str:
    return hashlib.sha256(encode(value)).hexdigest()
