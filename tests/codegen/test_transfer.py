"""The stages of the training graph, transferred to the graph of the evaluation."""

from __future__ import annotations

from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import example, first

from pipecompile.codegen.stages import emit
from pipecompile.codegen.transfer import transfer
from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.ties import ties_of

Holders = dict[str, tuple[int, ...]]


def cut_in(parts: int, found: Capture, call: Arguments) -> tuple[dict[str, int], Holders]:
    """The training graph in parts of as many nodes, and which of them hold what."""
    module = found.instantiate(call)
    nodes = [node for node in module.graph.nodes if node.op != "get_attr"]
    assignment = {node.name: index * parts // len(nodes) for index, node in enumerate(nodes)}
    for node in nodes:
        if node.target is getitem:  # only tensors cross a boundary, and no tuple of them
            assignment[node.name] = assignment[node.args[0].name]
    emit(module, assignment)
    canonical = {
        alias: name for name, aliases in found.aliases.items() for alias in (name, *aliases)
    }
    ties = ties_of(module, module.graph, canonical)
    return assignment, {
        name: ties[first].stages for name, first in canonical.items() if first in ties
    }


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "unet", "sequential"])
def test_every_node_lies_where_its_parameters_do(name: str) -> None:
    target = example(name)
    call = first(2, target.call)
    assignment, holders = cut_in(3, found := capture(target.model, call), call)
    evaluated = capture(target.model.eval(), call)
    module = evaluated.instantiate(call)
    stages = transfer(assignment, found.graph, module, holders)
    assert set(stages.values()) == {0, 1, 2}
    values: Any = evaluated.inputs.flatten(call)
    with torch.no_grad():
        expected = module(*values)
        for stage in emit(module, stages):
            held = [name for name, _ in stage.module.named_parameters()]
            assert all(stage.index in holders[name] for name in held)
            values = stage.module(*values)
    assert all(torch.equal(got, wanted) for got, wanted in zip(values, expected, strict=True))


def test_the_same_graph_keeps_its_stages() -> None:
    target = example("gpt2")
    call = first(2, target.call)
    assignment, holders = cut_in(4, found := capture(target.model, call), call)
    assert transfer(assignment, found.graph, found.instantiate(call), holders) == assignment


class Modes(nn.Module):
    """In evaluation it reads its first parameter once more, at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x).tanh()).tanh()
        return x if self.training else self.first(x)


def test_a_node_that_would_need_parameters_of_an_earlier_stage_is_refused() -> None:
    model, call = Modes(), Arguments((torch.randn(4, 4),), {})
    assignment, holders = cut_in(2, found := capture(model, call), call)
    assert holders["first.weight"] == (0,)
    module = capture(model.eval(), call).instantiate(call)
    with pytest.raises(
        CaptureError,
        match=r"first_1 \(.*test_transfer.py:\d+\) runs in stage 1 or later.*no_split=",
    ):
        transfer(assignment, found.graph, module, holders)
