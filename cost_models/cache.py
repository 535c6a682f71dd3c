"""The cache of measured costs: one graph is measured only once on one device.

Entries are files in $PIPECOMPILE_CACHE, or else in the user's cache folder (`~/.cache/pipecompile`
on Linux). A file is named by the SHA-256 of everything that its costs depend on. Called by
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
    """The measured cost of a node: nanoseconds, and the bytes of its kernel workspace.

    The latter is None for a device whose allocator does not report it.
    """

    forward_ns: NonNegative
    backward_ns: NonNegative
    backward_input_ns: NonNegative
    backward_weight_ns: NonNegative
    workspace_bytes: NonNegative | None


class CacheEntry(Value, frozen=True, kw_only=True):
    """A file of the cache: costs of nodes by name, what they depend on, and the costs' SHA-256.

    Sizes are not in it: they come from a run on fake tensors, which is repeated each time.
    """

    schema: Literal["pipecompile/measured-costs/2"] = "pipecompile/measured-costs/2"
    depends_on: dict[str, str]
    digest: str
    costs: dict[str, CachedCost]


def cache_folder() -> Path:
    """Return the folder of the entries; it need not exist."""
    if folder := os.environ.get("PIPECOMPILE_CACHE"):
        return Path(folder)
    # On Windows the folder would else lie in one of the same name, as that of an author.
    return user_cache_path("pipecompile", appauthor=False)


def cached_costs(depends_on: Mapping[str, str]) -> dict[str, CachedCost] | None:
    """Return the costs that were measured under these conditions, or None.

    An entry that is damaged, or that is not what its name says, is ignored.
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
    """Write `costs` in the place of older ones; log a warning if that is not possible."""
    # A cache that cannot be written costs time in the next run, and is no reason to end this one.
    path, stored = _path(depends_on), dict(costs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(
            path,
            encode(
                CacheEntry(depends_on=dict(depends_on), digest=fingerprint(stored), costs=stored)
            ),
        )
    except (OSError, FormatError) as error:
        logger.warning("measured costs are not cached: %s", error)


def _checked(entry: CacheEntry, path: Path, depends_on: Mapping[str, str]) -> dict[str, CachedCost]:
    """Return the costs of `entry`; raise FormatError if its file was renamed or edited."""
    # The name is a hash of these, so only a file that was renamed or edited comes here.
    if entry.depends_on != depends_on:
        raise FormatError(
            f"{path}: the costs in it depend on other things than its name says; delete the file"
        )
    # The digest finds edits that leave the file readable.
    if entry.digest != fingerprint(entry.costs):
        raise FormatError(
            f"{path}: the costs in it were changed after they were measured; delete the file"
        )
    return entry.costs


def _path(depends_on: Mapping[str, str]) -> Path:
    return cache_folder() / f"{fingerprint(dict(depends_on))}.json"
