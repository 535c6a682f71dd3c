"""The judge finds what a wrong capture does, and leaves the model as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from zoo.judge import Run, differences, steps, verdict


class _Keeper(nn.Module):
    """Keeps state in every way: written in place, replaced, and in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = nn.functional.dropout(self.linear(x), training=self.training)
        self.written += y.detach().mean(0)
        self.replaced = self.replaced * 0.5 + y.detach().mean(0)
        self.seen.append(len(x))
        return {
            "y": y + self.replaced,
            "count": len(self.seen),
            "nan": x.new_full((), float("nan")),
        }


def _call() -> Arguments:
    return Arguments((torch.randn(8, 3),), {})


def _plain(model: nn.Module) -> Run:
    return lambda call: model(*call.args, **call.kwargs)


def test_steps_repeat_and_leave_no_trace() -> None:
    model, call = _Keeper(), _call()
    model.linear.weight.grad = torch.ones(3, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    results = steps(model, call, _plain(model))
    assert differences(results, steps(model, call, _plain(model))) == []
    assert results[1].outputs["output['count']"] == 2
    assert differences(results[:1], results[1:]) != []
    assert model.seen == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.linear.weight.grad, torch.ones(3, 3))
    assert torch.equal(torch.get_rng_state(), random)


def _scaled(model: _Keeper, x: Tensor) -> Any:
    outputs = model(x)
    outputs["y"].register_hook(lambda gradient: gradient * 2)
    return outputs


def _unwritten(model: _Keeper, x: Tensor) -> Any:
    before = model.written.clone()
    outputs = model(x)
    model.written.copy_(before)
    return outputs


def _forgetful(model: _Keeper, x: Tensor) -> Any:
    before = model.replaced
    outputs = model(x)
    model.replaced = before
    return outputs


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda model, x: model(x) | {"y": model(x)["y"]}, "outputs output['y']"),
        (lambda model, x: model(x) | {"count": 0}, "outputs output['count']"),
        (lambda model, x: {"y": model(x)["y"]}, "outputs output['nan']"),
        (_scaled, "gradients linear.bias"),
        (_unwritten, "buffers written"),
        (_forgetful, "buffers replaced"),
    ],
)
def test_a_wrong_run_is_found(wrong: Callable[[_Keeper, Tensor], Any], expected: str) -> None:
    model, call = _Keeper(), _call()
    got = steps(model, call, lambda call: wrong(model, *call.args))
    assert expected in differences(steps(model, call, _plain(model)), got)


def test_the_verdict_names_mode_and_batch() -> None:
    def eval_only(model: nn.Module, call: Arguments) -> Callable[[Arguments], Run]:
        return lambda call: lambda call: model.eval()(*call.args)

    differing = verdict(eval_only, Target(_Keeper(), _call()), batches=(4, 2))
    assert differing.keys() == {"train at 4", "train at 2"}
