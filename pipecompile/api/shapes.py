"""Further shapes of batches for one pipeline: checked, and held against the plan's memory."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from pipecompile.api.costs import profiled
from pipecompile.codegen.regions import EncodedRuns, Regions
from pipecompile.codegen.transfer import (
    transfer,
    transfer_copied,
    transfer_encodings,
    transfer_regions,
)
from pipecompile.cost_models.measured import CachedCosts
from pipecompile.cost_models.protocol import FREE_CALL
from pipecompile.errors import InputError, PipecompileError
from pipecompile.frontend.signature import Arguments, InputStructure, arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, open_capture
from pipecompile.ir.copied_nodes import with_copies
from pipecompile.ir.graph import FUSED_ATTENTION
from pipecompile.ir.plan import Plan
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.size import size_text
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.stage import footprint_of
from pipecompile.planner.draft import planned_graph
from pipecompile.runtime import world
from pipecompile.schedule.named_orders import weight_copies
from pipecompile.schedule.stages import memory_by_rank
from pipecompile.training.materialisation import lacks_values
from pipecompile.training.programs import DeclaredShape

__all__ = ["declared_shapes"]

logger = logging.getLogger("pipecompile.api")


def declared_shapes(
    target: Target,
    planned: Captured,
    plan: Plan,
    samples: Sequence[Any],
    capture: Callable[..., Captured],
) -> list[DeclaredShape]:
    """Return the shapes of `samples`, minibatches like the planned one, each with its
    `capture(target, opened=…)`: they share one where lengths can be open.

    Raise InputError if one differs from the planned one in more than sizes, if it is declared
    twice, or if it may need more memory than a rank has by the plan. Every rank must call this.
    """
    targets: list[Target] = []
    for index, sample in enumerate(samples):
        # Each is compared with all before it, so two equal ones among the further shapes are found
        # too.
        with _naming(index):
            known = [target, *targets]
            other = _target_with(target, planned.capture.inputs, known, sample)
            # For its error, if the samples are no so many equal parts.
            other.microbatches(plan.options.microbatches)
            targets.append(other)
    opened = open_capture(planned, targets, plan.options) if targets else None
    shapes: list[DeclaredShape] = []
    for index, other in enumerate(targets):
        with _naming(index):
            shapes.append(DeclaredShape(other, capture(other, opened=opened)))
    # After the loop, in which all ranks capture: memory is the same wherever it is computed.
    world.run_on_first(partial(_check_memory, plan, target, planned, shapes))
    return shapes


@contextmanager
def _naming(index: int) -> Iterator[None]:
    """Say in an error of the block which shape it is of."""
    try:
        yield
    except PipecompileError as error:
        # The same kind of error, since exit codes and callers tell errors apart by it.
        raise type(error)(f"shapes[{index}]: {error}") from error


def _target_with(
    target: Target, inputs: InputStructure, known: Sequence[Target], sample: Any
) -> Target:
    """Return the target with `sample` as its minibatch.

    Raise InputError if the sample is not like the `known` ones.
    """
    call = arguments_of(target.model, sample, batch_dim=target.call.batch_dim)
    # The targets are of the planned shape.
    other = replace(target, call=call, targets=None)
    if not lacks_values(target.model):
        other.check_values("a pipeline")
    tensors = inputs.flatten(other.call)
    for name, tensor, planned in zip(
        inputs.tensor_names, tensors, inputs.flatten(target.call), strict=True
    ):
        if tensor.dtype != planned.dtype:
            raise InputError(
                f"{name} is of type {tensor.dtype}, but that of sample_input is {planned.dtype}; "
                "convert it: shapes differ in sizes only"
            )
    if any(_sizes(inputs, other.call) == _sizes(inputs, each.call) for each in known):
        raise InputError(
            "it differs from sample_input, or from a shape before it, in the number of samples at "
            "most, of which a pipeline takes any anyway; leave it out"
        )
    return other


def _check_memory(
    plan: Plan, target: Target, planned: Captured, shapes: Sequence[DeclaredShape]
) -> None:
    """Warn if a rank may hold more in a step of another shape than in one of the planned shape.

    Raise InputError instead if the plan keeps caps: they are proven for the planned shape alone.
    """
    if not shapes:
        return
    as_planned = _ShapeProgram(plan.assignment, plan.copied, plan.regions, plan.encoded_runs)
    # Both sides by the same rule, the planned one too, although the plan has a prediction: that
    # counts the loss, which a further shape has no targets for. So only differences of shapes
    # count.
    before = _memory(plan, target, planned, as_planned)
    for shape in shapes:
        for rank, pair in enumerate(zip(before, _memory_at(plan, planned, shape), strict=True)):
            own, other = (memory.total.bound for memory in pair)
            if other <= own:
                continue
            message = (
                f"microbatches of {_described(shape.captured)} may need {size_text(other)} on rank "
                f"{rank}, but those of the plan, {_described(planned)}, {size_text(own)}; give the "
                "largest shape as sample_input, or fewer samples in this one"
            )
            if plan.options.memory_bytes is not None:
                raise InputError(message)
            logger.warning(message)


def _memory_at(plan: Plan, planned: Captured, shape: DeclaredShape) -> Sequence[RankMemory]:
    """Return what ranks hold at their peaks where the graph of a shape is cut like the plan."""
    source, module = planned.capture.graph, shape.captured.module
    # The nodes of another capture may have other names, so the cut is carried over by
    # correspondence, and by the stages that hold the parameters that a node reads.
    holders = {n: p.stages for p in plan.parameters for n in (p.name, *p.aliases)}
    stages = transfer(plan.assignment, source, module, holders)
    copied = transfer_copied(plan.copied, source, module, stages, holders)
    regions = transfer_regions(plan.regions, source, module, stages, copied)
    encoded_runs = transfer_encodings(plan.encoded_runs, source, module, stages, copied)
    program = _ShapeProgram(stages, copied, regions, encoded_runs)
    return _memory(plan, shape.target, shape.captured, program)


class _ShapeProgram(NamedTuple):
    """What stages run: the stage of each node, the copied nodes, and what is recomputed and
    encoded.
    """

    stages: Mapping[str, int]
    copied: frozenset[str]
    regions: Regions
    encoded_runs: EncodedRuns


def _memory(
    plan: Plan, target: Target, captured: Captured, program: _ShapeProgram
) -> Sequence[RankMemory]:
    # Only sizes count here, so every call is free. The loss is left out, since targets of other
    # shapes are not known.
    sizes = CachedCosts(defaultdict(lambda: FREE_CALL), plan.allocator, FUSED_ATTENTION)
    graph = profiled(replace(target, targets=None), plan.microbatches, captured, sizes)
    graph = planned_graph(graph, plan.options, plan.links)
    names = tuple(node.name for node in graph.nodes if node.name in program.copied)
    cut = with_copies(msgspec.structs.replace(graph, copied=names), program.stages)
    ranges = LiveRanges.of(cut.graph, plan.options)
    copies = weight_copies(plan.schedule.name, plan.schedule.placement, plan.microbatches)
    held = []
    for index, stage in enumerate(plan.stages):
        runs = program.encoded_runs.get(index, ())
        footprint = footprint_of(
            ranges.of_stage(index, plan.schedule.placement),
            [name for name, other in cut.assignment.items() if other < index],
            [name for name, other in cut.assignment.items() if other == index],
            [cut.names_in(index, region) for region in program.regions.get(index, ())],
            [(cut.names_in(index, names), encodings) for names, encodings in runs],
            copies[index],
        )
        held.append(msgspec.structs.replace(stage, footprint=footprint))
    return memory_by_rank(held, plan.schedule, plan.allocator)


def _sizes(inputs: InputStructure, call: Arguments) -> list[list[int | None]]:
    """Return what tells shapes apart: all sizes but that of the batch."""
    pairs = zip(inputs.flatten(call), inputs.batch_dims, strict=True)
    # (8, 128) and (4, 128) are one shape, (8, 128) and (8, 64) are two: with the batch first both
    # of the former are [None, 128].
    return [[None if i == dim else size for i, size in enumerate(t.shape)] for t, dim in pairs]


def _described(captured: Captured) -> str:
    inputs = captured.capture.inputs
    pairs = zip(inputs.tensor_names, inputs.flatten(captured.sample), strict=True)
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in pairs)
