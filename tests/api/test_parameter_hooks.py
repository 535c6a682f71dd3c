"""Hooks on parameters see whole gradients, as often as in a plain loop, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import graph

from pipecompile import InputError, pipecompile
from pipecompile.training.pipeline import Pipeline

WIDTH, MICROBATCHES = 6, 2
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


class Three(nn.Module):
    """Three layers, one for each stage; `tied` are the paths that share a weight."""

    def __init__(self, tied: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for path in tied[1:]:
            self.get_submodule(path).weight = self.get_submodule(tied[0]).weight

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(value)))))


def mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def compiled(model: nn.Module, **options: Any) -> Pipeline:
    # The self-check would call the hooks too.
    given_options = {"k": 3, "self_check": False, **options}
    return pipecompile(
        model, X, microbatches=MICROBATCHES, costs="flops", loss_fn=mean_square, **given_options
    )


def loop(model: nn.Module, batches: int = 1) -> None:
    """The gradients of one step, or of several that accumulate."""
    for _ in range(batches):
        for rows in X.chunk(MICROBATCHES):
            model(rows).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad.div_(MICROBATCHES)


def agree(model: nn.Module, plain: nn.Module) -> None:
    wanted = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted[name].grad), name


Calls = list[Tensor]
Hooked = Callable[[nn.Parameter, Calls], None]


def clamp(parameter: nn.Parameter, calls: Calls) -> None:
    parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def watch(parameter: nn.Parameter, calls: Calls) -> None:
    parameter.register_hook(lambda gradient: calls.append(gradient.clone()))


def one_after_the_other(parameter: nn.Parameter, calls: Calls) -> None:
    clamp(parameter, calls)
    watch(parameter, calls)
    parameter.register_hook(lambda gradient: gradient.sign())


def prepended(parameter: nn.Parameter, calls: Calls) -> None:
    """A hook that was there is removed, and another one put in its place."""
    parameter.register_hook(torch.neg).remove()
    watch(parameter, calls)


HOOKS: dict[str, Hooked] = {
    "another gradient": clamp,
    "only read": watch,
    "several": one_after_the_other,
    "removed": prepended,
    "of a bound method": lambda p, calls: p.register_hook(partial(torch.mul, 3.0)) and None,
    "of an object": lambda p, calls: p.register_hook(Scaled(0.5)) and None,
    "on the node": lambda p, calls: on_the_node(p, calls),
    "behind the node": lambda p, calls: behind_the_node(p, calls),
}


class Scaled:
    """A callable object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_hook_on_a_parameter_of_one_stage_runs_as_in_a_plain_loop(hook: Hooked) -> None:
    models, calls = (Three(), Three()), ([], [])
    for model, own in zip(models, calls, strict=True):
        for path in ("first", "middle", "last"):
            hook(model.get_submodule(path).weight, own)
    compiled(models[0]).step(X, None)
    loop(models[1])
    agree(*models)
    # The backwards of stages may come in another order: as often, and on the same gradients.
    sums = [sorted(float(value.double().sum()) for value in own) for own in calls]
    assert sums[0] == sums[1]


WAYS: dict[str, dict[str, Any]] = {
    "split backwards": {"schedule": "zb-h1"},
    "split, two stages on a rank": {"schedule": "zb-v", "k": 4, "ranks": 2},
    "recomputed": {"recompute": "stage"},
    "gpipe": {"schedule": "gpipe"},
    "one stage": {"k": 1},
    "by torch": {"engine": "torch"},
}


@pytest.mark.parametrize("way", WAYS)
def test_so_it_does_under_every_kind_of_schedule(way: str) -> None:
    models = Three(), Three()
    for model in models:
        for parameter in model.parameters():
            one_after_the_other(parameter, [])
    compiled(models[0], **WAYS[way]).step(X, None)
    loop(models[1])
    agree(*models)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_steps_that_accumulate_call_it_in_each(schedule: str) -> None:
    models = Three(), Three()
    for model in models:
        clamp(model.middle.weight, [])
    pipeline = compiled(models[0], schedule=schedule)
    pipeline.step(X, None, accumulate=True)
    pipeline.step(X, None)
    loop(models[1], batches=2)
    agree(*models)


def test_a_hook_that_is_added_or_removed_between_steps_counts_from_then_on() -> None:
    models = Three(), Three()
    pipeline = compiled(models[0])
    handles: list[Any] = []
    for change in ("none", "added", "removed"):
        for model in models:
            if change == "added":
                handles.append(model.middle.weight.register_hook(torch.neg))
            model.zero_grad()
        for handle in handles if change == "removed" else ():
            handle.remove()
        pipeline.step(X, None)
        loop(models[1])
        agree(*models)


@settings(max_examples=5, deadline=None)
@given(
    factors=st.lists(st.sampled_from([-1.0, 0.0, 0.5, 3.0]), min_size=6, max_size=6),
    schedule=st.sampled_from(["gpipe", "1f1b", "zb-h1"]),
)
def test_every_parameter_has_a_hook_of_its_own(factors: list[float], schedule: str) -> None:
    models = Three(), Three()
    for model in models:
        for parameter, factor in zip(model.parameters(), factors, strict=True):
            parameter.register_hook(Scaled(factor))
    compiled(models[0], schedule=schedule).step(X, None)
    loop(models[1])
    agree(*models)


def test_a_hook_on_a_tie_within_one_stage_sees_the_whole() -> None:
    """The stage sums the gradient itself, in one backward."""
    models, calls = [Three(tied=("first", "middle", "last")) for _ in "ab"], ([], [])
    for model, own in zip(models, calls, strict=True):
        one_after_the_other(model.first.weight, own)
    compiled(models[0], k=1).step(X, None)
    loop(models[1])
    agree(*models)
    assert len(calls[0]) == MICROBATCHES
    assert all(map(torch.equal, *calls))


def post_accumulate(parameter: nn.Parameter, calls: Calls) -> None:
    parameter.register_post_accumulate_grad_hook(lambda each: calls.append(each.grad))


def on_the_node(parameter: nn.Parameter, calls: Calls) -> None:
    """The node lives as long as somebody knows it."""
    parameter.node = graph.get_gradient_edge(parameter).node  # type: ignore[attr-defined]
    parameter.node.register_prehook(lambda gradients: tuple(map(torch.neg, gradients)))  # type: ignore[attr-defined]


def behind_the_node(parameter: nn.Parameter, calls: Calls) -> None:
    """It sees what has been accumulated."""
    parameter.node = graph.get_gradient_edge(parameter).node  # type: ignore[attr-defined]
    parameter.node.register_hook(lambda *_: calls.append(parameter.grad))  # type: ignore[attr-defined]


def on_several(parameter: nn.Parameter, calls: Calls) -> None:
    other = torch.zeros(1, requires_grad=True)
    graph.register_multi_grad_hook([parameter, other], lambda _: calls.append(parameter))


def on_any_of_several(parameter: nn.Parameter, calls: Calls) -> None:
    graph.register_multi_grad_hook([parameter], lambda _: calls.append(parameter), mode="any")


TIED = ("first", "last")
REFUSED: dict[str, tuple[Hooked, str, tuple[str, ...], dict[str, Any], str]] = {
    "a tie": (clamp, "first", TIED, {}, "first.weight has a hook on its gradient, but is tied"),
    "a tie, by its other name": (watch, "last", TIED, {}, "first.weight has a hook"),
    "a tie of three": (watch, "middle", ("first", "middle", "last"), {}, "tied over stages"),
    "a tie, split": (clamp, "first", TIED, {"schedule": "zb-h1"}, "tied over stages [0, 2]"),
    "a tie that accumulates": (post_accumulate, "first", TIED, {}, "has a post-accumulate hook"),
    "after it is accumulated": (post_accumulate, "middle", (), {}, "once a step; remove it"),
    "likewise, split": (post_accumulate, "last", (), {"schedule": "zb-h1"}, "post-accumulate"),
    "likewise, one stage": (post_accumulate, "first", (), {"k": 1}, "post-accumulate"),
    "on the node of a tie": (on_the_node, "first", TIED, {}, "first.weight has a hook on its"),
    "behind the node of a tie": (behind_the_node, "last", TIED, {}, "tied over stages"),
    "on several": (on_several, "middle", (), {}, "middle.weight has a hook on the gradients of"),
    "on any of several": (on_any_of_several, "first", (), {"k": 1}, "gradients of several tensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_hook_that_would_see_parts_of_a_sum_is_refused(what: str) -> None:
    hook, path, tied, options, words = REFUSED[what]
    model, calls = Three(tied), []
    pipeline = compiled(model, **options)
    pipeline.step(X, None)
    model.zero_grad()
    hook(model.get_submodule(path).weight, calls)
    for each in pipeline, compiled(model, **options):
        with pytest.raises(InputError) as caught:
            each.step(X, None)
        assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not calls
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("hook", [clamp, post_accumulate, on_the_node, behind_the_node])
def test_a_schedule_without_steps_refuses_both_kinds(hook: Hooked) -> None:
    model = Three()
    hook(model.middle.weight, [])
    pipeline = compiled(model, schedule="pipedream")
    with pytest.raises(InputError, match=r"middle.weight has a"):
        pipeline.train([(X, None)] * 4, partial(torch.optim.SGD, lr=0.1))
