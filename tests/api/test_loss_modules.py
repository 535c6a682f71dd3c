"""Losses that have parameters: they train like the model's layers, on the last stage."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from loss_modules import LOSS_MODULES, WIDTH, Head, Projected, data, layers, unsplit_step
from torch import Tensor, nn

from pipecompile import InputError, Pipeline, pipecompile
from pipecompile.api.verification import verify
from pipecompile.frontend.loss_reduction import LossReduction
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.training.checkpoint import Checkpoint

MICROBATCHES, SIZE = 4, 2
X, Y = data(MICROBATCHES * SIZE)


class Pair:
    """A model and a loss that are trained by a pipeline, and copies of both that a loop trains."""

    def __init__(self, loss_fn: nn.Module, **options: Any) -> None:
        self.model, self.loss_fn = layers(), loss_fn.double()
        self.twins = copy.deepcopy((self.model, self.loss_fn))
        options = {"k": 2, "costs": "flops", "self_check": False, **options}
        self.pipeline: Pipeline = pipecompile(
            self.model, X, microbatches=MICROBATCHES, loss_fn=self.loss_fn, **options
        )
        self.optimizers = [
            torch.optim.SGD(parameters, lr=0.1)
            for parameters in (self.pipeline.parameters(), map_parameters(*self.twins))
        ]

    def step_alike(self, samples: int = len(X), total: float | None = None) -> None:
        """Assert that one step of both leaves the same gradients, weights and buffers."""
        batch, target = X[:samples], Y[:samples]
        torch.manual_seed(3)  # of what the loss draws
        self.pipeline.step(batch, target)
        torch.manual_seed(3)
        unsplit_step(*self.twins, batch, target, SIZE, total or samples / SIZE)
        for own, other in zip(self.pipeline.parameters(), map_parameters(*self.twins), strict=True):
            assert same(own.grad, other.grad)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = self.pipeline.state_dict()
        twin, loss_twin = self.twins
        wanted = {**twin.state_dict(), **loss_twin.state_dict(prefix="loss_fn.")}
        assert state.keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(state[name], value), name


def map_parameters(*modules: nn.Module) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right if left is None or right is None else torch.equal(left, right)


SCHEDULES: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "sample_target": Y},
    "recompute": {"schedule": "1f1b", "recompute": "stage"},
    "zb-h1": {"k": 3, "schedule": "zb-h1"},
    "zb-v": {"k": None, "ranks": 2, "schedule": "zb-v"},
    "interleaved": {"k": None, "ranks": 2, "schedule": "interleaved-1f1b"},
}


@pytest.mark.parametrize("name", LOSS_MODULES)
def test_a_loss_with_parameters_trains_as_in_a_loop(name: str) -> None:
    # All forwards come before the first backward, which needs buffers as its forward saw them.
    pair = Pair(LOSS_MODULES[name](), schedule="gpipe")
    pair.step_alike()
    pair.step_alike()


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_schedule_and_reduction(schedule: str, reduction: LossReduction) -> None:
    loss_fn = Head(reduction, dropout=0.3)
    pair = Pair(loss_fn, loss_reduction=reduction, **SCHEDULES[schedule])
    for samples in (8, 7):  # the last microbatch of 7 has one sample
        totals = {"mean": samples / SIZE, "sum": 1.0, "weighted": float(samples)}
        pair.step_alike(samples, totals[reduction])


def test_the_last_stage_has_it_and_the_plan_counts_it() -> None:
    options: dict[str, Any] = {"k": 2, "microbatches": 4, "costs": "flops", "optimizer": "adam"}
    without = pipecompile(layers(), X, loss_fn=square, **options)
    loss_fn = Head()
    loss_fn.big = nn.Parameter(torch.ones(1 << 20))
    pipeline = Pair(loss_fn, optimizer="adam").pipeline
    held = {each.name: each.stages for each in pipeline.plan.parameters}
    assert {name for name in held if held[name] == (1,)} >= {
        *(f"loss_fn.{name}" for name, _ in loss_fn.named_parameters()),
        "loss_fn.center",
    }
    kinds = attrgetter("parameters", "gradients", "optimizer")
    ranks = pipeline.plan.prediction.memory, without.plan.prediction.memory
    for times, (now, before) in zip((0, 1), zip(*ranks, strict=True), strict=True):
        # The gradient is as large as the parameter, and Adam keeps two slots.
        for amount, other, count in zip(kinds(now), kinds(before), (1, 1, 2), strict=True):
            assert round((amount.expected - other.expected) / (8 << 20)) == times * count


def square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def test_modes_clipping_scaling_and_accumulation_know_it() -> None:
    pair = Pair(Head(dropout=0.5))
    pipeline, loss_fn = pair.pipeline, pair.loss_fn
    before = loss_fn.center.clone()
    evaluated = pipeline.evaluate(X, Y)
    assert loss_fn.training and torch.equal(loss_fn.center, before)
    pair.model.eval(), loss_fn.eval()
    with torch.no_grad():
        wanted = [loss_fn(pair.model(x), y) for x, y in zip(X.split(2), Y.split(2), strict=True)]
    assert torch.equal(evaluated, torch.stack(wanted).mean())
    pipeline.train()
    assert loss_fn.dropout.training
    pipeline.eval()
    assert not loss_fn.dropout.training

    twins = copy.deepcopy((pair.model, loss_fn))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pipeline.step(X, Y, accumulate=True, scaler=scaler)
    assert loss_fn.temperature.grad is None
    pipeline.step(X, Y, scaler=scaler)
    for total in (1.0, MICROBATCHES / 8):
        unsplit_step(*twins, X, Y, SIZE, total)
    for own, other in zip(pipeline.parameters(), map_parameters(*twins), strict=True):
        assert same(own.grad, other.grad)
    norm = pipeline.clip_grad_norm_(1e-3)
    own = torch.stack([p.grad.norm() for p in pipeline.parameters()]).norm()
    assert torch.allclose(own, torch.tensor(1e-3).double()) and norm > 1e-3
    assert loss_fn.temperature.grad is not None
    pipeline.zero_grad()
    assert loss_fn.temperature.grad is None


def test_states_and_checkpoints_have_it(tmp_path: Path) -> None:
    pair = Pair(Head())
    pair.step_alike()
    pair.pipeline.checkpoint(pair.optimizers[0]).save(tmp_path / "run")
    pair.pipeline.save_safetensors(tmp_path / "weights.safetensors")
    resumed = Pair(Head())
    resumed.pipeline.checkpoint(resumed.optimizers[0]).load(tmp_path / "run")
    loaded = Pair(Head())
    loaded.pipeline.load_safetensors(tmp_path / "weights.safetensors")
    # The unsplit model has the same names once the loss is its module.
    unsplit = layers()
    unsplit.loss_fn = Head().double()
    Checkpoint.of_model(unsplit, torch.optim.SGD(unsplit.parameters())).load(tmp_path / "run")
    wanted = pair.pipeline.state_dict()
    for state in (
        resumed.pipeline.state_dict(),
        loaded.pipeline.state_dict(),
        unsplit.state_dict(),
    ):
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_a_state_of_the_model_alone_leaves_the_loss_as_it_was() -> None:
    pair = Pair(Head())
    pair.loss_fn.temperature.data.fill_(5.0)
    pair.pipeline.load_state_dict(layers().state_dict())
    assert pair.loss_fn.temperature == 5.0
    part = {**layers().state_dict(), "loss_fn.center": torch.zeros(4)}
    with pytest.raises(InputError, match=r"loss_fn\.layer\.bias, .* are missing from"):
        pair.pipeline.load_state_dict(part)


def test_verify_compares_its_gradients() -> None:
    target = Target(layers(), arguments_of(layers(), X), Head().double(), Y)
    _, comparisons = verify(target, k=2, microbatches=4)
    for comparison in comparisons:
        assert comparison.passed
        names = {difference.name for difference in comparison.differences}
        assert {"loss_fn.temperature", "loss_fn.layer.weight", "loss_fn.center"} <= names


def test_a_model_on_the_meta_device_with_a_loss_on_it_or_in_memory() -> None:
    for device in ("meta", "cpu"):
        with torch.device("meta"):
            model = layers()
        with torch.device(device):
            loss_fn = nn.Sequential(nn.Linear(WIDTH, 4)).double()
        loss = Projected(loss_fn)
        before = loss_fn[0].weight
        pipeline = pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=loss)
        pipeline.step(X, Y)
        weight = dict(pipeline.named_parameters())["loss_fn.layers.0.weight"]
        assert weight.grad is not None and weight.grad.abs().max() > 0
        assert device == "meta" or torch.equal(weight, before)


# -- refused


def of_model(change: Callable[[nn.Sequential], nn.Module]) -> Callable[[], Any]:
    """A model, and a loss that has something of it."""

    def pair() -> tuple[nn.Module, nn.Module]:
        model = layers()
        return model, change(model)

    return pair


def named(model: nn.Sequential) -> nn.Module:
    model.add_module("loss_fn", nn.Identity())
    return Head().double()


class Growing(nn.Module):
    """It makes a parameter when it is called."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to a scalar."""
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones((), dtype=output.dtype))
        return (output * self.scale).square().mean()


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "a layer of the model": (of_model(lambda m: Projected(m[-2])), "which is '10.weight' of the"),
    "the whole model": (of_model(lambda m: Projected(m)), "which is '0.weight' of the model"),
    "the name": (of_model(named), "the model has 'loss_fn' already"),
    "lazy": (of_model(lambda m: Projected(nn.LazyLinear(4))), "without a shape"),
    "scripted": (
        of_model(lambda m: torch.jit.script(nn.CrossEntropyLoss(weight=torch.ones(4)))),
        "loss_fn is a scripted module",
    ),
    "growing": (of_model(lambda m: Growing()), "trains a tensor of shape .* no output"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_no_stage_can_hold_is_refused(what: str) -> None:
    make, words = REFUSED[what]
    model, loss_fn = make()
    with pytest.raises(InputError, match=words):
        pipecompile(model, X, k=2, costs="flops", loss_fn=loss_fn, microbatches=2).step(X, Y)


class Uncopied(Head):
    """It holds what nobody can copy."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held


@pytest.mark.parametrize("held", [torch.Generator(), threading.Lock(), iter([1]).__next__])
def test_a_loss_or_a_layer_may_hold_what_cannot_be_copied(held: Any) -> None:
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.held = held

    model = nn.Sequential(*layers(), Layer()).double()
    pipeline = pipecompile(
        model, X, k=2, costs="flops", loss_fn=Uncopied(held).double(), microbatches=2
    )
    assert pipeline.step(X, Y).isfinite()


def test_parameters_that_change_later_are_refused() -> None:
    pair = Pair(Head())
    pair.pipeline.step(X, Y)
    pair.loss_fn.layer.requires_grad_(False)
    with pytest.raises(InputError, match=r"loss_fn.layer.weight requires no gradient, but did"):
        pair.pipeline.step(X, Y)
    pair.loss_fn.layer.requires_grad_(True)
    pair.loss_fn.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))
    with pytest.raises(InputError, match="loss_fn has other parameters"):
        pair.pipeline.step(X, Y)


def test_a_buffer_that_changes_its_shape_is_refused() -> None:
    loss_fn = Head().double()
    loss_fn._move_center = lambda logits: setattr(loss_fn, "center", logits)
    pipeline = pipecompile(layers(), X, k=2, microbatches=4, costs="flops", loss_fn=loss_fn)
    with pytest.raises(InputError, match=r"leaves torch.float64 of shape \(2, 4\) in the place"):
        pipeline.step(X, Y)


def test_constants_of_the_model_stay_there() -> None:
    model = layers()
    model.register_buffer("weights", torch.ones(WIDTH).double())
    loss_fn = nn.CrossEntropyLoss(weight=model.weights)
    pipeline = pipecompile(model, X, k=2, microbatches=4, costs="flops", loss_fn=loss_fn)
    pipeline.step(X, Y)
    assert not any(name.startswith("loss_fn") for name in pipeline.state_dict())
