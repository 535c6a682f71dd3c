"""A graph becomes code. What is no literal is referred to, never printed, and names are legal."""

from __future__ import annotations

import builtins
import enum
import keyword
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import steps_alike
from torch import Tensor, nn
from traps import WIDTH, Two, refused
from zoo import same

from pipecompile import InputError, pipecompile
from pipecompile.frontend.capture import capture
from pipecompile.frontend.digest import digest
from pipecompile.frontend.signature import Arguments

BATCHES = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(2)]


class Scale(enum.Enum):
    """A constant that is no literal."""

    DOUBLE = 2
    TRIPLE = 3


class Pair(NamedTuple):
    """A tuple that prints itself with its name."""

    left: float
    right: float


class Ratio(float):
    """A number that prints itself as another type."""

    def __repr__(self) -> str:
        """Not Python."""
        return "<ratio>"


class Through(torch.autograd.Function):
    """Calls a function; its backward takes it for the identity."""

    @staticmethod
    def forward(context: Any, function: Callable[[Tensor], Tensor], value: Tensor) -> Tensor:
        """What the function returns."""
        return function(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """The gradient as it came."""
        return None, gradient


class Scaled(torch.autograd.Function):
    """Scales by constants in containers."""

    @staticmethod
    def forward(context: Any, value: Tensor, scale: Scale, pairs: dict[str, Pair]) -> Tensor:
        """The product."""
        return value * scale.value * pairs["class"].right

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        """Another product, which is the same for all."""
        return gradient * 2, None, None


class Between(Two):
    """Two layers with a function between them."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.second(self.function(self.first(value)))


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "a number of numpy": lambda v: v / np.sqrt(WIDTH),
    "a number of numpy in float32, from the left": lambda v: np.float32(1.7) * v,
    "a size of numpy": lambda v: v.view(-1, np.int64(WIDTH)),
    "an array as an index": lambda v: v[:, np.arange(WIDTH)[::-1].copy()],
    "a number of another type": lambda v: v * Ratio(2.5),
    "infinity": lambda v: v.clamp(max=float("inf")),
    "a function of torch": lambda v: Through.apply(torch.sin, v),
    "a lambda": lambda v: Through.apply(lambda x: x * 2, v),
    "a partial": lambda v: Through.apply(partial(torch.mul, other=2.0), v),
    "an enum, and a named tuple in a dict": lambda v: Scaled.apply(
        v, Scale.TRIPLE, {"class": Pair(1.0, 2.0)}
    ),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_arguments_that_are_no_literals_are_referred_to(name: str) -> None:
    torch.manual_seed(0)
    steps_alike(Between(FUNCTIONS[name]), BATCHES)


NUMPY_TYPES = (np.float16, np.float32, np.float64, np.int32, np.int64, np.uint8, np.bool_)
NUMBERS = st.one_of(
    st.floats(-8, 8, allow_subnormal=False),
    st.integers(-8, 8),
    st.booleans(),
    st.sampled_from([float("inf"), -float("inf"), float("nan"), -0.0]),
    st.builds(Ratio, st.floats(-2, 2, allow_subnormal=False)),
    st.builds(lambda kind, value: kind(value), st.sampled_from(NUMPY_TYPES), st.integers(0, 8)),
    st.fractions(0, 2, max_denominator=8).map(float),
)
NAMES = st.one_of(st.sampled_from([*keyword.kwlist, *dir(builtins), "1", "a b", ""]), st.text())


@settings(max_examples=30, deadline=None)
@given(number=NUMBERS, data=st.data())
def test_any_number_is_what_it_was(number: Any, data: st.DataObject) -> None:
    operation = data.draw(st.sampled_from([torch.mul, torch.add, lambda v, n: n * v, torch.pow]))
    _same_outputs(Between(lambda v: operation(v, number)))


@settings(max_examples=20, deadline=None)
@given(names=st.lists(NAMES, min_size=1, max_size=4, unique=True))
def test_any_text_may_be_a_key_of_inputs_and_outputs(names: list[str]) -> None:
    class Keyed(Two):
        def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: self.first(value) for name, value in values.items()}

    call = Arguments(({name: BATCHES[0] + i for i, name in enumerate(names)},), {})
    model = Keyed()
    captured_model = capture(model, call)
    outputs = captured_model.instantiate(call)(*captured_model.inputs.flatten(call))
    assert same(captured_model.outputs.unflatten(outputs), model(*call.args))


@settings(max_examples=20, deadline=None)
@given(name=NAMES.filter(lambda name: name and "." not in name and not hasattr(nn.Module, name)))
def test_any_text_may_be_a_name_of_parameters_and_modules(name: str) -> None:
    class Named(Two):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Module()
            self.parts.register_parameter(name, nn.Parameter(torch.ones(WIDTH)))
            self.layers = nn.Module()
            self.layers.add_module(name, nn.Linear(WIDTH, WIDTH))

        def forward(self, value: Tensor) -> Tensor:
            return getattr(self.layers, name)(value) * getattr(self.parts, name)

    if name.isprintable() and not set(name) & {'"', "\\"}:
        _same_outputs(Named())
    else:
        with pytest.raises(InputError, match="which code cannot name; use letters"):
            _same_outputs(Named())


@pytest.mark.parametrize("name", ["\0", "\n", '"', "\\", "\u2028", '")+("', "¼", "None"])
def test_names_that_code_cannot_have(name: str) -> None:
    model = nn.Module()
    model.add_module(name, nn.Linear(WIDTH, WIDTH))
    model.forward = lambda value: getattr(model, name)(value)  # type: ignore[method-assign]
    if name in ("¼", "None"):
        _same_outputs(model)
    else:
        with pytest.raises(InputError, match="which code cannot name"):
            _same_outputs(model)


def _same_outputs(model: nn.Module) -> None:
    call = Arguments((BATCHES[0],), {})
    (output,) = capture(model, call).instantiate(call)(BATCHES[0])
    wanted = model(BATCHES[0])
    assert output.dtype == wanted.dtype
    assert torch.equal(output.nan_to_num(99.0), wanted.nan_to_num(99.0))


def test_graphs_that_refer_to_other_values_have_other_digests() -> None:
    call = Arguments((BATCHES[0],), {})
    texts = {
        digest(capture(Between(function), call).instantiate(call))
        for function in (
            lambda v: Through.apply(torch.sin, v),
            lambda v: Through.apply(torch.cos, v),
            lambda v: Scaled.apply(v, Scale.TRIPLE, {"class": Pair(1.0, 2.0)}),
            lambda v: Scaled.apply(v, Scale.TRIPLE, {"class": Pair(1.0, 3.0)}),
            lambda v: Scaled.apply(v, Scale.DOUBLE, {"class": Pair(1.0, 3.0)}),
            lambda v: v[:, np.arange(WIDTH)],
            lambda v: v[:, np.arange(WIDTH)[::-1].copy()],
        )
    }
    assert len(texts) == 7


class InSlots:
    """A function with a weight in a slot."""

    __slots__ = ("weight",)

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, value: Tensor) -> Tensor:
        return value @ self.weight


class Held(Two):
    """Passes a layer, or what holds one, to a call that is one node."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        layers: dict[str, Callable[[Tensor], Tensor]] = {
            "module": nn.Sequential(self.first),
            "method": self.first.forward,
            "closure": lambda x: self.first(x),
            "tensor": lambda x: x @ self.first.weight,
            "value": lambda x: x + value,
            "slot": InSlots(self.first.weight),
        }
        return self.second(Through.apply(layers[self.how], value))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("how", ["module", "method", "closure", "tensor", "value", "slot"])
def test_an_object_with_tensors_is_refused_where_their_gradients_would_be_lost(how: str) -> None:
    refused(Held(how), "that holds tensors", "test_printed_values.py:")


class Starred(Two):
    """Takes any arguments and keywords."""

    def forward(self, first: Tensor, *rest: Tensor, **named: Any) -> Tensor:
        """The sum of all tensors, through two layers."""
        value = first + sum(rest)
        for item in torch.utils._pytree.tree_leaves(dict(sorted(named.items()))):
            value = value * item
        return self.second(torch.tanh(self.first(value)))


def test_arguments_without_names_and_keywords_that_python_keeps_for_itself() -> None:
    x, y = BATCHES
    steps_alike(Starred(), [(x, y, x * 2), (y, x, x)])
    keywords = {"first": x, "class": y, "self_": {"a_b": x}, "self__a": {"b": y}, "1": x}
    # The second batch has its keys the other way around.
    steps_alike(Starred(), [keywords, dict(reversed(keywords.items()))])


def test_a_batch_of_another_structure_is_answered_with_what_differs() -> None:
    x, y = BATCHES
    pipeline = pipecompile(
        Starred(),
        {"first": x, "mask": {"left": y, "right": y}},
        k=2,
        loss_fn=lambda output, _: output.sum(),
        costs="flops",
        microbatches=2,
    )
    with pytest.raises(InputError) as caught:
        pipeline.step({"first": x, "mask": {"left": y}, "labels": y})
    assert "it lacks keyword['mask']['right'] and it has keyword['labels'] as well" in str(
        caught.value
    )
    with pytest.raises(InputError, match=r"lacks keyword\['mask'\]\['left'\]"):
        pipeline.step({"first": x, "mask": [y, y]})
