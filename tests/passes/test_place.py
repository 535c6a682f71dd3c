from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, fx, nn

from pipecompile.graph.stages import stage_of
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.place import Place


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu((x @ self.weight) * self.scale) @ self.weight


def placed(assignment: Mapping[str, int]) -> fx.GraphModule:
    module = fx.symbolic_trace(Twice())
    apply_passes(module.graph, [Place(assignment)])
    module.recompile()
    return module


STAGES = {"x": 0, "matmul": 0, "mul": 0, "relu": 1, "matmul_1": 1, "output": 1}


def test_every_node_is_on_its_stage() -> None:
    nodes = placed(STAGES).graph.nodes
    assert {node.name: stage_of(node) for node in nodes if node.op != "get_attr"} == STAGES


def test_a_parameter_is_read_in_the_stage_of_each_reader() -> None:
    reads = [
        (node.target, stage_of(node))
        for node in placed(STAGES).graph.nodes
        if node.op == "get_attr"
    ]
    assert sorted(reads) == [("scale", 0), ("weight", 0), ("weight", 1)]


def test_a_copied_node_is_in_each_stage_that_reads_it() -> None:
    module = fx.symbolic_trace(Twice())
    # Only the last product reads them, in stage 1: there both are, with the scale.
    stages = {**STAGES, "mul": 0, "relu": 0}
    apply_passes(module.graph, [Place(stages, copied=("mul", "relu"))])
    module.recompile()
    placed_in = [(n.meta.get("origin", n.name), stage_of(n)) for n in module.graph.nodes]
    assert ("mul", 1) in placed_in and ("relu", 1) in placed_in
    assert ("mul", 0) not in placed_in and ("relu", 0) not in placed_in
    x = torch.randn(2, 4)
    weight, scale = module.get_parameter("weight"), module.get_parameter("scale")
    assert torch.equal(module(x), torch.relu((x @ weight) * scale) @ weight)


def test_values_stay() -> None:
    module, x = placed(STAGES), torch.randn(2, 4)
    weight, scale = module.get_parameter("weight"), module.get_parameter("scale")
    assert torch.equal(module(x), torch.relu((x @ weight) * scale) @ weight)


def test_a_node_without_a_stage_is_named() -> None:
    with pytest.raises(
        AssertionError, match=r"pass Place failed after passes \[\]: no stage for \['relu'\]"
    ):
        placed({name: stage for name, stage in STAGES.items() if name != "relu"})


def test_values_that_flow_back_are_named() -> None:
    with pytest.raises(AssertionError, match="relu → matmul_1 flows back"):
        placed({**STAGES, "relu": 2})
