"""Every example model is captured exactly, for every batch size, and is restored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from zoo import EXAMPLES, called, captured, example, first, same

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.self_check import check_capture
from pipecompile.frontend.signature import Arguments
from tests.sweeps import sweep


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_training_step_of_the_graph_is_the_models(name: str) -> None:
    target = example(name)
    call = first(4, target.call)
    captured_model = capture(target.model, call)
    check_capture(captured_model, captured_model.instantiate(call), call)


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("name", EXAMPLES)
def test_one_capture_serves_every_batch_size(name: str) -> None:
    target = example(name)
    model = target.model.eval()
    captured_model = capture(model, first(4, target.call))
    for batch in (2, 3, 4, 7):
        call = first(batch, target.call)
        with torch.no_grad():
            tensors = captured_model.instantiate(call)(*captured_model.inputs.flatten(call))
            assert same(
                captured_model.outputs.unflatten(tensors), model(*call.args, **call.kwargs)
            ), batch


@pytest.mark.parametrize(
    "name", ["t5", "unet", *map(sweep, ("gpt2", "bert", "llama", "resnet50", "sequential"))]
)
def test_a_graph_for_a_batch_size_holds_no_symbols(name: str) -> None:
    target = example(name)
    captured_model = capture(target.model, first(4, target.call))
    for node in captured_model.instantiate(first(3, target.call)).graph.nodes:
        for value in pytree.tree_leaves((node.args, node.kwargs)):
            assert type(value).__name__ not in ("Symbolic", "SymInt", "SymFloat", "SymBool"), node
        for value in pytree.tree_leaves(node.meta["val"]):
            assert not isinstance(value, Tensor) or all(
                isinstance(size, int) for size in value.shape
            ), node


def snapshot(model: nn.Module) -> list[Any]:
    """Return all of a model that a capture could change: tensors by id, version and value."""
    tensors = [*model.parameters(), *model.buffers()]
    return [
        [id(tensor) for tensor in tensors],
        [tensor._version for tensor in tensors],
        [tensor.detach().clone() for tensor in tensors],
        [parameter.grad for parameter in model.parameters()],
        [part.training for part in model.modules()],
        [sorted(vars(part)) for part in model.modules()],
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize(
    "name", ["t5", "unet", *map(sweep, ("gpt2", "bert", "llama", "resnet50", "sequential"))]
)
def test_capturing_restores_the_model(name: str) -> None:
    target = example(name)
    next(iter(target.model.children())).eval()
    parameter = next(target.model.parameters())
    parameter.grad = torch.ones_like(parameter)
    before, call = snapshot(target.model), nn.Module.__call__
    captured_model = capture(target.model, first(4, target.call))
    captured_model.instantiate(first(4, target.call))
    assert same(snapshot(target.model), before)
    assert nn.Module.__call__ is call


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_the_self_check_restores_the_model(name: str) -> None:
    target = example(name)
    call = first(4, target.call)
    captured_model = capture(target.model, call)
    module = captured_model.instantiate(call)
    values = copy.deepcopy(target.model.state_dict())
    state = torch.get_rng_state()
    check_capture(captured_model, module, call)
    assert same(dict(target.model.state_dict()), dict(values))
    assert all(parameter.grad is None for parameter in target.model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failed_capture_restores_the_model() -> None:
    class Fails(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self[1].running_mean.add_(1)
            if super().forward(x).sum() > 0:
                return x
            return -x

    model, call = Fails(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Module.__call__
    sample = Arguments((torch.randn(4, 4),), {})
    before = snapshot(model)
    with pytest.raises(CaptureError):
        capture(model, sample)
    assert same(snapshot(model), before)
    assert nn.Module.__call__ is call


def test_parameters_are_the_models_own_under_their_names() -> None:
    target = example("gpt2")
    _, module = captured(target.model, **first(4, target.call).kwargs)
    own = dict(target.model.named_parameters(remove_duplicate=False))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert parameters.keys() <= own.keys()
    assert all(value is own[name] for name, value in parameters.items())


def test_modules_of_torch_are_one_node_and_others_are_recorded_inside() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.GELU()))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.softmax(self.body(x).exp(), dim=-1) * 2

    captured_model, _ = captured(Model(), torch.randn(4, 4))
    assert called(captured_model.graph) == [
        "body.0",
        "body.1.0",
        "body.1.1",
        "exp",
        "softmax",
        "mul",
    ]


def test_a_model_that_is_one_torch_module_is_taken_as_it_is() -> None:
    captured_model, _ = captured(nn.Linear(4, 4), torch.randn(4, 4))
    assert called(captured_model.graph)


def test_a_shared_module_is_one_module_called_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.second = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu())

    captured_model, _ = captured(Shared(), torch.randn(4, 4))
    assert called(captured_model.graph) == ["first", "relu", "first"]
    assert captured_model.aliases == {
        "first.weight": ("second.weight",),
        "first.bias": ("second.bias",),
    }


def test_tied_weights_are_one_parameter_with_aliases() -> None:
    target = example("gpt2")
    captured_model = capture(target.model, first(4, target.call))
    assert captured_model.aliases["transformer.wte.weight"] == ("lm_head.weight",)
    assert "lm_head.weight" not in captured_model.aliases
    target = example("t5")
    assert set(capture(target.model, first(4, target.call)).aliases["shared.weight"]) == {
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        "lm_head.weight",
    }


class Cube(torch.autograd.Function):
    """A wrong backward, which shows if the forward is differentiated instead."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x * 100


def test_a_custom_function_is_one_node_with_its_own_backward() -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return Cube.apply(self.linear(x)).sin()

    model = Custom()
    x = torch.randn(4, 4)
    captured_model, module = captured(model, x)
    assert called(captured_model.graph) == ["linear", "apply", "sin"]
    (got,) = torch.autograd.grad(module(x)[0].sum(), model.linear.weight)
    (wanted,) = torch.autograd.grad(model(x).sum(), model.linear.weight)
    assert torch.equal(got, wanted)


def test_in_place_operations_are_recorded() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            hidden.mul_(2)
            torch.sigmoid_(hidden)
            hidden = hidden.cos()
            hidden += 1
            return hidden

    captured_model, module = captured(InPlace(), torch.randn(4, 4))
    assert called(captured_model.graph) == ["linear", "mul_", "sigmoid_", "cos", "add_"]
    written = [str(node.target) for node in module.graph.nodes if node.meta["mutates"]]
    assert len(written) == 3


def test_setting_items_is_recorded_though_no_node_reads_the_result() -> None:
    class SetItem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            hidden[:, 1:3] = x[:, :2] * 2
            hidden[x > 0] = 0.5
            return hidden

    captured(SetItem(), torch.randn(4, 4))


def test_a_write_through_a_view_is_recorded() -> None:
    class View(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            hidden.view(-1, 2, 2)[:, 0].fill_(1)
            return hidden * 2

    captured(View(), torch.randn(4, 4))


def test_iterating_over_a_tensor() -> None:
    class Iterates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            first, second, *rest = self.linear(x).T
            return first * second - sum(rest)

    captured(Iterates(), torch.randn(4, 4))


def test_a_buffer_that_is_updated_in_place() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x)
            self.mean.mul_(0.9).add_(hidden.detach().mean(0), alpha=0.1)
            return hidden - self.mean

    captured(Running(), torch.randn(4, 4))


def test_a_tensor_that_is_neither_parameter_nor_buffer_is_a_constant() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])

    captured(Constant(), torch.randn(4, 4))


def test_containers_are_recorded_inside() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    captured_model, _ = captured(model, torch.randn(4, 3, 8))
    assert "layers.1.linear2" in called(captured_model.graph)


def test_recurrent_modules_and_attention_are_one_node() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 8, num_layers=2, batch_first=True)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            out, (hidden, cell) = self.lstm(x)
            mixed, weights = self.attention(out, out, out)
            return mixed.sum() + hidden.sum() * cell.sum() + weights.sum()

    captured_model, _ = captured(Model(), torch.randn(4, 3, 4))
    assert next(iter(called(captured_model.graph))) == "lstm"


def test_sizes_that_depend_on_the_batch_follow_it() -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            batch, length = x.shape
            position = torch.arange(batch * length).view(batch, length)
            mask = torch.zeros(x.size(0), 1) + batch / 2
            return x.reshape(batch * length)[: batch * 2].view(batch, 2) + position[:, :2] + mask

    model, x = Sizes(), torch.randn(7, 4)
    captured_model = capture(model, Arguments((x[:4],), {}))
    for batch in (2, 3, 7):
        call = Arguments((x[:batch].clone(),), {})
        assert same(captured_model.instantiate(call)(x[:batch])[0], model(x[:batch]))


def test_every_node_knows_its_module_and_its_line() -> None:
    target = example("unet")
    captured_model = capture(target.model, first(4, target.call))
    named = {node.name: node.meta for node in captured_model.graph.nodes}
    assert named["stem_convolution"]["module"] in ("stem", "stem.convolution")
    assert named["cat"]["source"].startswith(("examples/models.py:", "models.py:"))
