"""Run conditions: whether a run is the one that its plan counts, in ranks, replicas and shards."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.graph.gradient_hooks import has_hook
from pipecompile.graph.model_state import named_state
from pipecompile.graph.storages import storage_key
from pipecompile.ir.plan import Plan
from pipecompile.ir.plurals import counted
from pipecompile.ir.schedule import Schedule
from pipecompile.runtime import world
from pipecompile.runtime.communication_hook import CommunicationHook
from pipecompile.runtime.distributed_pipeline import Engine
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.place import RankPlace
from pipecompile.runtime.shards import local_part, rows_of
from pipecompile.runtime.update_rule import UpdateRule
from pipecompile.training.parallel_stages import Parallelize, refuse_parallelize
from pipecompile.training.program import Program

__all__ = [
    "check_conditions",
    "check_links",
    "refuse_frozen",
    "refuse_hook",
    "refuse_hooks_in_flight",
    "refuse_in_flight",
    "refuse_shared_memory",
    "refuse_unequal_arrays",
    "refuse_without_gradients",
    "refuse_without_steps",
    "warn_of_other_shards",
    "warn_of_written_buffers",
]

logger = logging.getLogger("pipecompile.training")


def check_conditions(
    plan: Plan,
    model: nn.Module,
    share: LocalShare,
    parallelize: Parallelize | None,
    engine: Engine,
) -> None:
    """Raise InputError for what these ranks cannot run, and warn of what differs from the plan,
    before anything is cut.
    """
    place, is_divided = share.place, parallelize is not None
    _refuse_stage_replicas(plan, place, is_divided=is_divided, engine=engine)
    refuse_parallelize(parallelize, share)
    check_links(plan, place)
    _warn_of_other_replicas(plan, place)
    _warn_of_averages(plan, model, place)


def check_links(plan: Plan, place: RankPlace) -> None:
    """Raise InputError if the plan's links are of ranks that a mesh numbers otherwise."""
    # A mesh of (pp 2, dp 2) has the pipelines 0, 2 and 1, 3. The plan's links number ranks
    # pipeline by pipeline, so its rank 1 would be process 2.
    order = list(chain(*place.pipelines))
    if plan.links.ranks == len(order) and order != sorted(order):
        raise InputError(
            f"the plan's links are from rank to rank, pipeline by pipeline, but the mesh has the "
            f"pipelines {list(map(list, place.pipelines))}; make it with "
            f'init_device_mesh(…, (n, {plan.ranks}), mesh_dim_names=("dp", "pp")), or give one '
            "bandwidth and latency for all"
        )


def refuse_shared_memory(plan: Plan, model: nn.Module, planned: Program) -> None:
    """Raise InputError if two tensors of the model, or constants that its forward reads besides,
    lie in the same memory, but on other ranks.

    In one process an update of a parameter, or a forward that writes to a buffer, changes what is a
    view of it; other ranks would keep the old values. One tensor under several names is a tie, and
    no matter of this.
    """
    state, ties = {**planned.captured.constants, **dict(named_state(model))}, planned.ties
    changing = {id(buffer) for stage in planned.stages for buffer in stage.buffers}
    by_storage = defaultdict[int, list[str]](list)
    for name in ties:
        by_storage[storage_key(state[name])].append(name)
    for one, other in chain.from_iterable(_overlaps(each, state) for each in by_storage.values()):
        ranks, others = (
            sorted(chain.from_iterable(plan.schedule.stage_ranks[s] for s in ties[name].stages))
            for name in (one, other)
        )
        pair = state[one], state[other]
        # What nobody writes to may have copies: they stay equal.
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
        # They are sorted by their begin, so behind the first one that begins later no other
        # overlaps.
        for other_begin, _, other in spans[index + 1 :]:
            if other_begin >= end:
                break
            yield min(name, other), max(name, other)


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    # From the first element to the last one: shape (2, 3) with strides (8, 1) spans 1 + 8 + 2 =
    # 11 elements, with a gap of five. What lies in the gap only is taken to overlap too.
    begin = tensor.storage_offset()
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    end = (
        begin + 1 + sum((size - 1) * stride for size, stride in pairs) if tensor.numel() else begin
    )
    return int(begin) * tensor.element_size(), int(end) * tensor.element_size()


def _warn_of_other_replicas(plan: Plan, place: RankPlace) -> None:
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
    shards = plan.replicas if plan.options.shard else 1
    own = {parameter for stage in stages for parameter in stage.parameters()}
    # FSDP2 gives the first ranks the larger parts: five rows on two replicas are three and two.
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
            "with shard='optimizer'"
        )


def _warn_of_averages(plan: Plan, model: nn.Module, place: RankPlace) -> None:
    """Warn if running averages of replicas will differ."""
    averages = any(
        isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.training
        and module.track_running_stats
        for module in model.modules()
    )
    differ = _is_replicated(plan, place) and plan.options.batch_norm == "microbatch"
    if averages and differ and world.rank() == 0:
        logger.warning(
            "the running averages of batch norms will be those of each replica's own data, and "
            "the first one's are saved; with batch_norm='minibatch' all replicas have the same"
        )


def _is_replicated(plan: Plan, place: RankPlace) -> bool:
    """Return whether several ranks run a stage, each with microbatches of its own."""
    return place.replicas > 1 or (place.is_distributed and plan.ranks > plan.k)


def warn_of_written_buffers(
    plan: Plan, model: nn.Module, planned: Program, place: RankPlace
) -> None:
    """Warn if forwards write to buffers that each replica then has of its own data."""
    norms = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name in module._buffers
    }
    written = [name for stage in planned.stages for name in stage.written if name not in norms]
    if written and _is_replicated(plan, place) and world.rank() == 0:
        more = f" and {len(written) - 1} more buffers" if len(written) > 1 else ""
        logger.warning(
            "the forward writes to %s: each replica has there what it makes of its own data, and "
            "the first one's is saved. Where the forward reads it too, gradients are not those of "
            "one pipeline with all data; reduce it over pipeline.replica_group between steps, or "
            "train on one replica",
            f"{written[0]}{more}",
        )


def _refuse_stage_replicas(
    plan: Plan, place: RankPlace, *, is_divided: bool, engine: Engine
) -> None:
    """Raise InputError if stages that have several ranks cannot run so."""
    if plan.options.stage_replicas is None or not place.is_distributed:
        return
    replicas = ",".join(map(str, plan.options.stage_replicas))
    for is_given, reason in (
        (
            len(place.pipelines) > 1,
            f"{len(place.pipelines)} pipelines run, whose replicas would be others for each stage; "
            f"launch {plan.ranks} processes",
        ),
        (is_divided, "parallelize divides stages over a mesh that has none of them; leave it out"),
        (
            engine == "torch",
            "torch's runtime runs a stage on one rank; leave out engine='torch'",
        ),
    ):
        if is_given:
            raise InputError(f"the plan has stages on {replicas} ranks, but {reason}")


def refuse_without_gradients(schedule: Schedule) -> None:
    """Raise InputError if nothing can be trained under this schedule, or here."""
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


def refuse_unequal_arrays(digests: Mapping[str, str]) -> None:
    """Raise InputError, on all ranks, if an array of numpy that the forward reads has other values
    on another rank; `digests` are those of this rank, by where the arrays are.
    """
    for rank, other in enumerate(world.gather(digests)):
        for where in sorted(digests.keys() & other.keys()):
            if digests[where] != other[where]:
                raise InputError(
                    f"{where} is an array of numpy that has other values on rank {rank} than on "
                    f"rank {world.rank()}, and each stage would compute with its own; seed numpy "
                    "alike on all ranks, or keep it in a buffer, which takes those of rank 0"
                )


def refuse_frozen(parameters: Iterable[Tensor]) -> None:
    """Raise InputError if none of the model's parameters is trained, on all ranks: only the last
    one sees that its loss has no gradient.
    """
    # Asked of the whole model, which all ranks have, so that all of them raise.
    if not any(parameter.requires_grad for parameter in parameters):
        raise InputError(
            "a step trains, but no parameter of the model requires a gradient; set requires_grad "
            "of some and compile again, or call evaluate"
        )


def refuse_without_steps(schedule: Schedule, what: str) -> None:
    """Raise InputError for something that belongs to steps, under a schedule without any."""
    if schedule.weight_versions != "synchronous":
        raise InputError(
            f"{what}, but under schedule {schedule.name!r} minibatches follow each other without "
            "steps, and gradients are gone when a loss is there; plan with a synchronous schedule "
            "such as '1f1b', or see train(batches, factory)"
        )


def refuse_hook(
    hook: CommunicationHook, schedule: Schedule, place: RankPlace, *, is_divided: bool
) -> None:
    """Raise InputError for a communication hook that cannot sum the gradients of these replicas."""
    refuse_without_steps(schedule, "a communication hook is called once a step for each bucket")
    if not callable(hook.function):
        raise InputError(
            f"the communication hook is a {type(hook.function).__name__}; give a function of "
            "(state, bucket), such as torch's bf16_compress_hook"
        )
    if place.replica_group is None:
        raise InputError(
            "a communication hook sums gradients over replicas, but there is one only; launch a "
            "multiple of the plan's ranks, or leave it out"
        )
    # A sum over all processes would add gradients of different parameters, without an error where
    # their sizes happen to agree.
    if hook.state is None:
        raise InputError(
            "the state of the communication hook is None, for which torch's hooks take all "
            "processes, and these hold other stages; give the group of the replicas: "
            "pipeline.register_comm_hook(pipeline.replica_group, hook)"
        )
    if is_divided:
        raise InputError(
            "parallelize lets FSDP2 sum gradients, which calls no hook of the pipeline; leave one "
            "of the two out"
        )


def refuse_in_flight(
    plan: Plan, target: Target, rule: UpdateRule, *, is_divided: bool, engine: str
) -> None:
    """Raise InputError for what cannot be right while minibatches are in flight.

    `is_divided` says that stages are divided by `parallelize`.
    """
    name, versions = plan.schedule.name, plan.schedule.weight_versions
    for is_given, reason in (
        (
            rule.max_norm is not None and versions != "double-buffered",
            "max_norm needs the gradients of all stages before any of them steps, but the first "
            "stage steps before the last one has the gradients; leave it out, or plan with "
            "'pipedream-2bw', which has a minibatch of time for that",
        ),
        (
            rule.skip_nonfinite,
            "microbatches wait for the version that skip_nonfinite would leave out; leave it out",
        ),
        (
            plan.options.batch_norm == "minibatch",
            "batch_norm='minibatch' commits statistics when a minibatch is over, but the next one "
            "has begun by then; plan with batch_norm='microbatch'",
        ),
        (
            target.loss_reduction == "weighted",
            "loss_reduction='weighted' divides gradients by what only the last stage knows when "
            "the others step; choose 'mean' or 'sum'",
        ),
        (
            is_divided,
            "parallelize divides parameters, of which no other version can be kept; leave it out",
        ),
        (
            engine == "torch",
            "torch's runtime empties the pipeline in each step; leave out engine='torch'",
        ),
    ):
        if is_given:
            raise InputError(f"under schedule {name!r} {reason}")
    refuse_hooks_in_flight(target.model_with_loss, name, has_hook)
    _refuse_views(target.model_with_loss, name)


def refuse_hooks_in_flight(
    model: nn.Module,
    schedule: str,
    is_hooked: Callable[[Tensor], Any] = attrgetter("_backward_hooks"),
) -> None:
    """Raise InputError for hooks on gradients, which are those of the versions that are read.

    `is_hooked` tells of a parameter; at the beginning of a run it may take longer than later.
    """
    for name, parameter in model.named_parameters():
        # Autograd calls hooks of the leaf that it accumulates into, and that is here a leaf of
        # the microbatch in the memory of its version, never the parameter.
        has_late_hook = bool(parameter._post_accumulate_grad_hooks)
        if has_late_hook or is_hooked(parameter):
            kind = "post-accumulate hook" if has_late_hook else "hook on its gradient"
            raise InputError(
                f"{name} has a {kind}, which would not run under schedule "
                f"{schedule!r}: microbatches have weights of their own; remove it"
            )


def _refuse_views(model: nn.Module, schedule: str) -> None:
    """Raise InputError for parameters that cannot have several versions."""
    # A step moves each parameter to memory of its own while the old version is still read.
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    by_storage = defaultdict[int, list[str]](list)
    for name, parameter in trained.items():
        by_storage[storage_key(parameter)].append(name)
    for names in by_storage.values():
        for one, other in _overlaps(names, trained):
            raise InputError(
                f"{one} and {other} are parameters in the same memory, which under schedule "
                f"{schedule!r} would part when their versions are kept; make them one parameter"
            )
