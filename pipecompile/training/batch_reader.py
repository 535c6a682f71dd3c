"""Reads a user's batch: checks it against the plan, and cuts it into microbatches."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import MicrobatchSizes, shape_of
from pipecompile.frontend.signature import arguments_of, call_of
from pipecompile.frontend.target_cut import cut_targets
from pipecompile.graph.pytrees import register_dataclasses
from pipecompile.graph.storages import is_irregular, layout_name
from pipecompile.ir.plan import Plan
from pipecompile.training.program import Program
from pipecompile.training.programs import Programs
from pipecompile.training.runner import Runner

__all__ = ["BatchReader", "CutBatch", "input_and_target"]


class CutBatch(NamedTuple):
    """A batch cut into microbatches.

    `shape` is the index of its declared shape, 0 for the planned one. `rows` are the input tensors
    of each microbatch where they run, and `given` those as they were given. Unless it `is_given`,
    they have no values.
    """

    shape: int
    sizes: MicrobatchSizes
    rows: Sequence[Sequence[Tensor]]
    given: Sequence[Sequence[Tensor]]
    is_given: bool = True

    def check(self, program: Program, remainder: Program | None) -> None:
        """Raise InputError if a microbatch is not what the graph that it runs on is for."""
        if not self.is_given:
            return
        whole = self.given if remainder is None else self.given[:-1]
        program.check_inputs(whole)
        if remainder is not None:
            remainder.check_inputs(self.given[-1:])


class BatchReader:
    """Reads batches for the first stage, and targets for the last one, where these run.

    `target_batch_dims` says along which dimensions targets are cut, see `cut_targets`.
    """

    def __init__(
        self, plan: Plan, programs: Programs, runner: Runner, target_batch_dims: Any = None
    ) -> None:
        self._plan = plan
        self._target_batch_dims = target_batch_dims
        self._declared = programs.declared
        self._runner = runner
        # By the shapes and types of the tensors of a batch.
        self._read_before: dict[tuple[Any, ...], tuple[int, MicrobatchSizes]] = {}

    def read(self, batch: Any) -> CutBatch:
        """Return the batch cut into microbatches.

        InputError if it differs from each declared shape in more than the number of samples. None
        is a batch of the planned sizes, on a rank that reads none of it.
        """
        if batch is None:
            return self._planned_batch()
        captured = self._declared[0].captured
        try:
            tensors = captured.inputs.flatten(call_of(batch))
        except InputError:
            arguments_of(captured.model, batch)  # says more of what the model does not take
            raise
        refuse_without_rows(captured.inputs.tensor_names, tensors)
        # Most batches are like the one before.
        key = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        if key not in self._read_before:
            self._read_before[key] = self._sizes(tensors)
        shape, sizes = self._read_before[key]
        dims = captured.inputs.batch_dims
        given = sizes.rows(tensors, dims)
        here = [self._runner.at_stage(0, tensor) for tensor in tensors]
        # Ranks without the first stage move nothing, and neither does one whose batch is on its
        # device already: then the same rows serve for both, and the batch is cut once.
        is_here = all(map(operator.is_, here, tensors))
        return CutBatch(shape, sizes, given if is_here else sizes.rows(here, dims), given)

    def _planned_batch(self) -> CutBatch:
        """Return a batch of the planned sizes, without values; InputError if this rank needs some.

        The ranks of the first and of the last stage need it both: the digests of what they were
        given show that inputs and targets come from loaders in the same order.
        """
        if self._runner.reads_batch:
            raise InputError(
                "the batch is None on a rank that has the first or the last stage; give both the "
                "same batch"
            )
        planned, inputs = self._declared[0], self._declared[0].captured.inputs
        # Only shapes are needed, for what ranks say of the step: a batch on the meta device costs
        # nothing.
        row = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype, _ in planned.inputs]
        (size,) = MicrobatchSizes.of(
            row, inputs.tensor_names, planned.input_shapes, inputs.batch_dims
        ).sizes
        rows = [row] * self._plan.microbatches
        sizes = MicrobatchSizes(size, (size,) * len(rows))
        return CutBatch(0, sizes, rows, rows, is_given=False)

    def _sizes(self, tensors: Sequence[Tensor]) -> tuple[int, MicrobatchSizes]:
        """Return the index of the declared shape of a batch, and how it is cut."""
        inputs = self._declared[0].captured.inputs
        names, dims = inputs.tensor_names, inputs.batch_dims
        declared = [each.input_shapes for each in self._declared]
        shape = shape_of(tensors, names, declared, dims)
        sizes = MicrobatchSizes.of(tensors, names, declared[shape], dims)
        for name, tensor, planned in zip(names, tensors, self._declared[0].inputs, strict=True):
            if tensor.dtype != planned[1]:
                raise InputError(
                    f"{name} is of type {tensor.dtype}, but the plan was made for {planned[1]}; "
                    "convert it, or plan again with such a sample_input"
                )
        return shape, sizes

    def read_planned(self, batch: Any) -> CutBatch:
        """Return what `read` does; InputError if there are more microbatches than planned, or if
        an input cannot be trained on.
        """
        cut = self.read(batch)
        names = self._declared[0].captured.inputs.tensor_names
        refuse_untrainable_inputs(names, cut.given[0])
        if len(cut.rows) > self._plan.microbatches:
            raise InputError(
                f"the batch holds {len(cut.rows)} microbatches, but the plan was made for "
                f"{self._plan.microbatches}: memory and schedule would differ; give a smaller "
                "batch, or plan again with more microbatches"
            )
        return cut

    def targets(self, sizes: MicrobatchSizes, target: Any) -> list[Any]:
        """Return the target of each microbatch; InputError if it cannot be cut like the batch."""
        # Otherwise a dataclass would be one leaf, and the tensors in it would not be cut.
        register_dataclasses(target)
        # A plain tensor is most of what losses take, and torch flattens slowly.
        leaves = [target] if isinstance(target, Tensor) else tree_leaves(target)
        if any(isinstance(each, Tensor) and each.is_meta for each in leaves):
            raise InputError("the target is on the meta device, and so has no values; give some")
        move = partial(self._runner.at_stage, self._plan.k - 1)
        here = move(target) if isinstance(target, Tensor) else tree_map_only(Tensor, move, target)
        dims = self._declared[0].captured.inputs.batch_dims
        return cut_targets(here, sizes.sizes, self._target_batch_dims, dims)


def refuse_without_rows(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise InputError for an input of which no microbatches can be cut."""
    for name, tensor in zip(names, tensors, strict=True):
        if is_irregular(tensor):
            raise InputError(
                f"{name} is {layout_name(tensor)}, of which no microbatches can be cut; give a "
                "dense tensor (to_dense, to_padded_tensor)"
            )
        if tensor.is_meta:
            raise InputError(f"{name} is on the meta device, and so has no values; give some")


def refuse_untrainable_inputs(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raise InputError for an input that a plain loop would give a gradient, or could not save."""
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.requires_grad:
            raise InputError(
                f"{name} requires a gradient, but a pipeline computes gradients for parameters "
                "only: what comes before it would not train; make that a part of the model, or "
                "detach it"
            )
        if tensor.is_inference():
            raise InputError(
                f"{name} was made under torch.inference_mode, and cannot be saved for a backward; "
                "clone it outside of that"
            )


def input_and_target(item: Any) -> tuple[Any, Any]:
    """Return the two parts of a minibatch of a run; InputError if it is no pair."""
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise InputError(
            f"batches yields a {type(item).__name__}, but each is a pair (input, target); give "
            "(input, None) if the model computes its own loss"
        )
    return item[0], item[1]
