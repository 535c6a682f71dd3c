"""Run conditions: whether a run is the one that its plan counts, in ranks, replicas and shards."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.graph.model_state import named_state
from pipecompile.graph.storages import storage_key
from pipecompile.graph.ties import Tie
from pipecompile.ir.plan import Plan
from pipecompile.ir.plurals import counted
from pipecompile.ir.schedule import Schedule
from pipecompile.runtime import world
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.shards import local_part, rows_of

__all__ = [
    "check_links",
    "refuse_shared_memory",
    "refuse_untrainable",
    "warn_of_averages",
    "warn_of_other_replicas",
    "warn_of_other_shards",
]

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


def refuse_shared_memory(
    plan: Plan, model: nn.Module, ties: Mapping[str, Tie], written: Collection[Tensor]
) -> None:
    """Raise InputError if two tensors of the model lie in the same memory, but on other ranks.

    In one process an update of a parameter, or a forward that has `written` to a buffer, changes
    what is a view of it; other ranks would keep the old values. One tensor under several names is a
    tie, and no matter of this.
    """
    state = dict(named_state(model))
    changing = {id(tensor) for tensor in written}
    by_storage = defaultdict[int, list[str]](list)
    for name in ties:
        by_storage[storage_key(state[name])].append(name)
    for one, other in chain.from_iterable(_overlaps(each, state) for each in by_storage.values()):
        ranks, others = (
            sorted({plan.schedule.placement[stage] for stage in ties[name].stages})
            for name in (one, other)
        )
        pair = state[one], state[other]
        if ranks != others and any(t.requires_grad or id(t) in changing for t in pair):
            raise InputError(
                f"{one} and {other} are tensors in the same memory, but on ranks {ranks} and "
                f"{others}, where a change of one would not reach the other; make them one "
                "parameter under two names, compute one from the other in the forward, or keep "
                "them together with no_split="
            )


def _overlaps(names: Sequence[str], state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tensors of one storage that have bytes in common, if they had no gaps."""
    spans = sorted((*_bytes_of(state[name]), name) for name in names)
    for index, (_, end, name) in enumerate(spans):
        for other_begin, _, other in spans[index + 1 :]:
            if other_begin >= end:
                break
            yield min(name, other), max(name, other)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    begin = tensor.storage_offset()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    end = (
        begin + 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else begin
    )
    return int(begin) * tensor.element_size(), int(end) * tensor.element_size()


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


def refuse_untrainable(schedule: Schedule) -> None:
    """Raise InputError unless a step under this schedule leaves gradients of one set of weights."""
    if not torch.is_grad_enabled():
        raise InputError(
            "a step trains, but gradients are switched off around it (torch.no_grad or "
            "torch.inference_mode); call it outside of that, or call evaluate"
        )
    if schedule.name == "forward-only":
        raise InputError(
            "the plan's schedule is forward-only, which trains nothing; evaluate, or plan with "
            "'1f1b'"
        )
    if schedule.weight_versions != "synchronous":
        raise InputError(
            f"schedule {schedule.name!r} updates weights while microbatches are in flight, which "
            "no step does yet; plan with a synchronous one such as '1f1b'"
        )
