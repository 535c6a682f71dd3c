"""The links between ranks: from a file, a value, one bandwidth and latency for all ranks, or
measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from pipecompile.errors import InputError
from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Options
from pipecompile.ir.serialization import decode, encode, read
from pipecompile.schedule.selection import placements

__all__ = ["LinksInput", "link_of", "links_for", "links_of", "probe_links"]

LinksInput = Links | Mapping[str, Any] | str | Path | None


def links_of(given: LinksInput) -> Links:
    """Return `given` as links: it is a path to a file, its content as a mapping, or None for free
    links.
    """
    if given is None:
        return FREE
    if isinstance(given, Links):
        return given
    if isinstance(given, Mapping):
        # Through JSON, so that a mapping is checked as strictly as a file.
        return decode(encode(given), Links, origin="links")
    if not isinstance(given, str | Path):
        raise InputError(
            f"links is a {type(given).__name__}; give a file that `pipecompile links` wrote, or "
            "its content"
        )
    return read(given, Links)


def links_for(options: Options, given: LinksInput) -> Links:
    """Return the links of a plan with these options.

    Raise InputError if they are for another number of ranks.
    """
    # All processes of a job count, as many as a probe would have started: 4 ranks in 2 replicas
    # are 8.
    links, ranks = links_of(given), (max(placements(options)[0]) + 1) * options.replicas
    if not links.fits(ranks):
        source = f"{given} is" if isinstance(given, str | Path) else "the links are"
        replicas = f" in {options.replicas} replicas" if options.replicas > 1 else ""
        raise InputError(
            f"{source} for {links.ranks} ranks, but the plan has {ranks}{replicas}; plan for as "
            f"many, or probe {ranks} ranks: torchrun --nproc-per-node {ranks} -m pipecompile links "
            "-o links.json"
        )
    return links


def link_of(bandwidth: float | None, latency_ns: int) -> Link:
    """Return one link for all ranks; without a bandwidth a message takes only its latency."""
    if bandwidth is not None and not 1 <= bandwidth < inf:
        raise InputError(
            f"--bandwidth {bandwidth:g}: give bytes per second, at least 1, or leave it out for "
            "free links"
        )
    if latency_ns < 0:
        raise InputError(f"--latency {latency_ns}: give nanoseconds, 0 or more")
    return Link(
        bandwidth_bytes_per_s=None if bandwidth is None else int(bandwidth), latency_ns=latency_ns
    )


def probe_links() -> Links:
    """Measure bandwidth and latency between all ranks; raise InputError if there is only one."""
    # Imported here: PyTorch is needed for probing only.
    from pipecompile.runtime import world

    world.join()
    if world.size() == 1:
        raise InputError(
            "links are measured between ranks, but there is only one; start as many as will train: "
            "torchrun --nproc-per-node 4 -m pipecompile links -o links.json"
        )
    # Imported here: it needs torch.distributed, which a build of torch may lack.
    from pipecompile.runtime.probe import measure_links

    return measure_links()
