"""The self-check finds differences that the recorder cannot see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import captured

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.self_check import check_capture
from pipecompile.frontend.signature import Arguments

X = torch.randn(4, 4)


class Ticks:
    """State in an object, whose changes are not noticed."""

    def __init__(self) -> None:
        self.count = 0


class Stateful(nn.Module):
    """Its result depends on the state of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.ticks = nn.Linear(4, 4), Ticks()

    def forward(self, x: Tensor) -> Tensor:
        self.ticks.count += 1
        return self.linear(x) * self.ticks.count


def test_state_in_an_object() -> None:
    """Layers before and after it, so that the message has to name the place."""
    model = nn.Sequential(nn.Linear(4, 4), Stateful(), nn.Tanh())
    size = r"\(by up to \d\.\de-?\+?\d+ where values reach \d\.\de-?\+?\d+\)"
    where = rf"outputs differ in 'output 0' for the same seed {size}, first seen in 2\b"
    with pytest.raises(CaptureError, match=rf"the captured graph is not the model: {where}"):
        captured(model, X)
    with pytest.raises(
        CaptureError, match=r"first seen in the model's forward \(.*test_self_check\.py:\d+\)"
    ):
        captured(Stateful(), X)


def test_a_graph_with_another_value() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    captured_model = capture(model, Arguments((X,), {}))
    module = captured_model.instantiate(Arguments((X,), {}))
    (relu,) = [node for node in module.graph.nodes if node.target == "1"]
    with module.graph.inserting_after(relu):
        wrong = module.graph.call_method("mul", (relu, 1.0000001))
        wrong.meta.update(relu.meta)
        relu.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
    module.recompile()
    with pytest.raises(CaptureError, match=r"outputs differ.*first seen in 2"):
        check_capture(captured_model, module, Arguments((X,), {}))


def test_a_graph_with_another_gradient() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    captured_model = capture(model, Arguments((X,), {}))
    module = captured_model.instantiate(Arguments((X,), {}))
    (relu,) = [node for node in module.graph.nodes if node.target == "1"]
    with module.graph.inserting_after(relu):
        detached = module.graph.call_method("detach", (relu,))
        detached.meta.update(relu.meta)
        relu.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    module.recompile()
    with pytest.raises(CaptureError, match=r"gradients differ in '0\.weight'.*first seen in 0"):
        check_capture(captured_model, module, Arguments((X,), {}))


def test_a_graph_with_another_buffer() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            return self.linear(x)

    model = Counting()
    captured_model = capture(model, Arguments((X,), {}))
    module = captured_model.instantiate(Arguments((X,), {}))
    (add,) = [node for node in module.graph.nodes if node.target == "add_"]
    module.graph.erase_node(add)
    module.recompile()
    with pytest.raises(CaptureError, match=r"buffers differ in 'count'.*first seen in"):
        check_capture(captured_model, module, Arguments((X,), {}))
    assert model.count.item() == 0


def test_nan_equals_nan() -> None:
    class Nan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            return (self.linear(x) * 0) / 0, self.linear(x)

    captured(Nan(), X)


def test_random_models_are_proven_under_one_seed() -> None:
    captured(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.RReLU(), nn.Linear(4, 4)), X)


def test_a_model_without_parameters() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() * 2

    captured(Plain(), X)


class Reversing(nn.Module):
    """Turns the sign of its gradient by a hook of autograd, which no graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(lambda gradients: (-gradients[0],))
        return y


class Masked(nn.Linear):
    """Its last outputs are minus infinity, as of classes that are never chosen."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(torch.arange(4) > 2, -torch.inf)


def zeroed(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    "head",
    [
        lambda: nn.Linear(4, 4),
        lambda: zeroed(nn.Linear(4, 4)),
        lambda: Masked(4, 4),
        lambda: zeroed(Masked(4, 4)),
        lambda: nn.Sequential(zeroed(nn.Linear(4, 4)), nn.LogSoftmax(-1)),
        lambda: nn.Sequential(Masked(4, 4), nn.LogSoftmax(-1)),
    ],
)
def test_gradients_are_compared_whatever_the_outputs_are(head: Callable[[], nn.Module]) -> None:
    """Zeros and infinite values in outputs hide no gradient of the layers before them."""
    model = nn.Sequential(Reversing(), nn.Tanh(), head())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match="gradients differ in"):
        proven_capture(model, Arguments((X.clone(),), {}))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Hooked(nn.Linear):
    """It hooks the tensor or the node that computed it."""

    def __init__(self, *, at_the_node: bool) -> None:
        super().__init__(4, 4)
        self.at_the_node = at_the_node

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.at_the_node and y.grad_fn is not None:
            y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
        elif y.requires_grad:
            y.register_hook(lambda gradient: gradient * 2)
        return y.tanh()


class CountedAgain(nn.Module):
    """It writes to a buffer in a region that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def region(self, x: Tensor) -> Tensor:
        self.seen += x.detach().mean(0)
        return self.linear(x)

    def forward(self, x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(self.region, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (lambda: Hooked(at_the_node=True), "hook the tensor: y.register_hook"),
        (CountedAgain, "leave the region to recompute= of pipecompile, or write to it outside"),
    ],
)
def test_the_likely_cause_is_one_of_what_differs(
    model: Callable[[], nn.Module], advice: str
) -> None:
    with pytest.raises(CaptureError) as caught:
        proven_capture(model(), Arguments((X,), {}))
    assert advice in str(caught.value)


def test_the_advice_for_a_hook_is_right() -> None:
    assert proven_capture(Hooked(at_the_node=False), Arguments((X,), {})) is not None
