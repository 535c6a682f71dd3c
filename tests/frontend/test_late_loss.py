"""A loss that uses what a forward leaves beside its output is refused."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipecompile import pipecompile
from pipecompile.errors import InputError
from pipecompile.frontend.late_loss import refuse_late_loss
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target

OUTPUTS = dict[str, Tensor]()
MESSAGE = "loss_fn uses what the forward leaves beside its output"
Loss = Callable[[Any, Any], Any]


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 6))


class Diary:
    """What a hook and a loss both know."""

    mean: Any = None

    def write(self, _module: nn.Module, _arguments: Any, result: Tensor) -> None:
        self.mean = result.detach().mean()


def by_a_dict(model: nn.Sequential) -> Loss:
    kept = dict[str, Tensor]()
    model[1].register_forward_hook(lambda *call: kept.update(features=call[-1].detach()))
    return lambda output, target: functional.mse_loss(output, target) * kept["features"].norm()


def by_a_number(model: nn.Sequential) -> Loss:
    kept = [0.0]
    model[1].register_forward_hook(lambda *call: kept.__setitem__(0, call[-1].abs().max().item()))
    return lambda output, target: functional.mse_loss(output, target) + kept[0]


def by_a_queue(model: nn.Sequential) -> Loss:
    kept = deque[Tensor]()
    model[2].register_forward_hook(lambda *call: kept.append(call[-1].detach()))
    return lambda output, target: functional.mse_loss(output, target + kept[-1])


def by_an_object(model: nn.Sequential) -> Loss:
    diary = Diary()
    model[1].register_forward_hook(diary.write)
    return lambda output, target: functional.mse_loss(output, target) * diary.mean


def by_a_class(model: nn.Sequential) -> Loss:
    class Shared:
        mean = torch.zeros(())

    model[0].register_forward_hook(lambda *call: setattr(Shared, "mean", call[-1].detach().mean()))
    return lambda output, target: functional.mse_loss(output, target) - Shared.mean


def by_a_tensor(model: nn.Sequential) -> Loss:
    kept = torch.zeros(6)

    def keep(_module: nn.Module, given: tuple[Tensor]) -> None:
        kept.copy_(given[0].detach().mean(0))

    model[1].register_forward_pre_hook(keep)
    return lambda output, target: functional.mse_loss(output - kept, target)


def by_a_reference(model: nn.Sequential) -> Loss:
    kept = list[Any]()

    def keep(_module: nn.Module, _arguments: Any, result: Tensor) -> None:
        kept[:] = [weakref.ref(result), result]

    model[1].register_forward_hook(keep)
    return lambda output, target: functional.mse_loss(output, target) + kept[0]().square().mean()


def beside_the_loss(model: nn.Sequential) -> Loss:
    kept = dict[str, Tensor]()
    model[1].register_forward_hook(lambda *call: kept.update(mean=call[-1].detach().mean()))
    return lambda output, target: (functional.mse_loss(output, target), kept["mean"])


def plain(_model: nn.Sequential) -> Loss:
    return functional.mse_loss


def drawing(_model: nn.Sequential) -> Loss:
    return lambda output, target: functional.mse_loss(functional.dropout(output), target)


def counting(_model: nn.Sequential) -> Loss:
    calls = itertools.count()
    return lambda output, target: functional.mse_loss(output, target) * (1 + next(calls))


def warming(_model: nn.Sequential) -> Loss:
    seen = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen[0] += 1
        return functional.mse_loss(output, target) * min(1.0, seen[0] / 100)

    return loss


def averaging(_model: nn.Sequential) -> Loss:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.mean.lerp_(output.detach().mean(0), 0.1)
            return functional.mse_loss(output - self.mean, target)

    return Averaging()


def logged(model: nn.Sequential) -> Loss:
    norms = list[float]()
    model[1].register_forward_hook(lambda *call: norms.append(call[-1].norm().item()))
    return functional.mse_loss


def failing(_model: nn.Sequential) -> Loss:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        raise ValueError("no loss today")

    return loss


def constant(model: nn.Sequential) -> Loss:
    scale = model[0].weight.detach().norm()
    return lambda output, target: functional.mse_loss(output, target) * scale


REFUSED = [
    by_a_dict,
    by_a_number,
    by_a_queue,
    by_an_object,
    by_a_class,
    by_a_tensor,
    by_a_reference,
    beside_the_loss,
]
ALLOWED = [plain, drawing, counting, warming, averaging, logged, failing, constant]


def ask(make: Callable[[nn.Sequential], Loss], samples: int = 4) -> None:
    model = layers()
    batch, wanted = torch.randn(samples, 6), torch.randn(samples, 6)
    refuse_late_loss(
        Target(model, Arguments((batch,), {}), make(model)), Arguments((batch,), {}), wanted
    )


@pytest.mark.parametrize("make", REFUSED)
def test_what_a_forward_keeps_for_the_loss_is_refused(make: Callable[[Any], Loss]) -> None:
    with pytest.raises(InputError, match=MESSAGE):
        ask(make)


@pytest.mark.parametrize("make", ALLOWED)
def test_what_a_loss_has_of_its_own_is_not(make: Callable[[Any], Loss]) -> None:
    ask(make)


def test_alike_samples_hide_nothing() -> None:
    model = layers()
    call, loss = Arguments((torch.ones(4, 6),), {}), by_a_dict(model)
    with pytest.raises(InputError, match=MESSAGE):
        refuse_late_loss(Target(model, call, loss), call, torch.zeros(4, 6))


def test_a_compile_refuses_it_before_a_step() -> None:
    model = layers()
    loss, batch = by_a_number(model), torch.randn(8, 6)
    with pytest.raises(InputError, match=MESSAGE):
        pipecompile(
            model, batch, k=2, microbatches=2, costs="flops", loss_fn=loss, sample_target=batch
        )


def test_the_model_and_the_loss_are_as_before() -> None:
    model = layers()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss, batch = averaging(model), torch.randn(8, 6)
    call = Arguments((batch,), {})
    random = torch.get_rng_state()
    refuse_late_loss(Target(model, call, loss), call, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(loss, nn.Module)
    assert not loss.get_buffer("mean").any()
    assert torch.equal(torch.get_rng_state(), random)


def test_gradients_are_as_before_although_a_loss_goes_back_by_itself() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        own = functional.mse_loss(output, target)
        own.backward(retain_graph=True)
        return own

    model, batch = layers(), torch.randn(8, 6)
    call, given = Arguments((batch,), {}), torch.ones(6)
    model[0].bias.grad = given
    refuse_late_loss(Target(model, call, loss), call, batch)
    assert model[0].bias.grad is given
    assert torch.equal(given, torch.ones(6))
    assert model[0].weight.grad is None


def test_outputs_may_be_returned_in_one_dict() -> None:
    class InOneDict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()

        def forward(self, value: Tensor) -> dict[str, Tensor]:
            OUTPUTS["output"] = self.layers(value)
            return OUTPUTS

    call = Arguments((torch.randn(8, 6),), {})
    target = Target(InOneDict(), call, lambda outputs, wanted: (outputs["output"] - wanted).norm())
    refuse_late_loss(target, call, torch.zeros(8, 6))
