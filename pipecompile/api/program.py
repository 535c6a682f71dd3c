"""A graph of the model cut into stages, in one mode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx, nn

from pipecompile.codegen.regions import Regions, Savings
from pipecompile.codegen.stages import Edge, StageModule, emit
from pipecompile.errors import InputError
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.signature import Outputs
from pipecompile.graph.attributes import same, settings
from pipecompile.graph.autograd_context import observed
from pipecompile.graph.ties import Tie, ties_of
from pipecompile.runtime.distributed import Shape

__all__ = ["Program", "modes_of"]

GONE = object()


class Program:
    """A graph of the model cut as the plan says, in one mode (training or evaluation)."""

    def __init__(
        self,
        captured: Capture,
        module: fx.GraphModule,
        assignment: Mapping[str, int],
        regions: Regions,
        savings: Savings,
    ) -> None:
        self.captured = captured
        self._surroundings = observed()
        self.remember()
        self.modes = modes_of(captured.model)
        self.stages: tuple[StageModule, ...] = emit(module, assignment, regions, savings)
        self.ties: dict[str, Tie] = ties_of(module, module.graph, captured.first_names)
        self.inputs = [
            Shape((tuple(node.meta["val"].shape), node.meta["val"].dtype, False))
            for node in module.graph.nodes
            if node.op == "placeholder"
        ]
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        self.results = [Shape((tuple(v.shape), v.dtype, False)) for v in output.meta["val"]]

    @property
    def outputs(self) -> Outputs:
        """How the model's output tensors make its output."""
        return self.captured.outputs

    def boundary_shapes(self) -> list[list[Shape]]:
        """The tensors that enter each stage."""
        return [self.inputs, *(list(map(_shape, stage.inputs)) for stage in self.stages[1:])]

    def remember(self) -> None:
        """From now on the model must stay as it is, but for the values of its tensors and what its forward sets."""
        self._settings = dict(_settings(self.captured))
        self._trainable = {
            name: p.requires_grad for name, p in self.captured.model.named_parameters()
        }

    def check_surroundings(self) -> None:
        """InputError if what the graph was captured under has changed: types and gradients would not fit it."""
        around, then = observed(), self._surroundings
        if (around.autocast, around.cached) != (then.autocast, then.cached):
            raise InputError(
                "autocast is not as it was when the model was compiled; compile and step under the same autocast, "
                "or put it into the model's forward"
            )
        now = dict(_settings(self.captured))
        names = self._settings.keys() | now.keys()
        different = [
            name for name in names if not same(self._settings.get(name, GONE), now.get(name, GONE))
        ]
        if different:
            raise InputError(
                f"{min(different)} is not what it was when the model was compiled, and the graph has it as it was; "
                "compile the model again, or keep what changes in a buffer"
            )
        changed = [
            n
            for n, p in self.captured.model.named_parameters()
            if p.requires_grad != self._trainable[n]
        ]
        if changed:
            raise InputError(
                f"requires_grad of {changed[0]} changed since the model was compiled; compile it again"
            )

    def check_joinable(self, values: Sequence[Tensor]) -> None:
        """InputError if an output has no batch dimension along which those of several microbatches could be joined."""
        for index, (value, batched) in enumerate(zip(values, self.outputs.batched, strict=True)):
            guards = self.captured.guards
            grows = value.dim() > 0 and value.shape[0] == guards.batch if guards.fixed else batched
            if value.dim() and not grows:
                raise InputError(
                    f"output {index} of shape {tuple(value.shape)} does not have the batch as dimension 0, so those of "
                    "the microbatches cannot be joined; return it per sample, or evaluate the model itself"
                )

    @contextmanager
    def mode(self) -> Iterator[None]:
        """Modules are in the modes of this program in the block."""
        self.check_surroundings()
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
    """What a forward may read of the modules besides the values of tensors, without what it sets for itself."""
    for path, module in captured.model.named_modules():
        for name, value in settings(module).items():
            full = f"{path}.{name}" if path else name
            if full not in captured.sets:
                yield full, value


def _shape(edge: Edge) -> Shape:
    return Shape((edge.shape, edge.dtype, edge.gradient))
