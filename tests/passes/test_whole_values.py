from __future__ import annotations

import pytest
import torch
from torch import fx, nn

from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.graph.random_streams import StreamKey, reseed, use_stream
from pipecompile.graph.whole_values import whole_value
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.whole_values import WholeValues

X = torch.randn(4, 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 8))


def stages(whole: nn.Module) -> list[fx.GraphModule]:
    """Two stages, cut behind the first node."""
    call = arguments_of(whole, X)
    module = capture(whole, call).instantiate(call)
    nodes = [node for node in module.graph.nodes if node.op != "placeholder"]
    assignment = {node.name: int(index > 0) for index, node in enumerate(nodes)}
    assignment |= {n.name: 0 for n in module.graph.nodes if n.op == "placeholder"}
    return [stage.module for stage in emit(module, assignment)]


def run(modules: list[fx.GraphModule]) -> torch.Tensor:
    value = X
    with use_stream(StreamKey(1, 2, 3)):
        for module in modules:
            (value,) = module(value)
    return value


def test_whole_values_change_nothing() -> None:
    whole = model()
    expected, modules = run(stages(whole)), stages(whole)
    for module in modules:
        apply_passes(module.graph, [WholeValues()])
        module.recompile()
    assert torch.equal(run(modules), expected)
    calls = [node for module in modules for node in module.graph.nodes if node.op != "placeholder"]
    # Before dropout, which still follows its reseed, and before each of the two outputs.
    assert [node.target for node in calls].count(whole_value) == 3
    assert all(n.prev.target is reseed for n in calls if n.meta["random"])


def test_a_part_of_a_value_is_refused() -> None:
    whole = model()
    modules = stages(whole)
    apply_passes(modules[0].graph, [WholeValues()])
    modules[0].recompile()
    whole[0].weight = nn.Parameter(torch.randn(3, 8))
    whole[0].bias = None
    with pytest.raises(InputError, match=r"\(4, 3\) on this rank, but \(4, 6\) in the model"):
        run(modules)
