"""A captured model cut into stages that run in one process, compared with the uncut graph."""

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
from pipecompile.runtime.one_process import step
from pipecompile.runtime.rank_step import Minibatch
from pipecompile.runtime.stage import EagerStage

NOW = StreamKey(seed=5, step=0, microbatch=0)


def loss_of(outputs: Sequence[Tensor], target: object) -> Tensor:
    """Return a loss of all outputs that carry gradients."""
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
    """Return `model` in its present mode with its results for `call`; the model stays as it was."""
    captured = capture(model, call)
    units = _units(captured.instantiate(call))
    start = copy.deepcopy(model.state_dict())
    whole = captured.instantiate(call)
    apply_passes(whole.graph, [Seed(), EnterContexts()])
    whole.recompile()
    with use_stream(NOW):
        loss = loss_of(whole(*captured.inputs.flatten(call)), None)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.load_state_dict(start)
    model.zero_grad(set_to_none=True)
    return Case(captured, call, units, loss.detach(), gradients, buffers)


def _units(module: fx.GraphModule) -> tuple[tuple[str, ...], ...]:
    """Return runs of nodes between which the graph may be cut; no group spans two of them."""
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


def split(case: Case, cuts: Sequence[int]) -> tuple[fx.GraphModule, tuple[StageModule, ...]]:
    """Return the graph and its stages, which begin at the units `cuts`."""
    module = case.capture.instantiate(case.call)
    stages = {
        name: sum(unit >= cut for cut in cuts)
        for unit, names in enumerate(case.units)
        for name in names
    }
    return module, emit(module, stages)


def eager_stages(
    case: Case, module: fx.GraphModule, emitted: Sequence[StageModule]
) -> list[EagerStage]:
    """Return the stages of the cut graph `module` as one process runs them.

    The gradients of tied parameters are handed on.
    """
    by_name = dict(case.capture.model.named_parameters())
    ties = ties_of(module, module.graph, case.capture.first_names).items()
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


def train(case: Case, cuts: Sequence[int]) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss, gradients and buffers after a forward and backward of one microbatch.

    The model stays as it was.
    """
    model = case.capture.model
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    eager = eager_stages(case, *split(case, cuts))
    last = len(eager) - 1
    order = [Action(s, Kind.FORWARD, 0) for s in range(last + 1)]
    order += [Action(s, Kind.BACKWARD, 0) for s in reversed(range(last + 1))]
    try:
        ((loss,),) = step(eager, order, Minibatch([case.inputs], [None], NOW.seed, NOW.step)).values
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return loss, gradients, {name: buffer.clone() for name, buffer in model.named_buffers()}
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])


def assert_equal(case: Case, cuts: Sequence[int]) -> None:
    """Assert that these stages give the uncut graph's loss, gradients and buffers, bit for bit."""
    loss, gradients, buffers = train(case, cuts)
    assert torch.equal(loss, case.loss)
    assert gradients.keys() == case.gradients.keys()
    assert [
        name for name in gradients if not torch.equal(gradients[name], case.gradients[name])
    ] == []
    assert [name for name in buffers if not torch.equal(buffers[name], case.buffers[name])] == []
