"""Regions that a stage cannot have are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from pipecompile.codegen.regions import stage_order
from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from tests.codegen.region_cases import CastOnce

# -- what no region may be


class Inner(nn.Module):
    """Takes a gradient while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x).tanh()
        (slope,) = torch.autograd.grad(hidden.sin().sum(), hidden, create_graph=True)
        return self.head(hidden + slope).tanh().cos()


class Written(nn.Module):
    """Reads a parameter itself, and has a module that keeps its own one in bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.table(x.abs().long().clamp(max=7)).sum(1)
        return self.head((rows @ self.weight).tanh()).sin().cos()


class Parts(nn.Module):
    """Takes a tuple apart, and writes into what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).tanh().chunk(2, dim=-1)
        hidden = self.head(torch.cat([right.exp(), left.exp()], -1))
        hidden.mul_(2)
        return hidden.sin().cos().exp()


REFUSED: dict[str, tuple[type[nn.Module], list[list[str]], str]] = {
    "an input": (Parts, [["x", "stem"]], "may not hold x: it computes nothing"),
    "the output": (Parts, [["cos", "exp_2", "output"]], "may not hold output"),
    "a parameter": (Written, [["weight", "matmul"]], "may not hold weight: it computes nothing"),
    "written parameters": (
        Written,
        [["table", "sum_1"]],
        "may not hold table: it writes to a parameter",
    ),
    "a gradient": (Inner, [["grad"]], "goes back through the nodes before it"),
    "on the way of a gradient": (
        Inner,
        [["tanh", "sin"]],
        "it goes with grad, of which it goes back",
    ),
    "half a tuple": (Parts, [["tanh", "chunk"]], "parts chunk from getitem, getitem_1"),
    "half a write": (Parts, [["cat", "head"]], "parts head from mul_"),
    "half a cast": (CastOnce, [["tanh", "twice"]], "parts twice from twice_1"),
    "nothing": (Parts, [[]], "is empty"),
    "a stranger": (Parts, [["stem", "nobody"]], "names nobody, which is no node of the stage"),
    "gaps": (Parts, [["stem", "exp"]], "is no run of the stage's nodes"),
    "another order": (Parts, [["sin", "mul_"]], "is no run of the stage's nodes"),
    "an overlap": (
        Parts,
        [["head", "mul_", "sin"], ["sin", "cos"]],
        "two regions of stage 0 share sin",
    ),
    "one twice": (Parts, [["sin"], ["sin"]], "two regions of stage 0 share sin"),
}


def graph_of(kind: type[nn.Module]) -> fx.GraphModule:
    torch.manual_seed(0)
    call = Arguments((torch.randn(4, 8),), {})
    module = capture(kind(), call).instantiate(call)
    apply_passes(module.graph, [Group()])
    return module


@pytest.mark.parametrize("what", REFUSED)
def test_an_impossible_region_is_refused(what: str) -> None:
    kind, regions, message = REFUSED[what]
    module = graph_of(kind)
    assignment = {node.name: 0 for node in module.graph.nodes if node.op != "get_attr"}
    with pytest.raises(InputError) as raised:
        emit(module, assignment, {0: regions})
    assert message in str(raised.value)


def test_a_region_of_another_stage_is_refused() -> None:
    module = graph_of(Parts)
    names = stage_order(
        module.graph, {n.name: 0 for n in module.graph.nodes if n.op != "get_attr"}, 0
    )
    assignment = {name: int(index >= names.index("sin")) for index, name in enumerate(names)}
    with pytest.raises(InputError, match="of stage 0 names sin"):
        emit(module, assignment, {0: [["sin"]]})
