"""torch.export, the last way to capture: exact if used, refused if it is known to be wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import get_dynamic_layer_stack_depth
from torch.nn.modules.module import register_module_forward_hook
from zoo import called
from zoo.exact import exact

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.export import export_capture
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.frontend.signature import Arguments

WIDTH = 8
X = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
CALL = Arguments((X[:4].clone(),), {})


class Mapped(nn.Module):
    """A layer under torch.vmap, which the recorder cannot see into; `after` follows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return self.after(torch.vmap(lambda row: self.linear(row).tanh())(x))

    def after(self, x: Tensor) -> Any:
        return self.head(x)


@pytest.mark.sweep
def test_a_model_with_vmap_is_exact_at_every_batch() -> None:
    captured_model = exact(Mapped(), X, batches=(4, 2, 7, 1))
    assert captured_model.method == "torch.export"
    assert captured_model.guards.is_fixed
    assert "microbatches of 4 samples alone" in str(captured_model.notes[0])


def test_names_of_parameters_and_ties_are_kept() -> None:
    model = Mapped()
    model.head.weight = model.linear.weight
    captured_model = exact(model, X)
    assert captured_model.aliases["linear.weight"] == ("head.weight",)
    module = captured_model.instantiate(CALL)
    own = {id(value) for value in model.parameters()}
    assert {id(value) for value in module.parameters()} == own


def test_constants_and_none_between_the_outputs_are_kept() -> None:
    class Tree(Mapped):
        def after(self, x: Tensor) -> Any:
            return {"head": self.head(x), "kind": "mean", "rest": [None, x.mean(), 3]}

    exact(Tree(), X)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("how", ["replaced", "in place"])
def test_buffers_are_written(how: str) -> None:
    class Averaging(Mapped):
        def after(self, x: Tensor) -> Tensor:
            new = 0.9 * self.average + 0.1 * x.detach().mean(0)
            if how == "replaced":
                self.average = new
            else:
                self.average.copy_(new)
            return self.head(x) - self.average

    exact(Averaging(), X)


def test_values_that_are_written_in_place() -> None:
    class InPlace(Mapped):
        def after(self, x: Tensor) -> Tensor:
            x = self.head(x)
            x.mul_(2)
            x[:, 0] = 1
            x[:, 1:3].add_(3)
            return x

    exact(InPlace(), X)


@pytest.mark.sweep
def test_dropout_draws_the_same() -> None:
    class Dropping(Mapped):
        def after(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.head(x), 0.5, self.training)

    captured_model = exact(Dropping(), X)
    assert any(
        node.meta["random"] for node in captured_model.graph.nodes if node.op == "call_function"
    )
    exact(Dropping().eval(), X)


class Exaggerated(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 100


def refusal(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, CALL)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_custom_function_is_refused() -> None:
    class Custom(Mapped):
        def after(self, x: Tensor) -> Tensor:
            return Exaggerated.apply(self.head(x))

    original = torch.autograd.Function.__dict__["apply"]
    assert (
        "Exaggerated is a custom autograd function, whose backward torch.export would drop"
        in refusal(Custom())
    )
    assert torch.autograd.Function.__dict__["apply"] is original


def triple(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return (inputs[0] * 3,)


def keep(module: nn.Module, *values: Any) -> None:
    """Log nothing."""


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("register", "name"),
    [
        (lambda model: model.head.register_full_backward_hook(triple), "head: the hook triple"),
        (lambda model: model.head.register_forward_hook(keep), "head: the hook keep"),
        (lambda model: model.head.register_forward_pre_hook(keep), "head: the hook keep"),
        (lambda model: model.register_forward_hook(keep), "Mapped: the hook keep"),
        (lambda _: register_module_forward_hook(keep), "all modules: the hook keep"),
    ],
)
def test_a_hook_of_a_module_is_refused_by_name(
    register: Callable[[nn.Module], Any], name: str
) -> None:
    model = Mapped()
    handle = register(model)
    try:
        assert f"{name} would run in no step" in refusal(model)
    finally:
        handle.remove()


def test_a_hook_on_a_tensor_is_refused() -> None:
    class Hooked(Mapped):
        def after(self, x: Tensor) -> Tensor:
            hidden = self.head(x)
            hidden.register_hook(lambda gradient: gradient * 100)
            return hidden.sin()

    original = Tensor.register_hook
    assert "a hook on a tensor is dropped by torch.export" in refusal(Hooked())
    assert Tensor.register_hook is original


def test_a_region_beside_vmap_is_refused() -> None:
    class Region(Mapped):
        def after(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                lesson = self.head(x)
            return self.head(x) + lesson

    assert "transforms a function" in refusal(Region())


def test_a_region_is_refused() -> None:
    class Region(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                lesson = self.linear(x)
            return self.linear(x) + lesson

    with pytest.raises(UnsupportedError, match="makes graphs of their own of regions"):
        export_capture(Region(), CALL, recapture=pytest.fail)


def test_data_dependence_is_refused() -> None:
    class Asking(Mapped):
        def after(self, x: Tensor) -> Tensor:
            return self.head(x) * (x > 0).nonzero().sum()

    assert "transforms a function" in refusal(Asking())


def test_a_refusal_within_a_transform_leaves_torch_as_it_was() -> None:
    class Curved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gradient = torch.func.grad(lambda y: (y**3).sum())
            return torch.func.jvp(gradient, (x,), (torch.ones_like(x),))[1]  # type: ignore[no-any-return]

    model, call = nn.Sequential(nn.Linear(4, 4), Curved()), Arguments((torch.randn(4, 4),), {})
    with pytest.raises(CaptureError):
        capture(model, call)
    assert get_dynamic_layer_stack_depth() == 0


def test_the_model_is_restored() -> None:
    model = Mapped()
    before, state = (
        {name: id(value) for name, value in model.state_dict(keep_vars=True).items()},
        torch.get_rng_state(),
    )
    capture(model, CALL).instantiate(CALL)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_that_can_be_recorded_is_not_exported() -> None:
    assert capture(nn.Sequential(nn.Linear(WIDTH, WIDTH)), CALL).method == "recorded"
    captured_model = export_capture(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), CALL, recapture=pytest.fail
    )
    assert called(captured_model.instantiate(CALL).graph) == ["linear.default", "tanh.default"]
