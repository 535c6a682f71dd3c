"""Run conditions: whether a run is the one that its plan counts, in ranks, replicas and shards."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import chain

from torch import nn

from pipecompile.errors import InputError
from pipecompile.ir.plan import Plan
from pipecompile.ir.plurals import counted
from pipecompile.runtime import world
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.shards import local_part, rows_of

__all__ = ["check_links", "warn_of_averages", "warn_of_other_replicas", "warn_of_other_shards"]

logger = logging.getLogger("pipecompile.training")


def check_links(plan: Plan, place: RankPlace) -> None:
    """Raise InputError if the plan's links are of ranks that a mesh numbers otherwise."""
    order = list(chain(*place.pipelines))
    if plan.links.ranks == len(order) and order != sorted(order):
        raise InputError(
            f"the plan's links are from rank to rank, pipeline by pipeline, but the mesh has the "
            f"pipelines {list(map(list, place.pipelines))}; make it with "
            f'init_device_mesh(…, (n, {plan.ranks}), mesh_dim_names=("dp", "pp")), or give one '
            "bandwidth and latency for all"
        )


def warn_of_other_replicas(plan: Plan, place: RankPlace) -> None:
    """Warn if the plan counts another number of replicas than there are."""
    if place.is_distributed and place.replicas != plan.replicas and world.rank() == 0:
        logger.warning(
            "the plan counts %s, but %d run: what they exchange is not in its step and memory; "
            "plan with replicas=%d",
            counted(plan.replicas, "replica"),
            place.replicas,
            place.replicas,
        )


def warn_of_other_shards(plan: Plan, stages: Sequence[nn.Module], *, is_sharded: bool) -> None:
    """Warn if this rank holds larger parts of parameters than the plan counts, or smaller.

    `is_sharded` says whether FSDP2 manages parameters here.
    """
    shards = plan.replicas if plan.options.sharded else 1
    own = {parameter for stage in stages for parameter in stage.parameters()}
    larger = [p for p in own if rows_of(local_part(p)) > -(-rows_of(p) // shards)]
    if larger:
        logger.warning(
            "the plan counts every parameter as sharded over %d replicas, but rank %d holds more "
            "of %s: it may need more memory than predicted",
            shards,
            world.rank(),
            counted(len(larger), "parameter"),
        )
    elif is_sharded and shards == 1 and world.rank() == 0:
        logger.warning(
            "parallelize shards stages over replicas, but the plan counts them as whole; plan "
            "with sharded=True"
        )


def warn_of_averages(plan: Plan, model: nn.Module, place: RankPlace) -> None:
    """Warn if running averages of replicas will differ."""
    averages = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
        and module.track_running_stats
        for module in model.modules()
    )
    differ = place.replicas > 1 and plan.options.batch_norm == "microbatch"
    if averages and differ and world.rank() == 0:
        logger.warning(
            "the running averages of batch norms will be those of each replica's own data, and "
            "the first one's are saved; with batch_norm='minibatch' all replicas have the same"
        )
