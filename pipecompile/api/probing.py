"""The links between the ranks that run together."""

from __future__ import annotations

from pipecompile.errors import InputError
from pipecompile.ir.links import Links
from pipecompile.runtime import world

__all__ = ["probe_links"]


def probe_links() -> Links:
    """Measures bandwidth and latency between all ranks; InputError if there is only one."""
    world.join()
    if world.size() == 1:
        raise InputError(
            "links are measured between ranks, but there is only one; start as many as will train: "
            "torchrun --nproc-per-node 4 -m pipecompile links -o links.json"
        )
    # Imported here: it needs torch.distributed, which a build of torch may lack.
    from pipecompile.runtime.probe import probe

    return probe()
