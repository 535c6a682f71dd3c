"""A captured model cut into stages that run in one process, for tests that compare them with the uncut graph."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pipecompile.codegen.stages import StageModule, emit
from pipecompile.frontend.capture import capture
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.random_streams import StreamKey, use_stream
from pipecompile.graph.ties import ties_of
from pipecompile.ir.schedule import Action, Kind
from pipecompile.passes.autograd_context import EnterContexts
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.passes.seed import Seed
from pipecompile.runtime.local import step
from pipecompile.runtime.stage import EagerStage

NOW = StreamKey(seed=5, step=0, microbatch=0)


def loss_of(outputs: Sequence[Tensor], target: object) -> Tensor:
    """A loss of any outputs that carry gradients."""
    return torch.stack(
        [value.float().square().mean() for value in outputs if value.requires_grad]
    ).sum()


@dataclass(frozen=True)
class Case:
    """A captured model, one microbatch, and what the unsplit graph gives for it."""

    capture: Capture
    call: Arguments
    units: tuple[tuple[str, ...], ...]  # nodes that may not be cut apart, in order
    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @property
    def inputs(self) -> list[Tensor]:
        return self.capture.inputs.flatten(self.call)


def case_of(model: nn.Module, call: Arguments) -> Case:
    """`model` in its present mode, and what it gives for `call`; it is as before afterwards."""
    found = capture(model, call)
    units = _units(found.instantiate(call))
    start = copy.deepcopy(model.state_dict())
    whole = found.instantiate(call)
    apply_passes(whole.graph, [Seed(), EnterContexts()])
    whole.recompile()
    with use_stream(NOW):
        loss = loss_of(whole(*found.inputs.flatten(call)), None)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(start)
    model.zero_grad(set_to_none=True)
    return Case(found, call, units, loss.detach(), gradients, buffers)


def _units(module: fx.GraphModule) -> tuple[tuple[str, ...], ...]:
    """Runs of nodes between which the graph may be cut: no group spans two."""
    apply_passes(module.graph, [Group()])
    nodes = [node for node in module.graph.nodes if node.op != "get_attr"]
    groups = [node.meta["group"] for node in nodes]
    last = {group: index for index, group in enumerate(groups) if group is not None}
    units, run, until = [], [], 0
    for index, node in enumerate(nodes):
        run.append(node.name)
        until = max(until, last.get(groups[index], index))
        if index >= until:
            units.append(tuple(run))
            run = []
    return tuple(units)


def split(made: Case, cuts: Sequence[int]) -> tuple[fx.GraphModule, tuple[StageModule, ...]]:
    """The graph, and its stages that begin at these units."""
    module = made.capture.instantiate(made.call)
    stages = {
        name: sum(unit >= cut for cut in cuts)
        for unit, names in enumerate(made.units)
        for name in names
    }
    return module, emit(module, stages)


def eager_stages(
    made: Case, module: fx.GraphModule, emitted: Sequence[StageModule]
) -> list[EagerStage]:
    """The stages as one process runs them, with the gradients of tied parameters handed on; `module` was cut."""
    by_name = dict(made.capture.model.named_parameters())
    ties = ties_of(module, module.graph, made.capture.first_names).items()
    shared = [(by_name[name], tie.stages) for name, tie in ties if name in by_name]
    return [
        EagerStage(
            stage.module,
            gradient_inputs=stage.gradient_inputs,
            loss=loss_of if stage is emitted[-1] else None,
            buffers=stage.buffers,
            random=stage.random,
            tied_to_earlier=[parameter for parameter, where in shared if stage.index in where[1:]],
            tied_to_later=[parameter for parameter, where in shared if stage.index in where[:-1]],
        )
        for stage in emitted
    ]


def train(made: Case, cuts: Sequence[int]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Loss, gradients and buffers after a forward and backward of one microbatch; the model is as before afterwards."""
    model = made.capture.model
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    eager = eager_stages(made, *split(made, cuts))
    last = len(eager) - 1
    order = [Action(s, Kind.FORWARD, 0) for s in range(last + 1)]
    order += [Action(s, Kind.BACKWARD, 0) for s in reversed(range(last + 1))]
    try:
        (loss,) = step(eager, order, [made.inputs], [None], seed=NOW.seed, step=NOW.step)
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return loss, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])


def assert_equal(made: Case, cuts: Sequence[int]) -> None:
    """Stages that begin at these units give the loss, gradients and buffers of the uncut graph, bit for bit."""
    loss, gradients, buffers = train(made, cuts)
    assert torch.equal(loss, made.loss)
    assert gradients.keys() == made.gradients.keys()
    assert [
        name for name in gradients if not torch.equal(gradients[name], made.gradients[name])
    ] == []
    assert [name for name in buffers if not torch.equal(buffers[name], made.buffers[name])] == []
