"""What is noted of gradients while a graph is profiled."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.cost_models.flops import Flops
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.ir.graph import CostGraph
from pipecompile.profiling.profile import profile


class Gated(nn.Module):
    """A parameter behind another node, one of a node itself, and a layer that returns its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.same, self.gate = (
            nn.Linear(8, 8),
            nn.Dropout(0.0),
            nn.Parameter(torch.ones(4, 8)),
        )

    def forward(self, value: Tensor) -> Tensor:
        return self.same(self.inner(value.tanh())) * self.gate.sigmoid() + value


def graph_of(model: nn.Module, loss: Any = None) -> CostGraph:
    sample = Arguments((torch.randn(4, 8, requires_grad=False),), {})
    captured = capture(nn.Sequential(nn.Linear(8, 8), model), sample)
    return profile(captured.instantiate(sample), sample.args, Flops(), loss=loss)


def test_gradients_are_captured_where_parameters_branch_off() -> None:
    graph = graph_of(Gated(), lambda outputs, targets: outputs[0].square().mean())
    at = {name for gradient in graph.gradients for name in gradient.captured_at}
    assert {"_1_inner", "mul"} <= at
    assert "_0" not in at  # the first layer leads to parameters alone


def test_the_gradient_of_what_a_layer_returns_as_it_was_given_is_that_of_both() -> None:
    pairs = [set(gradient.edges) for gradient in graph_of(Gated()).gradients]
    assert any({("_1_inner", "_1_same"), ("_1_same", "mul")} <= given for given in pairs)


def test_it_is_noted_where_a_gradient_repeats_elements() -> None:
    """A second reader makes a sum, which has each element; one without gradient does not count."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, value: Tensor) -> Tensor:
            first = self.first(value)
            return (
                first.sum(-1) + first.detach().amax(-1) + self.second(value).sum(-1) + value.sum(-1)
            )

    graph = graph_of(Sums(), lambda outputs, targets: outputs[0].square().mean())
    expanded = {
        tensor.producer: tensor.gradient_expanded_by
        for tensor in graph.tensors
        if tensor.gradient_expanded_by
    }
    assert expanded == {"_1_first": "sum_1", "_1_second": "sum_2"}


def test_it_is_noted_where_the_gradient_of_a_parameter_is_a_view() -> None:
    """The gradient of a linear layer's weight is a view, and that of its bias a reshaped sum."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("places", torch.arange(4))

        def forward(self, value: Tensor) -> Tensor:
            return self.head(value + self.table(self.places))

    given = {node.name: node.view_gradients for node in graph_of(Tied()).nodes if node.parameters}
    assert given == {"_0": ("0.bias", "0.weight"), "_1_table": (), "_1_head": ("1.table.weight",)}


def test_nothing_outlives_a_profile() -> None:
    """Nor what its loss refers to, which may be the model."""

    def loss(outputs: Any, targets: Any) -> Tensor:
        return outputs[0].sum()  # type: ignore[no-any-return]

    reference = weakref.ref(loss)
    graph_of(Gated(), loss)
    del loss
    gc.collect()
    assert reference() is None
