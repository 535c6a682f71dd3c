"""Measured costs are kept: what was measured once, of the nodes of one graph on one device, is not measured again.

Entries lie in $PIPECOMPILE_CACHE, else in `pipecompile` under $XDG_CACHE_HOME or ~/.cache, one file each, named by the
SHA-256 of all that the costs depend on. Needs no PyTorch.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pipecompile.errors import FormatError
from pipecompile.ir.serialization import NonNegative, Value, encode, read, write

__all__ = ["NodeCost", "cache_folder", "keep", "recalled"]


class NodeCost(Value, frozen=True, kw_only=True):
    """What was measured of a node: nanoseconds, and the bytes of its scratch where the device says them."""

    forward_ns: NonNegative
    backward_ns: NonNegative
    backward_input_ns: NonNegative
    backward_weight_ns: NonNegative
    workspace_bytes: NonNegative | None


class Entry(Value, frozen=True, kw_only=True):
    """The costs of nodes by name, all that they depend on, and the SHA-256 of their bytes.

    Nothing that one run on fake tensors says is in it.
    """

    schema: Literal["pipecompile/measured-costs/2"] = "pipecompile/measured-costs/2"
    depends_on: dict[str, str]
    digest: str
    costs: dict[str, NodeCost]


def cache_folder() -> Path:
    """Where entries lie; it need not exist."""
    if given := os.environ.get("PIPECOMPILE_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipecompile"


def recalled(depends_on: Mapping[str, str]) -> dict[str, NodeCost] | None:
    """The costs that depend on nothing else, as they were measured before; None if they were not.

    An entry that is damaged, or is not what its name says, counts as none. What happens is said on standard error.
    """
    path = _path(depends_on)
    if not path.exists():
        return None
    try:
        costs = _checked(read(path, Entry), path, depends_on)
    except FormatError as error:
        print(f"{error}; measuring again", file=sys.stderr)
        return None
    print(f"costs were measured before: reused from {path}", file=sys.stderr)
    return costs


def keep(depends_on: Mapping[str, str], costs: Mapping[str, NodeCost]) -> None:
    """Keeps `costs`, in the place of older ones; where it cannot, standard error says so."""
    path, known = _path(depends_on), dict(costs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, encode(Entry(depends_on=dict(depends_on), digest=_digest(known), costs=known)))
    except (OSError, FormatError) as error:
        print(f"measured costs are not kept: {error}", file=sys.stderr)


def _checked(entry: Entry, path: Path, depends_on: Mapping[str, str]) -> dict[str, NodeCost]:
    if entry.depends_on != depends_on:
        raise FormatError(f"{path}: is of other costs than its name says")
    if entry.digest != _digest(entry.costs):
        raise FormatError(f"{path}: its costs were changed after they were measured")
    return entry.costs


def _path(depends_on: Mapping[str, str]) -> Path:
    return cache_folder() / f"{_digest(dict(depends_on))}.json"


def _digest(value: object) -> str:
    return hashlib.sha256(encode(value)).hexdigest()
