"""The cache of measured costs: what was measured for one graph on one device need not be measured
anew.

Entries lie in $PIPECOMPILE_CACHE, or else in the user's cache folder (`~/.cache/pipecompile` on
Linux), one file for each, named by the SHA-256 of all that the costs depend on. Called by
`api/costs.py`. Needs no PyTorch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from platformdirs import user_cache_path

from pipecompile.errors import FormatError
from pipecompile.ir.serialization import NonNegative, Value, encode, fingerprint, read, write

__all__ = ["CachedCost", "cache_folder", "cached_costs", "store_costs"]

logger = logging.getLogger("pipecompile.cost_models")


class CachedCost(Value, frozen=True, kw_only=True):
    """What was measured of a node: nanoseconds, and the bytes of its kernel scratch where the
    device reports them.
    """

    forward_ns: NonNegative
    backward_ns: NonNegative
    backward_input_ns: NonNegative
    backward_weight_ns: NonNegative
    workspace_bytes: NonNegative | None


class CacheEntry(Value, frozen=True, kw_only=True):
    """The costs of nodes by name, all that they depend on, and the SHA-256 of the costs' bytes.

    It has nothing that a run on fake tensors gives: that is computed anew each time.
    """

    schema: Literal["pipecompile/measured-costs/2"] = "pipecompile/measured-costs/2"
    depends_on: dict[str, str]
    digest: str
    costs: dict[str, CachedCost]


def cache_folder() -> Path:
    """Return the folder of the entries; it need not exist."""
    if given := os.environ.get("PIPECOMPILE_CACHE"):
        return Path(given)
    return user_cache_path("pipecompile", appauthor=False)


def cached_costs(depends_on: Mapping[str, str]) -> dict[str, CachedCost] | None:
    """Return the costs that were measured under these conditions; None if there are none.

    An entry that is damaged, or that is not what its name says, counts as none.
    """
    path = _path(depends_on)
    if not path.exists():
        return None
    try:
        costs = _checked(read(path, CacheEntry), path, depends_on)
    except FormatError as error:
        logger.warning("%s; the costs are measured anew", error)
        return None
    logger.info("costs are reused from %s", path)
    return costs


def store_costs(depends_on: Mapping[str, str], costs: Mapping[str, CachedCost]) -> None:
    """Write `costs` in the place of older ones; the log says so if that is not possible."""
    path, known = _path(depends_on), dict(costs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(
            path, encode(CacheEntry(depends_on=dict(depends_on), digest=fingerprint(known), costs=known))
        )
    except (OSError, FormatError) as error:
        logger.warning("measured costs are not cached: %s", error)


def _checked(entry: CacheEntry, path: Path, depends_on: Mapping[str, str]) -> dict[str, CachedCost]:
    """The costs of `entry`; FormatError if the file was renamed or edited."""
    if entry.depends_on != depends_on:
        raise FormatError(f"{path}: its costs depend on other things than its name says")
    if entry.digest != fingerprint(entry.costs):
        raise FormatError(f"{path}: its costs were changed after they were measured")
    return entry.costs


def _path(depends_on: Mapping[str, str]) -> Path:
    return cache_folder() / f"{fingerprint(dict(depends_on))}.json"
