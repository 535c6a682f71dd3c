"""A graph of the model cut into stages, for modules that are in given modes (training or
evaluation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from pipecompile.codegen.regions import EncodedRuns, Regions
from pipecompile.codegen.stages import BoundaryTensor, StageModule, emit
from pipecompile.errors import InputError
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.signature import OutputStructure
from pipecompile.graph.attributes import is_same_value, module_settings
from pipecompile.graph.autograd_context import current_context
from pipecompile.graph.ties import Tie, ties_of
from pipecompile.runtime.distributed import BoundaryShape

__all__ = ["Program", "modes_of"]

ABSENT = object()


class Program:
    """A graph of the model cut as the plan says, captured while its modules were in the modes
    `modes`.
    """

    def __init__(
        self,
        captured: Capture,
        module: fx.GraphModule,
        assignment: Mapping[str, int],
        regions: Regions,
        savings: EncodedRuns,
    ) -> None:
        self.captured = captured
        self._context = current_context()
        self.remember()
        self.modes = modes_of(captured.model)
        self.stages: tuple[StageModule, ...] = emit(module, assignment, regions, savings)
        self.ties: dict[str, Tie] = ties_of(module, module.graph, captured.first_names)
        self.inputs = [
            BoundaryShape((tuple(node.meta["val"].shape), node.meta["val"].dtype, False))
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        self.results = [BoundaryShape((tuple(v.shape), v.dtype, False)) for v in output.meta["val"]]

    @property
    def outputs(self) -> OutputStructure:
        """How the model's output is put together from its output tensors."""
        return self.captured.outputs

    def boundary_shapes(self) -> list[list[BoundaryShape]]:
        """The tensors that enter each stage."""
        return [self.inputs, *(list(map(_shape, stage.inputs)) for stage in self.stages[1:])]

    def remember(self) -> None:
        """Remember the model as it is now: `check_unchanged` compares it, except for tensors and
        what its forward sets.
        """
        self._settings = dict(_settings(self.captured))
        self._trainable = {
            name: p.requires_grad for name, p in self.captured.model.named_parameters()
        }

    def check_unchanged(self) -> None:
        """InputError if the model, or the autocast around it, is not as it was when the graph was
        captured.
        """
        now, then = current_context(), self._context
        if (now.autocast, now.caches_casts) != (then.autocast, then.caches_casts):
            raise InputError(
                "autocast is not as it was when the model was compiled; compile and step under "
                "the same autocast, or put it into the model's forward"
            )
        before, after = self._settings, dict(_settings(self.captured))
        different = [
            name
            for name in before.keys() | after.keys()
            if not is_same_value(before.get(name, ABSENT), after.get(name, ABSENT))
        ]
        if different:
            raise InputError(
                f"{min(different)} has changed since the model was compiled, and the graph has its "
                "old value; compile the model again, or keep what changes in a buffer"
            )
        changed = [
            n
            for n, p in self.captured.model.named_parameters()
            if p.requires_grad != self._trainable[n]
        ]
        if changed:
            raise InputError(
                f"requires_grad of {changed[0]} changed since the model was compiled; compile it "
                "again"
            )

    def check_joinable(self, values: Sequence[Tensor]) -> None:
        """InputError if the values that microbatches give for an output have no batch dimension to
        be joined along.
        """
        for index, (value, batched) in enumerate(zip(values, self.outputs.batched, strict=True)):
            guards = self.captured.guards
            grows = (
                value.dim() > 0 and value.shape[0] == guards.batch if guards.is_fixed else batched
            )
            if value.dim() and not grows:
                raise InputError(
                    f"output {index} of shape {tuple(value.shape)} does not have the batch as "
                    "dimension 0, so the outputs of the microbatches cannot be joined; return it "
                    "per sample, or evaluate the model itself"
                )

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Put modules into the modes of this program for the block."""
        self.check_unchanged()
        model = self.captured.model
        before = {part: part.training for part in model.modules()}
        for path, part in model.named_modules():
            part.training = path in self.modes
        for stage in self.stages:
            stage.module.training = model.training
        try:
            yield
        finally:
            for part, flag in before.items():
                part.training = flag


def modes_of(model: nn.Module) -> frozenset[str]:
    """The paths of the modules that are in train mode."""
    return frozenset(path for path, part in model.named_modules() if part.training)


def _settings(captured: Capture) -> Iterator[tuple[str, Any]]:
    """The attributes of modules that a forward may read, by path, without tensors and what it sets
    for itself.
    """
    for path, module in captured.model.named_modules():
        for name, value in module_settings(module).items():
            full = f"{path}.{name}" if path else name
            if full not in captured.assigned_attributes:
                yield full, value


def _shape(edge: BoundaryTensor) -> BoundaryShape:
    return BoundaryShape((edge.shape, edge.dtype, edge.has_gradient))
