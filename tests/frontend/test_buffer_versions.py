"""Buffers that a forward writes to while earlier microbatches still need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import steps_alike
from torch import Tensor, nn
from traps import WIDTH, Two, refused

from pipecompile import CaptureError, pipecompile
from tests.sweeps import examples

BATCHES = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(3)]


class Written(Two):
    """Two layers with a function of the module between them, and a buffer that it may write to."""

    def __init__(self, function: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("kept", torch.ones(WIDTH))
        self.register_buffer("codes", torch.eye(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.second(self.function(self, torch.tanh(self.first(value))))


def running_scale(module: Written, value: Tensor) -> Tensor:
    with torch.no_grad():
        module.kept.lerp_(value.std(0), 0.1)
    return value / module.kept


def through_data(module: Written, value: Tensor) -> Tensor:
    module.kept.data.lerp_(value.detach().std(0), 0.1)
    return value / module.kept


def soft_codes(module: Written, value: Tensor) -> Tensor:
    with torch.no_grad():
        weights = (value @ module.codes.T).softmax(-1)
        module.codes.mul_(0.9).add_(weights.T @ value, alpha=0.1)
    return (value @ module.codes.T).softmax(-1) @ module.codes


def counted(module: Written, value: Tensor) -> Tensor:
    module.count.add_(1)
    return value * module.count


def through_a_view(module: Written, value: Tensor) -> Tensor:
    module.codes[0].add_(value.detach().mean(0))
    return value @ module.codes[:2].T @ module.codes[:2]


def replaced(module: Written, value: Tensor) -> Tensor:
    result = value * module.kept
    module.kept = module.kept * 0.9 + value.detach().mean(0)
    return result


def queue(module: Written, value: Tensor) -> Tensor:
    rows = torch.arange(WIDTH) == module.count % WIDTH
    module.codes.copy_(torch.where(rows[:, None], value.detach().mean(0), module.codes))
    module.count.add_(1)
    return value @ module.codes.T


FUNCTIONS = (running_scale, through_data, soft_codes, counted, through_a_view, replaced, queue)


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_each_microbatch_sees_the_buffer_as_a_plain_loop_would(
    function: Callable[[Written, Tensor], Tensor], schedule: str
) -> None:
    torch.manual_seed(0)
    steps_alike(Written(function), BATCHES, microbatches=4, schedule=schedule)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("function", [running_scale, soft_codes, queue])
def test_so_it_does_where_stages_recompute(
    function: Callable[[Written, Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    layers = [Written(function), Written(function), nn.Linear(WIDTH, WIDTH)]
    model = nn.Sequential(*layers)
    steps_alike(model, BATCHES, microbatches=4, schedule="gpipe", recompute="stage", k=3)


class Asking(Two):
    """Writes to a buffer that its backward needs; it is one node, since it asks data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        if value.sum() > 1e6:
            return value
        self.kept.data.add_(1)
        return self.first(value) / self.kept


def test_a_write_that_the_graph_does_not_show_is_refused() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Asking(), nn.Linear(WIDTH, WIDTH))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match=r"with two microbatches in flight.* in 1;"):
        pipecompile(
            model, BATCHES[0], k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
        )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


class Fading(torch.autograd.Function):
    """A product with a scale, which fades with each backward."""

    @staticmethod
    def forward(context: Any, value: Tensor, scale: Tensor) -> Tensor:
        """The product."""
        context.scale = scale
        return value * scale

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """The product of the gradient with the scale as it was."""
        result = gradient * context.scale
        context.scale.mul_(0.9)
        return result, None


class WritesBackwards(Two):
    """Its backward writes to a buffer, which the next forward reads if it `reads` any."""

    def __init__(self, *, reads: bool) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))
        self.reads = reads

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        hidden = self.first(value)
        return self.second(Fading.apply(hidden, self.scale) if self.reads else hidden)


def test_a_backward_that_writes_to_what_a_forward_reads_is_refused() -> None:
    with pytest.raises(CaptureError, match="the backward of the first writes to a buffer"):
        pipecompile(WritesBackwards(reads=True), BATCHES[0], k=2, costs="flops", microbatches=2)


def test_one_that_no_forward_reads_is_not() -> None:
    model = WritesBackwards(reads=False)

    def count(_: nn.Module, __: object, gradients: tuple[Tensor, ...]) -> None:
        model.scale.add_(gradients[0].abs().mean(0))

    model.first.register_full_backward_hook(count)
    pipecompile(model, BATCHES[0], k=2, costs="flops", microbatches=2)
    assert torch.equal(model.scale, torch.ones(WIDTH))


def used_before(module: Written, value: Tensor) -> Tensor:
    result = value @ module.codes
    module.codes.data.mul_(0.9)
    return result


def test_a_change_behind_the_back_of_the_models_own_backward_is_refused() -> None:
    """In the model itself the backward of a microbatch then sees what its forward did not."""
    with pytest.raises(CaptureError, match=r"change a buffer through \.data after it was used"):
        pipecompile(
            Written(used_before),
            BATCHES[0],
            k=2,
            costs="flops",
            loss_fn=nn.functional.mse_loss,
            microbatches=2,
        )


class WritesWeight(Two):
    """Writes to a parameter in its forward."""

    def __init__(self, how: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.how = how

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        self.how(self.first)
        return self.second(self.first(value))


def clamped(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.clamp_(-0.1, 0.1)


def decayed(layer: nn.Linear) -> None:
    layer.weight.data.mul_(0.9)


def shifted(layer: nn.Linear) -> None:
    layer.bias.data[:2].sub_(0.5)


def renormalised(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch.renorm(layer.weight, 2, 0, 1.0, out=layer.weight)


def several(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch._foreach_mul_([layer.weight, layer.bias], 0.5)


def rounded(layer: nn.Linear) -> None:
    layer.weight.detach().copy_(layer.weight.detach().round(decimals=2))


def begun_anew(layer: nn.Linear) -> None:
    nn.init.constant_(layer.bias, 0.25)


WRITES_TO_PARAMETERS = [clamped, decayed, shifted, renormalised, several, rounded, begun_anew]


@pytest.mark.parametrize("how", WRITES_TO_PARAMETERS)
def test_a_write_to_a_parameter_is_refused_and_leaves_the_model_as_it_was(
    how: Callable[[nn.Linear], object],
) -> None:
    model = WritesWeight(how)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused(model, "the forward writes to the parameter first.", "test_buffer_versions.py:")
    with pytest.raises(CaptureError):
        pipecompile(
            model, BATCHES[0], k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
        )
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


@settings(max_examples=examples(8), deadline=None)
@given(
    st.floats(0.1, 0.9),
    st.permutations(["write", "read", "read again"]),
    st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    st.sampled_from([2, 4]),
)
def test_reads_and_writes_in_any_order_are_those_of_the_loop(
    share: float, order: list[str], schedule: str, microbatches: int
) -> None:
    def function(module: Written, value: Tensor) -> Tensor:
        for action in order:
            if action == "write":
                module.kept.mul_(1 - share).add_(value.detach().abs().mean(0), alpha=share)
            else:
                value = torch.tanh(value) * module.kept
        return value

    torch.manual_seed(0)
    steps_alike(Written(function), BATCHES, microbatches=microbatches, schedule=schedule)


def normalised(module: Written, value: Tensor) -> Tensor:
    """With a mean that is kept in training only, and parts that may be cut apart behind it."""
    if module.training:
        with torch.no_grad():
            module.kept.lerp_(value.mean(0), 0.1)
    return (value - module.kept).tanh().square().sin()


def coded(module: Written, value: Tensor) -> Tensor:
    if module.training:
        module.codes.mul_(0.9).add_(value.detach().T @ value.detach(), alpha=0.1)
    return (value @ module.codes.T).softmax(-1) @ module.codes


def centred(module: Written, value: Tensor) -> Tensor:
    if module.training:
        module.kept = module.kept * 0.9 + value.detach().mean(0)
    return (value * 2 - module.kept).softmax(-1)


def calibrated(module: Written, value: Tensor) -> Tensor:
    if module.training:
        torch.maximum(module.kept, value.detach().abs().amax(0), out=module.kept)
    return (value / module.kept).round().mul(module.kept) + value


def warmed(module: Written, value: Tensor) -> Tensor:
    if module.training:
        module.count += 1
    return value.tanh() * (module.count / (module.count + 1))


def whitened(module: Written, value: Tensor) -> Tensor:
    if module.training:
        rows = value.detach()
        module.codes.data.lerp_(rows.T @ rows / len(rows), 0.1)
    return torch.linalg.solve(module.codes + torch.eye(WIDTH), value.mT).mT


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize(
    "function", [normalised, coded, centred, calibrated, warmed, whitened], ids=lambda f: f.__name__
)
def test_a_buffer_that_is_written_in_training_only_is_read_in_evaluations(
    function: Callable[[Written, Tensor], Tensor], k: int
) -> None:
    torch.manual_seed(0)
    model = Written(function)
    pipeline = pipecompile(
        model, BATCHES[0], k=k, microbatches=2, costs="flops", loss_fn=nn.functional.mse_loss
    )
    for batch in BATCHES:
        pipeline.step(batch, torch.tanh(batch))
        got = pipeline.evaluate(batch)
        model.eval()
        assert torch.equal(got, torch.cat([model(each) for each in batch.chunk(2)]))
        model.train()
