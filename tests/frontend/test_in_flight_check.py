"""What code keeps of one microbatch, and another one in flight would use, is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_loop import steps_alike
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pipecompile import CaptureError, pipecompile

WIDTH = 8
BATCHES = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(2)]


def layers(*replaced: nn.Module) -> nn.Sequential:
    """Three layers with tanh between them, of which the first ones are `replaced`."""
    linears = [*replaced, *(nn.Linear(WIDTH, WIDTH) for _ in range(3 - len(replaced)))]
    return nn.Sequential(*(each for linear in linears for each in (linear, nn.Tanh())))


def hooks_with_a_dict() -> nn.Module:
    model, kept = layers(), dict[nn.Module, Tensor]()

    def keep(module: nn.Module, inputs: Any, _: Any) -> None:
        kept[module] = inputs[0].detach()

    def scale(module: nn.Module, gradients: Any) -> Any:
        return (gradients[0] * kept[module].abs().mean(),)

    for linear in model[::2]:
        linear.register_forward_hook(keep)
        linear.register_full_backward_pre_hook(scale)
    return model


def hooks_that_take_what_they_left() -> nn.Module:
    """The backward of the second finds nothing."""
    model = layers()

    def take(module: nn.Module, gradients: Any) -> Any:
        mean = module.mean
        del module.mean
        return (gradients[0] * mean,)

    model[2].register_forward_pre_hook(
        lambda module, inputs: setattr(module, "mean", inputs[0].detach().abs().mean())
    )
    model[2].register_full_backward_pre_hook(take)
    return model


def hook_of_a_parameter() -> nn.Module:
    model, sizes = layers(), dict[str, Tensor]()
    model[0].register_forward_pre_hook(
        lambda _, inputs: sizes.update(first=inputs[0].detach().abs().mean())
    )
    model[0].weight.register_hook(lambda gradient: gradient * sizes["first"])
    return model


def hooks_of_two_layers() -> nn.Sequential:
    model, kept = layers(), dict[str, Tensor]()
    model[0].register_forward_hook(lambda _, __, output: kept.update(first=output.detach()))
    model[4].register_forward_hook(lambda _, __, output: output + kept["first"])
    return model


class KeepsInItsClass(torch.autograd.Function):
    """A sine that keeps its argument in its class."""

    last: Tensor

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        """The sine."""
        KeepsInItsClass.last = value.detach()
        return value.sin()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """The gradient by the last argument."""
        return gradient * KeepsInItsClass.last.cos()


class KeepsOnAStack(torch.autograd.Function):
    """A sine that pushes its argument in the forward, and pops it in the backward."""

    stack: list[Tensor] = []

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        """The sine."""
        KeepsOnAStack.stack.append(value.detach())
        return value.sin()

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """The gradient by the argument that was pushed last."""
        return gradient * KeepsOnAStack.stack.pop().cos()


class KeepsInItsContext(torch.autograd.Function):
    """A sine as torch wants it."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        """The sine."""
        context.save_for_backward(value)
        return value.sin()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """The gradient by its own argument."""
        return gradient * context.saved_tensors[0].cos()


class Applied(nn.Module):
    """A layer, then a Function."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(WIDTH, WIDTH), function

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        result: Tensor = self.function.apply(self.linear(value))
        return result


class Stashing(nn.Linear):
    """One node, whose tensor hook reads what the forward left on it."""

    last: Tensor

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        result = super().forward(value)
        self.last = result.detach()
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * self.last.cos())
        return result


class Enclosing(nn.Linear):
    """The same with a hook that encloses what it needs, beside which `last` is only looked at."""

    last: Tensor

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        result = super().forward(value)
        last = self.last = result.detach()
        if result.requires_grad:
            result.register_hook(lambda gradient: gradient * last.cos())
        return result


class Recomputing(nn.Module):
    """One node, since it asks data, whose recompute reads what the latest forward left."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def body(self, value: Tensor) -> Tensor:
        """What is recomputed."""
        return self.linear(value).tanh() * self.mask

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        self.mask = (value.detach() > 0).to(value)
        result: Tensor = checkpoint(self.body, value, use_reentrant=False)
        return result if result.sum() < 1e9 else result * 2


class Giving(nn.Linear):
    """One node, which leaves its result for another one."""

    feature: Tensor

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        result = super().forward(value)
        self.feature = result.detach()
        return result


class Taking(nn.Linear):
    """One node, which adds what another one left."""

    def __init__(self, source: Giving) -> None:
        super().__init__(WIDTH, WIDTH)
        self.sources = [source]

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return super().forward(value) + self.sources[0].feature


def giving_and_taking() -> nn.Module:
    giving = Giving(WIDTH, WIDTH)
    return layers(giving, nn.Linear(WIDTH, WIDTH), Taking(giving))


def backward_hooks_of_two_layers() -> nn.Module:
    """Stages run the first one for two microbatches before the second one runs."""
    model, sizes = layers(), dict[str, Tensor]()
    model[4].register_full_backward_hook(
        lambda _, __, gradients: sizes.update(last=gradients[0].abs().mean())
    )
    model[0].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * sizes["last"],))
    return model


def backward_hooks_of_outputs() -> nn.Module:
    model, sizes = layers(), dict[str, Tensor]()

    def leave(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: sizes.update(last=gradient.abs().mean()))

    def take(_: nn.Module, __: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * sizes.pop("last"))

    model[4].register_forward_hook(leave)
    model[0].register_forward_hook(take)
    return model


def backward_hooks_of_a_layer_and_a_parameter() -> nn.Module:
    model, sizes = layers(), list[Tensor]()
    model[2].register_full_backward_hook(
        lambda _, __, gradients: sizes.append(gradients[0].abs().mean())
    )
    model[0].weight.register_hook(lambda gradient: gradient * sizes[-1])
    return model


MIXED = {
    "backward hooks of two layers": (backward_hooks_of_two_layers, "at 0, 4;"),
    "backward hooks of outputs": (backward_hooks_of_outputs, "at 0, 4;"),
    "backward hooks of a layer and a parameter": (
        backward_hooks_of_a_layer_and_a_parameter,
        r"at 2, 0\.weight;",
    ),
    "hooks with a dict": (hooks_with_a_dict, "at 0, 2, 4;"),
    "hooks that take what they left": (hooks_that_take_what_they_left, "at 2;"),
    "a hook of a parameter": (hook_of_a_parameter, r"at 0, 0\.weight;"),
    "hooks of two layers": (hooks_of_two_layers, "at 0, 4;"),
    "a class": (lambda: layers(Applied(KeepsInItsClass)), r"at 0 \(.*test_in_flight_check"),
    "a stack": (lambda: layers(Applied(KeepsOnAStack)), r"at 0 \(.*test_in_flight_check"),
    "a module of one node": (lambda: layers(Stashing(WIDTH, WIDTH)), "at 0;"),
    "a recompute": (lambda: layers(nn.Linear(WIDTH, WIDTH), Recomputing()), "at 2;"),
    "an attribute of another module": (giving_and_taking, "at 0, 4;"),
}
SAMPLES = {
    "eight": BATCHES[0],
    "one for each": BATCHES[0][:2],
    "alike": torch.ones(4, WIDTH),
}


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("build", "place"), MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_what_one_microbatch_keeps_and_another_one_uses_is_refused(
    build: Callable[[], nn.Module], place: str, sample: Tensor
) -> None:
    """Also where microbatches are of one sample, or all samples of the first batch are the same."""
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=f"with two microbatches in flight .*{place}"):
        pipecompile(build(), sample, k=2, costs="flops", microbatches=2)


def test_a_batch_norm_hides_nothing() -> None:
    """It writes to its statistics, which no other node touches."""
    model = hooks_of_two_layers()
    model[1] = nn.BatchNorm1d(WIDTH)
    with pytest.raises(CaptureError, match="with two microbatches in flight"):
        pipecompile(model, BATCHES[0], k=2, costs="flops", microbatches=2)


def with_hooks_that_log() -> nn.Module:
    model, means = layers(), list[Tensor]()
    model[0].register_forward_hook(lambda _, __, output: means.append(output.detach().mean()))
    model[2].register_full_backward_hook(lambda _, __, gradients: means.append(gradients[0].mean()))
    return model


def with_hooks_on_outputs() -> nn.Module:
    """What docs/design/capture.md recommends."""
    model = layers()

    def scale(_: nn.Module, inputs: Any, output: Tensor) -> None:
        size = inputs[0].detach().abs().mean()
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * size)

    for linear in model[::2]:
        linear.register_forward_hook(scale)
    return model


def with_backward_hooks_of_their_own() -> nn.Module:
    """Both write to one dict, and neither reads what the other one wrote."""
    model, seen = layers(), dict[int, list[Tensor]]({0: [], 4: []})

    def clip(index: int, _: nn.Module, gradients: Any, __: Any) -> Any:
        seen[index].append(gradients[0].norm())
        return (gradients[0] / (1 + seen[index][-1]),)

    for index in seen:
        model[index].register_full_backward_hook(partial(clip, index))
    # The gradient of the input is none.
    model.insert(0, nn.Linear(WIDTH, WIDTH))
    return model


class Doubling(nn.Linear):
    """A module of the user that keeps nothing."""

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return super().forward(value) + super().forward(value).tanh()


def with_autocast() -> nn.Module:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(Doubling(WIDTH, WIDTH))

        def forward(self, value: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                hidden = self.layers(value)
            with torch.no_grad():
                scale = self.layers(value).tanh()
            return hidden.float() * scale

    return Cast()


def with_one_batch_norm_twice() -> nn.Module:
    norm = nn.BatchNorm1d(WIDTH)
    return nn.Sequential(Doubling(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm)


APART = {
    "hooks that log": with_hooks_that_log,
    "hooks on outputs": with_hooks_on_outputs,
    "backward hooks of their own": with_backward_hooks_of_their_own,
    "a Function with its context": lambda: layers(Applied(KeepsInItsContext)),
    "a hook that encloses": lambda: layers(Enclosing(WIDTH, WIDTH)),
    "a batch norm": lambda: layers(Doubling(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "one batch norm twice": with_one_batch_norm_twice,
    "autocast": with_autocast,
    "modules of torch": layers,
}


@pytest.mark.parametrize("build", APART.values(), ids=APART)
def test_what_stays_with_its_microbatch_is_not(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    steps_alike(build(), BATCHES, microbatches=4)


def test_microbatches_draw_their_own_random_numbers() -> None:
    class Dropping(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(value), 0.5)

    model = layers(Dropping(WIDTH, WIDTH), nn.Dropout(0.5), Dropping(WIDTH, WIDTH))
    pipecompile(model, BATCHES[0], k=2, costs="flops", microbatches=2)


def test_samples_that_the_graph_is_not_for() -> None:
    """On other rows the forward takes another path, which a step would capture anew or refuse."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = Doubling(WIDTH, WIDTH)

        def forward(self, value: Tensor, kinds: Tensor) -> Tensor:
            hidden = self.linear(value)
            return hidden * 2 if kinds[0] == 0 else hidden.sin()

    sample = BATCHES[0], torch.arange(8) % 4
    pipecompile(Asking(), sample, k=2, costs="flops", microbatches=2)
