"""The cost graph as a whole: its nodes, the tensors between them, its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.cost_models.flops import Flops
from pipecompile.cost_models.protocol import CostModel
from pipecompile.cost_models.roofline import Roofline
from pipecompile.frontend.capture import capture
from pipecompile.frontend.target import Target
from pipecompile.ir.graph import CostGraph, Parameter
from pipecompile.profiling import profile as profiling
from pipecompile.profiling.profile import profile
from tests.zoo.models import MODELS


class Tied(nn.Module):
    """An embedding, a recurrent layer (a tuple), and a head on the embedding's own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(8))

    def forward(self, tokens: Tensor) -> list[Tensor]:
        hidden, _ = self.recurrent(self.embedding(tokens))
        return [self.head(hidden * self.scale)]


class Tracer(fx.Tracer):
    proxy_buffer_attributes = True


def graph() -> CostGraph:
    model = Tied()
    graph_module = fx.GraphModule(model, Tracer().trace(model))
    for node in graph_module.graph.nodes:
        node.meta["module"] = str(node.target) if node.op == "call_module" else ""
        node.meta["source"] = "model.py:7"
        if node.name.startswith(("recurrent", "getitem")):
            node.meta["group"] = "recurrent"
    return profile(graph_module, [torch.zeros(2, 5, dtype=torch.long)], Flops())


def test_every_node_but_the_parameters() -> None:
    names = ["tokens", "embedding", "recurrent", "getitem", "getitem_1", "mul", "head", "output"]
    assert [node.name for node in graph().nodes] == names


def test_what_the_frontend_noted_is_kept() -> None:
    node = graph().by_name["recurrent"]
    assert (node.operator, node.module, node.source) == ("torch.nn.LSTM", "recurrent", "model.py:7")
    assert node.group == "recurrent"
    assert graph().by_name["head"].group is None


def test_a_tied_parameter_is_one_with_two_names() -> None:
    assert (
        Parameter(
            name="embedding.weight",
            bytes=50 * 8 * 4,
            trainable=True,
            aliases=("head.weight",),
            shape=(50, 8),
        )
        == graph().parameters[0]
    )
    assert (
        graph().by_name["embedding"].parameters
        == graph().by_name["head"].parameters
        == ("embedding.weight",)
    )
    assert graph().by_name["head"].parameter_bytes == 50 * 8 * 4


def test_a_buffer_is_a_parameter_that_does_not_train() -> None:
    assert graph().parameter_by_name["scale"] == Parameter(
        name="scale", bytes=32, trainable=False, shape=(8,)
    )
    assert graph().by_name["mul"].parameters == ("scale",)


def test_a_tuple_is_one_tensor_of_all_its_bytes() -> None:
    (tensor,) = (tensor for tensor in graph().tensors if tensor.producer == "recurrent")
    assert tensor.consumers == ("getitem", "getitem_1")
    assert tensor.bytes == tensor.gradient_bytes == 4 * (2 * 5 * 8 + 2 * (1 * 2 * 8))
    assert tensor.storage is None


def test_what_nobody_reads_is_no_tensor() -> None:
    assert {tensor.producer for tensor in graph().tensors} == {
        "tokens", "embedding", "recurrent", "getitem", "mul", "head"
    }  # fmt: skip


def test_indices_have_no_gradient() -> None:
    tokens, embedding, *_ = graph().tensors
    assert (tokens.bytes, tokens.gradient_bytes) == (2 * 5 * 8, 0)
    assert (embedding.bytes, embedding.gradient_bytes) == (2 * 5 * 8 * 4, 2 * 5 * 8 * 4)


def test_a_storage_that_two_nodes_save_is_counted_once() -> None:
    class Twice(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image.sin() + image.cos()

    costs = profile(fx.symbolic_trace(Twice()), [torch.randn(4, 4, requires_grad=True)], Flops())
    sine, cosine = costs.by_name["sin"], costs.by_name["cos"]
    assert sine.saved == cosine.saved
    assert (sine.saved_bytes, cosine.saved_bytes) == (64, 0)


def test_a_linear_layer_makes_its_output_and_then_the_gradients_of_input_and_weight() -> None:
    head = graph().by_name["head"]
    copied = 2 * 5 * 8 * 4  # what comes out of the LSTM is not contiguous
    assert head.forward_peak_bytes == 2 * 5 * 50 * 4 + copied
    assert head.backward_peak_bytes == 2 * 5 * 8 * 4 + 50 * 8 * 4
    assert head.workspace_bytes == 0


def test_random_numbers_are_drawn_as_if_nothing_had_been_profiled() -> None:
    model = fx.symbolic_trace(nn.Sequential(nn.Dropout(0.5), nn.LSTM(8, 8)))
    random = torch.get_rng_state()
    profile(model, [torch.ones(4, 8)], Flops())
    assert torch.equal(torch.get_rng_state(), random)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_custom_function_goes_by_its_own_name() -> None:
    traced = fx.Graph()
    value = traced.placeholder("value")
    traced.output([traced.call_function(Double.apply, (value,))])
    costs = profile(fx.GraphModule(nn.Module(), traced), [torch.randn(4)], Flops())
    assert costs.nodes[1].operator == f"{__name__}.Double.apply"


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("cost_model", [Flops(), Roofline.of("h100")], ids=["cpu", "h100"])
def test_what_ran_before_changes_nothing(
    cost_model: CostModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = [captured_of(MODELS[name]()) for name in ("unet", "transformer")]
    warm = [profile(*each, cost_model) for _ in range(2) for each in captured]
    for index, each in enumerate(captured):
        monkeypatch.setattr(profiling, "_FAKE_RESULTS", {})
        FakeTensorMode.cache_clear()
        with torch.backends.mkldnn.flags(enabled=False):
            assert profile(*each, cost_model) == warm[index] == warm[index + len(captured)]


def captured_of(made: Any) -> tuple[fx.GraphModule, list[Tensor]]:
    target = Target.of(made, "here")
    captured = capture(target.model, target.call)
    return captured.instantiate(target.call), captured.inputs.flatten(target.call)
