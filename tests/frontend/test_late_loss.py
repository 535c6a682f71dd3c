"""A loss that uses what a forward leaves beside its output is refused."""

from __future__ import annotations

import itertools
import random
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
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


def by_an_attribute_of_a_layer(model: nn.Sequential) -> Loss:
    layer: Any = model[1]
    layer.register_forward_hook(lambda *call: setattr(layer, "features", call[-1].detach()))
    return lambda output, target: functional.mse_loss(output, target) + layer.features.norm()


def by_a_list_of_the_model(model: nn.Sequential) -> Loss:
    kept: Any = model
    kept.features = []
    model.register_forward_pre_hook(lambda *_: kept.features.clear())
    model[1].register_forward_hook(lambda *call: kept.features.append(call[-1].detach()))
    return lambda output, target: functional.mse_loss(output, target) + kept.features[0].norm()


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


def keeping(model: nn.Sequential) -> dict[str, Tensor]:
    """What a hook keeps of the model."""
    kept = dict[str, Tensor]()
    model[1].register_forward_hook(lambda *call: kept.update(size=call[-1].detach().norm()))
    return kept


def in_the_gradient_alone(model: nn.Sequential) -> Loss:
    kept = keeping(model)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        straight = (output - output.detach()).sum()
        return functional.mse_loss(output, target) + straight * kept["size"]

    return loss


def in_a_hook_of_the_output(model: nn.Sequential) -> Loss:
    kept = keeping(model)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        result = output * 1.0
        result.register_hook(lambda gradient: gradient * kept["size"])
        return functional.mse_loss(result, target)

    return loss


def in_the_gradient_of_its_parameter(model: nn.Sequential) -> Loss:
    kept = keeping(model)

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(6))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return functional.mse_loss(output + self.shift * kept["size"], target)

    return Shifted()


def beside_what_is_drawn(model: nn.Sequential) -> Loss:
    kept, generator = keeping(model), torch.Generator()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        drawn = random.random() + np.random.rand() + torch.rand((), generator=generator)
        return functional.mse_loss(output, target) * kept["size"] * drawn

    return loss


def plain(_model: nn.Sequential) -> Loss:
    return functional.mse_loss


def drawing(_model: nn.Sequential) -> Loss:
    return lambda output, target: functional.mse_loss(functional.dropout(output), target)


def choosing(_model: nn.Sequential) -> Loss:
    return lambda output, target: functional.mse_loss(output, target) * random.choice([0.5, 1.0])


def taking_turns(_model: nn.Sequential) -> Loss:
    turns = itertools.cycle([0.5, 1.0])
    return lambda output, target: functional.mse_loss(output, target) * next(turns)


def doing_more_every_third_time(_model: nn.Sequential) -> Loss:
    calls = itertools.count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        more = output.abs().mean() if next(calls) % 3 == 0 else 0.0
        return functional.mse_loss(output, target) + more

    return loss


def drawing_of_its_own(_model: nn.Sequential) -> Loss:
    numbers, generator = np.random.default_rng(0), torch.Generator()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        drawn = torch.rand((), generator=generator) < 0.5
        return functional.mse_loss(output, target) * drawn * numbers.integers(2)

    return loss


def taking_out(model: nn.Sequential) -> Loss:
    """In the order in which a hook has put in: that is right."""
    kept = deque[Tensor]()
    model[1].register_forward_hook(lambda *call: kept.append(call[-1].detach()))
    return lambda output, target: functional.mse_loss(output, target + kept.popleft())


def going_back_alone(_model: nn.Sequential) -> Loss:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        own = functional.mse_loss(output, target)
        own.backward()
        return own

    return loss


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
    by_an_attribute_of_a_layer,
    by_a_list_of_the_model,
    by_a_reference,
    beside_the_loss,
    in_the_gradient_alone,
    in_a_hook_of_the_output,
    in_the_gradient_of_its_parameter,
    beside_what_is_drawn,
]
ALLOWED = [
    plain,
    drawing,
    choosing,
    taking_turns,
    doing_more_every_third_time,
    drawing_of_its_own,
    taking_out,
    going_back_alone,
    counting,
    warming,
    averaging,
    logged,
    failing,
    constant,
]


def by_a_number_in_a_dict(model: nn.Sequential) -> Loss:
    kept = {"size": 1.0}
    model[1].register_forward_hook(lambda *call: call[-1] * kept["size"])

    def loss(output: Tensor, target: Tensor) -> Tensor:
        kept["size"] = 1.0 + output.detach().abs().mean().item()
        return functional.mse_loss(output, target)

    return loss


def by_an_attribute(model: nn.Sequential) -> Loss:
    diary = Diary()
    model[2].register_forward_hook(lambda *call: call[-1] + (diary.mean or 0.0))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        result = functional.mse_loss(output, target)
        diary.mean = result.item()
        return result

    return loss


def by_a_count(model: nn.Sequential) -> Loss:
    seen = [0]
    model[0].register_forward_hook(lambda *call: call[-1] / (1 + seen[0]))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen[0] += 1
        return functional.mse_loss(output, target)

    return loss


@pytest.mark.parametrize("make", [by_a_number_in_a_dict, by_an_attribute, by_a_count])
def test_what_a_loss_leaves_for_the_next_forward_is_refused(make: Callable[[Any], Loss]) -> None:
    with pytest.raises(InputError, match="the forward uses what loss_fn leaves"):
        ask(make)


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


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_alike_samples_hide_nothing(value: float) -> None:
    model = layers()
    call, loss = Arguments((torch.full((4, 6), value),), {}), by_a_dict(model)
    with pytest.raises(InputError, match=MESSAGE):
        refuse_late_loss(Target(model, call, loss), call, torch.zeros(4, 6))


def test_a_forward_that_takes_only_data_like_the_sample() -> None:
    model = layers()

    def refuse_unsorted(_module: nn.Module, given: tuple[Tensor]) -> None:
        if not given[0][:, 0].diff().ge(0).all():
            raise ValueError("rows must be sorted")

    model[0].register_forward_pre_hook(refuse_unsorted)
    batch = torch.arange(48.0).reshape(8, 6) / 48
    call, following = Arguments((batch[:4],), {}), Arguments((batch[4:],), {})
    target = Target(model, call, by_a_dict(model))
    with pytest.raises(InputError, match=MESSAGE):
        refuse_late_loss(target, call, torch.zeros(4, 6), following)


class Slotted:
    __slots__ = ("mean",)

    def __init__(self) -> None:
        self.mean: Any = 0.0


def test_what_a_loss_draws_from_and_averages_is_as_before() -> None:
    generator, numbers, slotted = torch.Generator(), np.random.default_rng(0), Slotted()
    own = random.Random(0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        drawn = torch.rand((), generator=generator) + numbers.random() + own.random()
        drawn = drawn + random.random() + np.random.rand()
        slotted.mean = 0.9 * slotted.mean + output.detach().mean()
        return functional.mse_loss(output, target) * drawn

    def states() -> list[str]:
        of_numpy = numbers.bit_generator.state, np.random.get_state()
        return [*map(str, (generator.get_state().tolist(), own.getstate(), *of_numpy))]

    before, of_python = states(), random.getstate()
    pipecompile(
        layers(),
        torch.randn(8, 6),
        k=2,
        microbatches=2,
        costs="flops",
        loss_fn=loss,
        sample_target=torch.randn(8, 6),
    )
    assert states() == before
    assert random.getstate() == of_python
    assert slotted.mean == 0.0


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
    state = torch.get_rng_state()
    refuse_late_loss(Target(model, call, loss), call, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(loss, nn.Module)
    assert not loss.get_buffer("mean").any()
    assert torch.equal(torch.get_rng_state(), state)


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
