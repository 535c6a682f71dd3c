"""From a module to a running pipeline: capture, prove, cost, plan, cut. Reads top to bottom as the
pipeline itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Unpack, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from pipecompile.api.choices import Choices, check_names, requested_options
from pipecompile.api.joint_plan import joint_plan_of
from pipecompile.api.joint_request import joint_request
from pipecompile.api.links import LinksInput, links_for
from pipecompile.api.open_setting import chosen_plan, plan_with_choice, target_options
from pipecompile.api.plan import assist
from pipecompile.api.plan_request import PlanRequest, plan_request
from pipecompile.api.shapes import declared_shapes
from pipecompile.api.soundness import findings
from pipecompile.api.staleness import check_current
from pipecompile.api.target import planned_target
from pipecompile.cost_models.table import CostFunction
from pipecompile.errors import InputError, ScheduleError, StalePlanError
from pipecompile.frontend.batch_dims import BatchDim
from pipecompile.frontend.callable_state import callable_restored, can_be_restored
from pipecompile.frontend.kept_state import holders_of_user
from pipecompile.frontend.loss_reduction import LossReduction
from pipecompile.frontend.open_capture import OpenCapture
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import LossFunction, Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.frontend.training_step import restored_state
from pipecompile.graph.pytrees import map_tensors
from pipecompile.ir.links import FREE
from pipecompile.ir.option_names import known_name
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.serialization import decode, encode, read
from pipecompile.runtime import world
from pipecompile.runtime.distributed_pipeline import Engine
from pipecompile.runtime.place import check_world, running_replicas
from pipecompile.schedule.selection import placements
from pipecompile.training.materialisation import lacks_values, on_meta
from pipecompile.training.parallel_stages import Parallelize
from pipecompile.training.pipeline import Pipeline

__all__ = ["pipecompile"]

logger = logging.getLogger("pipecompile.api")


def pipecompile(
    model: nn.Module,
    sample_input: Any,
    k: int | None = None,
    *,
    loss_fn: LossFunction | None = None,
    sample_target: Any = None,
    batch_dim: BatchDim = 0,
    target_batch_dims: Any = None,
    loss_reduction: LossReduction = "mean",
    costs: str | CostFunction | None = None,
    links: LinksInput = None,
    self_check: bool = True,
    plan: Plan | str | Path | None = None,
    seed: int = 0,
    mesh: DeviceMesh | None = None,
    autocast: torch.dtype | None = None,
    step_timeout: float | None = None,
    weights: str | Path | None = None,
    shapes: Sequence[Any] = (),
    parallelize: Parallelize | None = None,
    engine: Engine = "own",
    **choices: Unpack[Choices],
) -> Pipeline:
    """Return `model` as a pipeline of `k` stages (4 unless `k` or `ranks` is given), ready to
    train.

    model           The module.
    sample_input    One minibatch, which is cut into microbatches: a tensor, a tuple of positional
                    arguments or a mapping of keyword arguments.
    loss_fn         `loss_fn(output, target)` is the scalar to train; without it the model's own
                    `loss` output is. A module is a part of the last stage, with its parameters.
    sample_target   One minibatch of targets; with it the costs include the loss.
    batch_dim       The dimension of inputs that is the batch, such as 1 for (time, batch, …): one
                    for all, or a mapping from names of inputs to the dimension of each, 0 unless
                    named, and None for what every microbatch is given whole. Outputs have it where
                    the graph has it.
    target_batch_dims
                    Where targets have the batch: a dimension, None for what every microbatch is
                    given whole, "samples" for a list or tuple with an item for each sample, or a
                    tree of these like the target's; (None,) for one tensor that is given whole.
                    Without it each tensor has the batch first, or where inputs have it.
    loss_reduction  How losses of microbatches make up that of a step: "mean" over samples; "sum",
                    where `loss_fn` returns a sum over its samples; or "weighted", where it returns
                    (loss, weight) and the loss is a mean over what the weight counts, such as
                    tokens.
    costs           A cost model (docs/design/cost-models.md), or a function from a node and its
                    call to nanoseconds. Without it costs are measured, or with `devices` those of
                    their roofline.
    links           A file that `pipecompile links` wrote, or its content; without it transfers take
                    no time.
    self_check      Compare the captured graph with the model by a training step before it is used.
    plan            A plan or its file to be run; it has its own k, costs and choices.
    seed            What random nodes draw from, together with the number of the step.
    mesh            The ranks as a mesh with a dimension "pp", one "dp" for replicas, and others for
                    `parallelize`. Without it n times the plan's ranks are n replicas.
    autocast        The type to which forwards and the loss cast, such as torch.bfloat16.
    step_timeout    Seconds that a step over ranks may take, and an evaluation for every planned
                    minibatch; then RankFaultError says on every rank which one is at fault.
                    Exchanges of FSDP2 and tensor parallelism end with the process group's timeout.
    weights         For a model on the meta device, of which each rank then holds its own stages
                    only: a safetensors file, the index or folder of several, or a checkpoint.
                    Without it modules set their parameters themselves, from `seed`.
    shapes          Further minibatches like `sample_input`, with other sizes beyond dimension 0: a
                    step takes batches of each of these shapes. The plan, its prediction and
                    `simulate()` are for `sample_input`, which is to be the largest.
    parallelize     `parallelize(stage, mesh)` divides each stage of a rank in place: `fully_shard`
                    over replicas, `parallelize_module` over another dimension of `mesh`.
    engine          What walks through the actions of a rank: a loop of our own, or "torch", the
                    runtime of torch.distributed.pipelining, which takes longer.
    choices         `help(pipecompile.Choices)` lists them: ranks, microbatches, schedule, memory …
                    With devices="8xh100" all that is not given is chosen for the shortest step of
                    `sample_input`, which is then the minibatch of all replicas together.

    Under torchrun rank 0 plans for all ranks. Raises InputError, CaptureError, InfeasibleError or
    StalePlanError, and FormatError or ScheduleError for a file that is damaged or out of order.
    """
    # From here on the ranks of a torchrun job talk to each other: what one of them refuses all do.
    world.join()
    # From what costs nothing to what costs minutes: names, kinds of values, the model, its capture,
    # the plan. Each step may rely on those before it.
    with world.failing_together():
        check_names(choices)
        known_name("engine", engine, get_args(Engine))
        _check_kinds(step_timeout, mesh, autocast, shapes)
        target = Target(
            model,
            arguments_of(model, sample_input, batch_dim=batch_dim),
            loss_fn,
            _sample_target(loss_fn, sample_target),
            costs=costs if callable(costs) else None,
            autocast=autocast,
            target_batch_dims=target_batch_dims,
            loss_reduction=loss_reduction,
        )
        _check_weights(target, weights)
    _refuse_other_models(model)
    # Anomaly detection would look for NaN in the gradients of tensors without values.
    unwatched = torch.autograd.set_detect_anomaly(False)
    with target.precision(), on_meta(model), _unchanged(target), unwatched:
        if plan is None and choices.get("devices") is None:
            request = _request(k, costs, choices, mesh)
            captured, committed = _new(target, request, links, self_check=self_check)
        else:
            committed = (
                _joint(target, k, costs, links, choices, self_check=self_check)
                if plan is None
                else _committed(plan, links, choices)
            )
            # The plan came first here, and it may be for a share of the minibatch (devices=): the
            # capture has to be of that share, or its shapes would be those of another graph.
            target = planned_target(target, committed)
            captured = _captured(target, committed.options, self_check=self_check)
        _check_fit(committed, captured, is_new=plan is None)
        # A further shape is captured and proven as the planned one was, and by every rank, since
        # `_captured` is a call that all make.
        capture = partial(_captured, options=committed.options, self_check=self_check)
        declared = declared_shapes(target, captured, committed, shapes, capture)
    # Not within `on_meta`: the pipeline gives values to its stages.
    with target.precision():
        return Pipeline(
            committed,
            captured,
            target,
            seed=seed,
            self_check=self_check,
            mesh=mesh,
            step_timeout=step_timeout,
            weights=weights,
            shapes=declared,
            parallelize=parallelize,
            engine=engine,
        )


def _sample_target(loss_fn: object, sample_target: Any) -> Any:
    """Return the target with which the loss is tried and measured, a copy, to which it may write;
    None for a loss that may be called by steps alone.
    """
    if sample_target is None or can_be_restored(loss_fn):
        return map_tensors(lambda each: each.detach().clone(), sample_target)
    logger.warning(
        "the loss moves on what nobody can put back, such as an iterator or a file, so that only "
        "steps call it: the plan does not count it, and what it is a mean of is not checked"
    )
    return None


def _check_kinds(step_timeout: object, mesh: object, autocast: object, shapes: object) -> None:
    """Raise InputError for an argument that is of another kind than it has to be."""
    is_number = isinstance(step_timeout, int | float) and 0 < step_timeout < inf
    if step_timeout is not None and not is_number:
        raise InputError(f"step_timeout={step_timeout!r}, but it is a number of seconds above 0")
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise InputError(f"mesh is a {type(mesh).__name__}; make it with init_device_mesh")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InputError(
            f"autocast={autocast!r}, but it is a type of floating point that torch casts to: "
            "torch.bfloat16 or torch.float16"
        )
    if not isinstance(shapes, list | tuple):
        raise InputError(f"shapes is a {type(shapes).__name__}, but it is a list of minibatches")


@contextmanager
def _unchanged(target: Target) -> Iterator[None]:
    """Leave the loss, what hooks and objects in modules keep and what classes of modules hold as
    they were: they may count or average something.
    """
    loss_fn, classes = target.loss_fn, {type(module) for module in target.model.modules()}
    kept: AbstractContextManager[object] = nullcontext()
    if isinstance(loss_fn, nn.Module) and not lacks_values(loss_fn):
        kept = restored_state(loss_fn)
    with callable_restored(loss_fn, *holders_of_user(target.model_with_loss), *classes), kept:
        yield


def _check_weights(target: Target, weights: str | Path | None) -> None:
    """Raise InputError if `weights` and what the model has of its own do not go together."""
    # A model of which only a part is on the meta device counts as one that is there as a whole:
    # its values come after the cut, from `weights` or from the modules themselves.
    if lacks_values(target.model):
        if target.autocast is not None:
            raise InputError(
                "autocast= is not possible for a model on the meta device, where nothing is cast; "
                "build it in the type that it trains in, with torch.device and torch.set_default_"
                "dtype"
            )
    elif weights is not None:
        raise InputError(
            "weights= is for a model on the meta device, but this one has values; load them with "
            "pipeline.load_safetensors or pipeline.checkpoint().load"
        )
    else:
        target.check_values("a pipeline")


def _refuse_other_models(model: nn.Module) -> None:
    """Raise InputError, on every rank, if some ranks have the model on meta and others its values:
    they would set them in other calls.
    """
    on_meta = [rank for rank, is_empty in enumerate(world.gather(lacks_values(model))) if is_empty]
    if on_meta and len(on_meta) < world.size():
        raise InputError(
            f"the model is on the meta device on the ranks {on_meta}, and has values on others; "
            "build it alike on all ranks: on meta each rank sets or reads the values of its own "
            "stages (weights=), also those that one rank alone would send"
        )


def _request(
    k: int | None, costs: str | CostFunction | None, choices: Choices, mesh: DeviceMesh | None
) -> PlanRequest | None:
    """Return what is asked for; None on ranks that do not plan, which may lack the files that costs
    and links name.
    """

    def on_first() -> PlanRequest:
        # Within `on_first`, since k may be that of a layout in a file, which only rank 0 has to
        # have.
        replicas = choices.get("replicas") or _replicas_here(k, choices, mesh)
        name = "function" if callable(costs) else costs
        all_choices: Choices = {**choices, "replicas": replicas}
        return plan_request(k=k, costs=name, **all_choices)

    return world.run_on_first(on_first)


def _joint(
    target: Target,
    k: int | None,
    costs: str | CostFunction | None,
    links: LinksInput,
    choices: Choices,
    *,
    self_check: bool,
) -> Plan:
    """Return the same plan on every rank: the best one that is found for the devices."""
    name = "function" if callable(costs) else costs

    def on_first() -> bytes:
        request = joint_request(links=links, k=k, costs=name, **choices)
        return encode(joint_plan_of(target, request, self_check=self_check))

    return decode(world.share_from_first(on_first), Plan, origin="rank 0")


def _replicas_here(k: int | None, choices: Choices, mesh: DeviceMesh | None) -> int:
    """Return how many replicas run of a pipeline of these choices."""
    if world.size() == 1:
        return 1
    # 8 processes and a plan of 4 ranks are 2 replicas. To know the 4, all choices are checked once
    # without replicas: whether shards go with their number can be said when that is known.
    shape: Choices = {**choices, "shard": None}
    return max(1, running_replicas(max(placements(requested_options(k=k, **shape))[0]) + 1, mesh))


def _new(
    target: Target, request: PlanRequest | None, links: LinksInput, *, self_check: bool
) -> tuple[Captured, Plan]:
    """Return the captured model and a plan for it, the same plan on every rank; rank 0 makes it."""
    # Who does what, where lines with an arrow are calls that all ranks make together:
    #     rank 0                                    other ranks
    #     options, perhaps by a small search   ──►  options
    #     capture and prove; its method        ──►  capture by the same method, unproven
    #     make the plan, asking for times     ◄──►  `assist`: measure the stages that are asked for
    #     plan                                 ──►  plan
    # Files of costs and links are read by rank 0 alone, so no other machine has to have them.
    connected, chosen = FREE, None

    def options_on_first() -> bytes:
        nonlocal connected, chosen
        assert request is not None
        connected = links_for(request.options, links)
        chosen = chosen_plan(target, request, connected)
        return encode(target_options(target, request) if chosen is None else chosen.options)

    options = decode(world.share_from_first(options_on_first), Options, origin="rank 0")
    captured = _captured(target, options, self_check=self_check)
    # Both sides decide by the same options whether stages are measured: if only one did, it would
    # wait for the other until the process group's timeout.
    if world.rank():
        assist(target, options, captured)

    def plan_on_first() -> bytes:
        assert request is not None
        return encode(plan_with_choice(target, request, captured, connected, chosen))

    plan = world.share_from_first(plan_on_first)
    return captured, decode(plan, Plan, origin="rank 0")


def _committed(plan: Plan | str | Path, links: LinksInput, choices: Choices) -> Plan:
    """Return the plan that a user gives. Raise InputError if there are choices beside it, and
    ScheduleError if it is not sound.
    """
    # They would have no effect, and a user would take the pipeline for one that follows them.
    if choices or links is not None:
        given = ", ".join(sorted(choices)) or "links"
        raise InputError(
            f"a committed plan has its choices already; leave out {given}, or plan again "
            "without `plan`"
        )
    committed = plan if isinstance(plan, Plan) else read(plan, Plan)
    if faults := findings(committed):
        raise ScheduleError(f"the plan is not sound: {faults[0].message}; plan again")
    return committed


def _captured(
    target: Target, options: Options, *, self_check: bool, opened: OpenCapture | None = None
) -> Captured:
    """Return the same graph on every rank, of what is `opened` for several lengths if it can be.

    Rank 0 proves it, and the others capture by the method that it used.
    """
    # The proof runs a training step on real values, which takes time and memory: once is enough,
    # and the digests are compared afterwards (`_check_fit`). The method must be rank 0's: another
    # way to capture gives nodes of other names, and the plan's stages name nodes.
    captured = world.run_on_first(
        lambda: capture_target(target, options, verify=self_check, opened=opened)
    )
    method = world.share_from_first(
        lambda: captured.capture.method.encode() if captured else b""
    ).decode()
    with world.failing_together():
        return captured or capture_target(
            target, options, verify=False, method=method, opened=opened
        )


def _check_fit(plan: Plan, captured: Captured, *, is_new: bool) -> None:
    """Raise on all ranks if a plan is not for this model and these processes; a plan that rank 0
    has just made is checked as one from a file is.
    """
    with world.failing_together():  # a rank may have built another model
        try:
            check_current(plan, captured)
        except StalePlanError as error:
            if is_new:
                raise StalePlanError(
                    "this rank has another graph of the model than rank 0, which made the plan; "
                    "make the model, its mode, its inputs and what its forward goes by (a set of "
                    "texts, an environment variable, the number of the rank) alike on all ranks"
                ) from error
            raise
        check_world(plan)
