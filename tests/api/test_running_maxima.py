"""State that data decides about: maxima, averages and last values that a node writes so that no
operator shows it, or that code keeps outside of modules, are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize
from torch.nn import functional

from pipecompile import CaptureError, InfeasibleError, InputError, pipecompile
from tests.plain_loop import mean_square, steps_alike

WIDTH = 8
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Linear):
    """A layer with a buffer, which is one node."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("largest", torch.full((WIDTH,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        self.note(x.detach())
        return super().forward(x / self.largest)

    def note(self, x: Tensor) -> None:
        self.largest.data = torch.maximum(self.largest.data, x.abs().amax(0))


class Copied(Scaled):
    def note(self, x: Tensor) -> None:
        self.largest.data.copy_(torch.maximum(self.largest, x.abs().amax(0)))


class Last(Scaled):
    def note(self, x: Tensor) -> None:
        self.largest.data.copy_(x.abs().amax(0) + 1.0)


class Averaged(Scaled):
    def note(self, x: Tensor) -> None:
        self.largest.data.lerp_(x.abs().amax(0), 0.1)


class Rounded(Scaled):
    """It trains with rounded values, whose grid is that of the largest so far."""

    def forward(self, x: Tensor) -> Tensor:
        self.note(x.detach())
        step = self.largest.max() / 127
        return super(Scaled, self).forward(x + ((x / step).round() * step - x).detach())


class InContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor) -> Tensor:
        largest.data.copy_(torch.maximum(largest, x.abs().amax(0)))
        ctx.save_for_backward(largest)
        return x / largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / ctx.saved_tensors[0], None


class ByFunction(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super(Scaled, self).forward(InContext.apply(x, self.largest))


def hooked() -> nn.Module:
    layer: Any = nn.Linear(WIDTH, WIDTH)
    layer.register_buffer("largest", torch.full((WIDTH,), 0.01))

    def note(_module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        layer.largest.data = torch.maximum(layer.largest, given[0].detach().abs().amax(0))
        return (given[0] / layer.largest,)

    layer.register_forward_pre_hook(note)
    return layer  # type: ignore[no-any-return]


class Unreached(Copied):
    """Its maximum begins above all that the sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.largest.fill_(50.0)


def test_a_fused_observer_of_torch_is_refused_with_a_way() -> None:
    made = FusedMovingAvgObsFakeQuantize.with_args(quant_min=0, quant_max=255)()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), made, nn.Linear(WIDTH, WIDTH))
    model(X)  # it resizes its buffers the first time
    with pytest.raises(CaptureError, match="use FakeQuantize with an observer of its own"):
        pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=mean_square)


class Counter(nn.Module):
    """It writes to a buffer as anybody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


@pytest.mark.parametrize("beside", [nn.Tanh, Counter, lambda: nn.BatchNorm1d(WIDTH)])
@pytest.mark.parametrize(
    "made",
    [
        *(Scaled, Copied, Last, Averaged, Rounded, ByFunction, hooked),
        FusedMovingAvgObsFakeQuantize.with_args(quant_min=0, quant_max=255),
    ],
)
def test_what_no_operator_shows_is_refused(
    made: Callable[[], nn.Module], beside: Callable[[], nn.Module]
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), beside(), made(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError):
        pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=mean_square)


class UnreachedTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"largest": 50.0}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["largest"] = max(self.kept["largest"], x.detach().abs().max().item())
        return x / self.kept["largest"]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (Unreached, r"1.largest: the forward writes to it by another name"),
        (UnreachedTable, r"1.kept: the forward changes it on some data only"),
    ],
)
def test_what_the_sample_does_not_reach_is_refused(
    made: Callable[[], nn.Module], words: str
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), made(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=words):
        pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=mean_square)


@pytest.mark.parametrize("made", [Counter, FakeQuantize, lambda: nn.BatchNorm1d(WIDTH)])
def test_what_operators_show_is_right(made: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), made(), nn.Tanh())
    steps_alike(model, [X, X * 3], microbatches=4)


KEPT: dict[str, Any] = {"largest": 0.0}
LARGEST, SPACE = 0.0, SimpleNamespace(largest=0.0)


class OfClass(nn.Module):
    largest = 0.0

    def forward(self, x: Tensor) -> Tensor:
        OfClass.largest = max(OfClass.largest, x.abs().max().item())
        return x / OfClass.largest


class OfTable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        KEPT["largest"] = max(KEPT["largest"], x.abs().max().item())
        return x / KEPT["largest"]


class OfGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        global LARGEST
        LARGEST = max(LARGEST, x.abs().max().item())
        return x / LARGEST


class OfSpace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SPACE.largest = max(SPACE.largest, x.abs().max().item())
        return x / SPACE.largest


class OfLayer(nn.Linear):
    largest = 0.0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        OfLayer.largest = max(OfLayer.largest, x.abs().max().item())
        return super().forward(x / OfLayer.largest)


class InBackward(torch.autograd.Function):
    largest = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        InBackward.largest = max(InBackward.largest, float(x.abs().max()))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / InBackward.largest


class OfFunction(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = InBackward.apply(x)
        return result


@pytest.mark.parametrize("made", [OfClass, OfTable, OfGlobal, OfSpace, OfLayer, OfFunction])
def test_a_maximum_outside_of_modules_is_refused_and_left_as_it_was(
    made: Callable[[], nn.Module],
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), made(), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match="the forward changes it"):
        pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=mean_square)
    kept = (KEPT["largest"], LARGEST, SPACE.largest)
    assert (*kept, OfClass.largest, OfLayer.largest, InBackward.largest) == (0.0,) * 6


@pytest.mark.parametrize("start", [0.0, torch.zeros(())])
def test_a_backward_hook_may_use_what_its_forward_hook_kept_last(start: Any) -> None:
    layer, kept = nn.Linear(WIDTH, WIDTH), {"largest": start}
    layer.register_forward_hook(
        lambda *call: kept.update(
            largest=torch.maximum(torch.as_tensor(kept["largest"]), call[1][0].detach().abs().max())
        )
    )
    layer.register_full_backward_hook(lambda *call: (call[1][0] / kept["largest"],))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match="with two microbatches in flight"):
        pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=mean_square)
    assert kept["largest"] is start


class OfAttribute(nn.Module):
    """It knows the largest number so far, as an observer of a quantisation does."""

    largest: Any = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, x.detach().abs().max().item())
        return x / self.largest


class OfOwnTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"largest": 1e-3}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["largest"] = max(self.kept["largest"], x.detach().abs().max().item())
        return x / self.kept["largest"]


def known_by_a_hook(start: Any = 1e-3) -> nn.Module:
    layer, kept = nn.Linear(WIDTH, WIDTH), [start]

    def divided(_module: nn.Module, _given: Any, output: Tensor) -> Tensor:
        kept[0] = max(kept[0], output.detach().abs().max().item())
        return output / kept[0]

    layer.register_forward_hook(divided)
    return layer


KNOWING = [OfAttribute, OfOwnTable, known_by_a_hook, lambda: known_by_a_hook(50.0)]
RISING = torch.linspace(1, 200, 8)[:, None] * X.sign()


def models_of(made: Callable[[], nn.Module]) -> list[nn.Module]:
    models: list[nn.Module] = []
    for _ in range(2):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), made(), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
        models.append(nn.Sequential(*layers, nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    return models


@pytest.mark.parametrize("made", KNOWING)
@pytest.mark.parametrize("recompute", ["none", "block", "auto"])
def test_a_maximum_is_never_that_of_a_later_microbatch(
    made: Callable[[], nn.Module], recompute: Any
) -> None:
    """A recomputed forward would run once more when those of later microbatches have run."""
    model, unsplit = models_of(made)
    pipe = pipecompile(
        *(model, X),
        k=3,
        microbatches=4,
        costs="flops",
        loss_fn=mean_square,
        recompute=recompute,
    )
    pipe.step(RISING)
    for rows in RISING.chunk(4):
        (mean_square(unsplit(rows), None) / 4).backward()
    for ours, its in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert torch.equal(ours.grad, its.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("made", [*KNOWING, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH))])
@pytest.mark.parametrize("recompute", ["stage", "except-last"])
def test_whole_stages_with_it_do_not_run_again(
    made: Callable[[], nn.Module], recompute: Any
) -> None:
    model, _ = models_of(made)
    options: Any = {"k": 3, "microbatches": 4, "costs": "flops", "recompute": recompute}
    if made in KNOWING:
        with pytest.raises(InfeasibleError, match=r"may not run twice: .* choose auto or none"):
            pipecompile(model, X, loss_fn=mean_square, **options)
    else:
        pipecompile(model, X, loss_fn=mean_square, **options).step(X)


def test_a_loss_may_not_use_a_maximum_of_a_hook() -> None:
    model, kept = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), {"largest": 50.0}

    def note(_module: nn.Module, _given: Any, output: Tensor) -> None:
        kept["largest"] = max(kept["largest"], output.detach().abs().max().item())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target) / kept["largest"]

    model[0].register_forward_hook(note)
    with pytest.raises(InputError, match="loss_fn uses what the forward leaves"):
        pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=loss, sample_target=X)
    assert kept == {"largest": 50.0}


def rectified_by_a_hook() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda _, __, output: functional.rrelu(output, training=True))
    return layer


class Rectified(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.rrelu(super().forward(x), training=True)


@pytest.mark.parametrize(
    "made",
    [
        *(nn.RReLU, rectified_by_a_hook),
        lambda: Rectified(WIDTH, WIDTH),
        lambda: nn.RReLU(inplace=True),
    ],
)
@pytest.mark.parametrize("recompute", ["block", "stage"])
def test_rrelu_is_recomputed_with_its_noise(made: Callable[[], nn.Module], recompute: Any) -> None:
    gradients = []
    for policy in ("none", recompute):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), made(), nn.Linear(WIDTH, WIDTH), made()]
        model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
        pipeline = pipecompile(
            model,
            X,
            k=2,
            microbatches=4,
            costs="flops",
            loss_fn=mean_square,
            recompute=policy,
        )
        pipeline.step(X, None)
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
