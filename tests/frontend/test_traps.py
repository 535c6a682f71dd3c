"""Known traps of capturing: each is captured exactly, or refused with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stages import assert_equal, case_of
from torch import Tensor, nn
from traps import CALL, WIDTH, Two, X, refused
from zoo import called
from zoo.exact import exact

from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture


def test_guard_on_the_batch_size() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if x.shape[0] > 3 else self.second(x)

    captured_model = exact(Trap(), X, batches=(4, 7, 2, 1))
    assert captured_model.guards.violation(2)
    assert not captured_model.guards.violation(7)


def test_branch_on_data() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) if x.mean() > 0 else self.second(x)

    refused(Trap(), "branches on the values of a tensor", "test_traps.py:")
    model = nn.Sequential(Trap(), nn.Linear(WIDTH, WIDTH))
    module = capture(model, CALL).instantiate(CALL)
    for x in (X[:4] + 5, X[:4] - 5):
        assert torch.equal(module(x)[0], model(x))


def test_lost_update_of_a_buffer_that_nobody_reads() -> None:
    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(len(x))
            return self.first(x)

    exact(Trap(), X)


@pytest.mark.parametrize("train", [True, False])
def test_baked_dropout_flag(train: bool) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.first(x), 0.5, self.training)

    model = Trap().train(train)
    captured_model = exact(model, X)
    model.train(not train)
    with pytest.raises(CaptureError, match=f"was captured in {'train' if train else 'eval'} mode"):
        captured_model.instantiate(CALL)


def test_baked_flag_of_a_part() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    captured_model = capture(model, CALL)
    model[1].eval()
    with pytest.raises(CaptureError, match="1 was captured in train mode"):
        captured_model.instantiate(CALL)


def test_view_that_a_later_layer_writes_to() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            view = hidden[:, :2]
            other = self.second(x.cos().exp())
            view.mul_(2)
            return (hidden + other).sin().cos()

    exact(Trap(), X)
    torch.manual_seed(0)
    case = case_of(Trap(), CALL)
    places = {name: unit for unit, names in enumerate(case.units) for name in names}
    assert len({places[name] for name in ("first", "getitem", "mul_")}) == 1
    for cut in range(1, len(case.units)):
        assert_equal(case, [cut])


def test_counter_in_an_attribute() -> None:
    class Trap(Two):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.first(x) * self.calls

    model = Trap()
    refused(model, "calls (", "test_traps.py:", "a buffer that is written to in place")
    assert model.calls == 0


def test_auxiliary_loss_left_on_an_attribute() -> None:
    class Trap(Two):
        aux: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            self.aux = self.second(hidden).square().mean()
            return hidden

    refused(Trap(), "aux (", "a loss that reads it would not train the model")


@pytest.mark.parametrize("inner", [True, False])
def test_backward_hook_on_a_module_that_is_taken_apart(inner: bool) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    part = Trap()
    part.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    refused(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), part) if inner else part,
        "a backward hook is registered",
    )


def test_replaced_buffer() -> None:
    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            hidden, old = self.first(x), self.average
            self.average = 0.9 * self.average + 0.1 * hidden.detach().mean(0)
            return hidden * self.average + old

    model = Trap()
    own = model.average
    exact(model, X)
    assert model.average is own


def test_tensor_kept_in_a_closure() -> None:
    """If it is only read it is a constant; if it is written to no stage owns it."""
    kept = torch.ones(WIDTH)

    class Reads(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * kept

    class Writes(Two):
        def forward(self, x: Tensor) -> Tensor:
            kept.add_(1)
            return self.first(x) * kept

    exact(Reads(), X)
    refused(Writes(), "writes to a tensor attribute in place", "test_traps.py:")


@pytest.mark.parametrize("region", ["no_grad", "autocast"])
def test_region_that_is_cut_in_the_middle(region: str) -> None:
    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with (
                torch.no_grad()
                if region == "no_grad"
                else torch.autocast("cpu", dtype=torch.bfloat16)
            ):
                y = self.inner[2](self.inner[1](self.inner[0](x).sin()).cos())
            return self.second(x + y.float())

    exact(Trap(), X)
    torch.manual_seed(0)
    case = case_of(Trap(), CALL)
    inside = [
        node.name
        for node in case.capture.graph.nodes
        if node.meta.get("autograd_context") is not None
    ]
    assert len({unit for unit, names in enumerate(case.units) if set(names) & set(inside)}) > 3
    for cut in range(1, len(case.units)):
        assert_equal(case, [cut])


@pytest.mark.parametrize("wrapper", [nn.DataParallel, torch.compile])
def test_wrapper_around_the_model(wrapper: Callable[[nn.Module], nn.Module]) -> None:
    from pipecompile.errors import InputError

    with pytest.raises(InputError, match=r"give the module inside it \(\.(module|_orig_mod)\)"):
        capture(wrapper(nn.Sequential(nn.Linear(WIDTH, WIDTH))), CALL)


FOREIGN: dict[str, Callable[[Two], dict[str, Tensor]]] = {
    "computed": lambda model: {"weight": model.second.weight * 2, "bias": model.second.bias},
    "partly": lambda model: {"weight": model.first.weight.T},
    "constant": lambda model: {"weight": torch.ones(WIDTH, WIDTH)},
}


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("weights", FOREIGN.values(), ids=FOREIGN)
def test_leaf_called_with_other_weights(weights: Callable[[Two], dict[str, Tensor]]) -> None:
    """The graph itself is compared, since users can switch the self-check off."""

    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.func.functional_call(self.first, weights(self), (x.cos(),)))

    captured_model = exact(Trap(), X)
    assert "first" not in called(captured_model.graph)


def changed_probability(model: Any, x: Tensor) -> Tensor:
    model.body.drop.p = 0.5
    return model.body.drop(x)


def frozen_statistics(model: Any, x: Tensor) -> Tensor:
    was = model.body.norm.training
    model.body.norm.eval()
    x = model.body.norm(x)
    model.body.norm.train(was)
    return x


def frozen_container(model: Any, x: Tensor) -> Tensor:
    model.body.eval()
    x = model.body.norm(x)
    model.body.train()
    return x


SETTINGS = {"drop": changed_probability, "norm": frozen_statistics, "drop ": frozen_container}


@pytest.mark.parametrize(
    ("name", "act"), SETTINGS.items(), ids=[act.__name__ for act in SETTINGS.values()]
)
def test_setting_of_a_leaf_changed_around_its_call(
    name: str, act: Callable[[Any, Tensor], Tensor]
) -> None:
    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleDict({"drop": nn.Dropout(0.1), "norm": nn.BatchNorm1d(WIDTH)})

        def forward(self, x: Tensor) -> Tensor:
            return self.second(act(self, self.first(x)))

    model = Trap()
    refused(model, f"of body.{name.strip()}, which is one node", "test_traps.py:")
    assert model.body.drop.p == 0.1
    assert all(part.training for part in model.modules())


def test_gradient_taken_in_the_forward() -> None:
    """A force field: the gradient of the energy with respect to positions is trained."""

    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            positions = self.stem(x).cos()
            energy = self.second(self.first(positions).tanh()).square().sum(1)
            (force,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
            return energy, self.head(force.sin())

    exact(Trap(), X)
    torch.manual_seed(0)
    case = case_of(Trap(), CALL)
    places = {name: unit for unit, names in enumerate(case.units) for name in names}
    assert len({places[name] for name in ("cos", "first", "tanh", "second", "grad")}) == 1
    assert len(case.units) > 3
    for cut in range(1, len(case.units)):
        assert_equal(case, [cut])


@pytest.mark.parametrize(
    "backward", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss])]
)
def test_gradients_that_the_forward_gives_parameters(backward: Callable[[Tensor], None]) -> None:
    """A layer trained by a loss of its own inside of the forward."""

    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            value = self.first(x)
            backward(self.second(value.detach()).square().mean())
            return value

    refused(Trap(), "the forward gives parameters gradients itself", "let loss_fn add it")


def test_gradients_that_the_forward_reads() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            factor = 1 if self.first.weight.grad is None else 2
            return self.second(self.first(x)) * factor

    refused(Trap(), "the forward reads the gradient of a parameter", "test_traps.py:")


def test_writes_to_lists_of_tensors() -> None:
    """An operator on lists writes to a view, and to buffers."""

    class Trap(Two):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            value = self.first(x)
            torch._foreach_mul_([value[:, 1:], value[:, :1]], [0.5, 2.0])
            torch._foreach_lerp_([self.mean, self.scale], [value.detach().mean(0)] * 2, 0.1)
            return self.second((value - self.mean) * self.scale)

    exact(Trap(), X)
