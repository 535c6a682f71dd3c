"""Constants among arguments that equal nothing or are nodes of torch, and the order of keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.api.options import options_for
from pipecompile.errors import InputError
from pipecompile.frontend.captured_graph import KEYS_IN_ORDER
from pipecompile.frontend.signature import call_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.graph.attributes import is_same_constant
from pipecompile.training.pipeline import Pipeline

X, Y = (torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(2))


class Reading(nn.Module):
    """Two layers around a function of all arguments."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Tensors of shape (N, 6), and constants, to one of the same shape."""
        return self.last(self.first(self.function(*args, **kwargs)))  # type: ignore[no-any-return]


def mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def compiled(model: nn.Module, batch: Any, **options: Any) -> Pipeline:
    return pipecompile(
        model, batch, k=2, microbatches=2, costs="flops", loss_fn=mean_square, **options
    )


def of_nan(x: Tensor, value: float) -> Tensor:
    return 2 * x if math.isnan(value) else x


def of_complex_nan(x: Tensor, value: complex) -> Tensor:
    return x * value.imag


def of_size(x: Tensor, size: torch.Size) -> Tensor:
    return x.reshape(-1, *size[1:]) / size.numel()


def of_nested_size(x: Tensor, sizes: dict[str, list[torch.Size]]) -> Tensor:
    return x / sizes["all"][0].numel()


CONSTANTS: dict[str, tuple[Callable[..., Tensor], Callable[[], Any], Any]] = {
    "NaN": (of_nan, lambda: float("nan"), 1.0),
    "a complex NaN": (of_complex_nan, lambda: complex(math.nan, 2.0), complex(math.nan, 3.0)),
    "a size": (of_size, lambda: torch.Size([4, 6]), torch.Size([2, 6])),
    "a nested size": (of_nested_size, lambda: {"all": [X.shape]}, {"all": [torch.Size([2])]}),
    "a zero": (lambda x, zero: x * math.copysign(2.0, zero), lambda: 0.0, -0.0),
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_is_that_of_the_plan(name: str) -> None:
    function, constant, other = CONSTANTS[name]
    model = Reading(function)
    pipeline = compiled(model, (X, constant()))
    loss = pipeline.step((Y, constant()))
    wanted = [mean_square(model(rows, constant()), None) for rows in Y.chunk(2)]
    assert torch.equal(loss, torch.stack(wanted).mean())
    with pytest.raises(InputError, match=r"an argument is .*, but the plan was made with"):
        pipeline.step((Y, other))


FLOATS = st.floats() | st.integers(-1, 1) | st.booleans() | st.complex_numbers()


@given(FLOATS, FLOATS)
def test_constants_are_the_same_if_they_are_written_alike(left: Any, right: Any) -> None:
    assert is_same_constant(left, right) == (repr(left) == repr(right))


def by_order(given: dict[str, Tensor]) -> Tensor:
    first, second = given.values()
    return first - second


def by_order_of_keywords(**given: Tensor) -> Tensor:
    return by_order(given)


def by_last(given: dict[str, dict[str, Tensor]]) -> Tensor:
    return list(given["inner"].values())[-1]


def by_first_key(given: dict[str, Tensor]) -> Tensor:
    return given[next(iter(given))] * (2 if next(iter(given)) == "a" else 3)


def by_failing(given: dict[str, Tensor]) -> Tensor:
    assert list(given) == ["a", "b"]
    return given["a"] + given["b"]


def by_name(given: dict[str, Tensor]) -> Tensor:
    return given["a"] - given["b"]


def by_keyword(**given: Tensor) -> Tensor:
    return by_name(given)


def in_any_order(given: dict[str, Tensor]) -> Tensor:
    return torch.stack([given[key] for key in sorted(given)]).sum(0)


def pair(first: str = "a", second: str = "b") -> dict[str, Tensor]:
    values = {"a": X, "b": Y}
    return {first: values[first], second: values[second]}


Batch = Callable[..., Any]
IN_ORDER: dict[str, tuple[Callable[..., Tensor], Batch]] = {
    "values of a dict": (by_order, lambda *keys: (pair(*keys),)),
    "values of keywords": (by_order_of_keywords, pair),
    "the last of an inner dict": (by_last, lambda *keys: ({"inner": pair(*keys)},)),
    "the first key": (by_first_key, lambda *keys: (pair(*keys),)),
    "fails otherwise": (by_failing, lambda *keys: (pair(*keys),)),
}
IN_ANY_ORDER: dict[str, tuple[Callable[..., Tensor], Batch]] = {
    "by name": (by_name, lambda *keys: (pair(*keys),)),
    "by keyword": (by_keyword, pair),
    "sorted": (in_any_order, lambda *keys: (pair(*keys),)),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_forward_that_goes_by_the_order_of_keys_is_given_them_in_order(name: str) -> None:
    function, batch = IN_ORDER[name]
    pipeline = compiled(Reading(function), batch())
    assert pipeline.plan.capture.method.endswith(KEYS_IN_ORDER)
    pipeline.step(batch())
    for call in (pipeline.step, pipeline.evaluate):
        with pytest.raises(InputError, match="keys are in another order, by which the forward"):
            call(batch("b", "a"))


@pytest.mark.parametrize("name", IN_ANY_ORDER)
def test_others_take_keys_in_any_order(name: str) -> None:
    function, batch = IN_ANY_ORDER[name]
    pipeline = compiled(Reading(function), batch())
    assert pipeline.plan.capture.method == "recorded"
    assert torch.equal(pipeline.step(batch()), pipeline.step(batch("b", "a")))


def test_other_ranks_capture_by_the_method_with_the_order() -> None:
    target = Target(Reading(by_order), call_of((pair(),)))
    options = options_for(target, k=1, microbatches=2, costs="flops")
    method = capture_target(target, options, verify=True).capture.method
    captured = capture_target(target, options, verify=False, method=method).capture
    assert captured.method == method
    assert captured.inputs.is_ordered


@settings(max_examples=10)
@given(weights=st.lists(st.integers(-2, 2), min_size=2, max_size=2))
def test_order_counts_where_values_differ_by_it(weights: list[int]) -> None:
    def weighed(given: dict[str, Tensor]) -> Tensor:
        return sum(weight * each for weight, each in zip(weights, given.values(), strict=True))  # type: ignore[return-value]

    target = Target(Reading(weighed), call_of((pair(),)))
    options = options_for(target, k=1, microbatches=2, costs="flops")
    method = capture_target(target, options, verify=True).capture.method
    assert method.endswith(KEYS_IN_ORDER) == (weights[0] != weights[1])
