"""Values outside of a model that its forward reads: which are found, and what counts as changed."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import InputError
from pipecompile.frontend.name_search import NameSearch
from pipecompile.frontend.outside_values import OutsideValues
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments

SCALE = 2.0
MASK = torch.ones(4)
OTHER = 1.0
TABLE = {"scale": 2.0, "nested": {"deep": 1.0}}
CONFIG = SimpleNamespace(scale=2.0, inner=SimpleNamespace(scale=2.0), other=1)
WORDS = [str(number) for number in range(1000)]


class Settings:
    scale = 2.0

    def doubled(self) -> float:
        return 2 * SCALE


def helper(x: Tensor) -> Tensor:
    return deeper(x) + 1


def deeper(x: Tensor) -> Tensor:
    return x * SCALE


def decorated(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def inner(*arguments: Any) -> Tensor:
        return function(*arguments)

    return inner


def enclosing() -> tuple[Callable[[Tensor], Tensor], Callable[[float], None]]:
    scale = 2.0

    def scaled(x: Tensor) -> Tensor:
        return x * scale

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return scaled, change


class Operators:
    """An object whose methods code calls without naming them."""

    def __init__(self) -> None:
        self.hidden = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.hidden

    def __getitem__(self, index: int) -> float:
        return self.hidden * index

    def __enter__(self) -> float:
        return self.hidden

    def __exit__(self, *_: object) -> None: ...


@dataclass(slots=True)
class Slots:
    scale: float = 2.0


OPERATORS = Operators()
SLOTS = Slots()
OBJECTS = [SimpleNamespace(scale=2.0)]
VIEW_OF: dict[str, float] = {"scale": 2.0}
VIEW = MappingProxyType(VIEW_OF)
data = torch.ones(1)
"""Named as the attribute of a tensor is: an ordinary name of a batch in a script."""


def scaled_by_config(x: Tensor, config: SimpleNamespace) -> Tensor:
    return x * config.scale  # type: ignore[no-any-return]


def scaled_by_own_attribute(x: Tensor) -> Tensor:
    return x * scaled_by_own_attribute.scale  # type: ignore[attr-defined, no-any-return]


scaled_by_own_attribute.scale = 2.0  # type: ignore[attr-defined]


class Base(nn.Module):
    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.config = SimpleNamespace(scale=2.0, other=1)
        self.settings = Settings()
        self.array = np.ones(3)
        self.context = ContextVar("context", default=2.0)


class OfGlobal(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * SCALE


class OfHelper(Base):
    def forward(self, x: Tensor) -> Tensor:
        return helper(self.linear(x))


class OfDecorated(Base):
    @decorated
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * SCALE


class OfMethod(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))

    def scaled(self, x: Tensor) -> Tensor:
        return sum(y * SCALE for y in (x,))  # type: ignore[return-value]


class OfOwnObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.config.scale


class OfMethodOfObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.settings.doubled()


class OfGlobalObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * CONFIG.inner.scale


class OfTable(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * TABLE["nested"]["deep"]  # type: ignore[index]


class OfClass(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * Settings.scale


class OfOwnClass(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


class OfTensor(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * MASK


class OfClosure(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.change = enclosing()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


def scaled_by(x: Tensor, scale: float = 2.0, *, factor: float = 1.0) -> Tensor:
    return x * scale * factor


class OfDefault(Base):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_by(self.linear(x))


class OfKeywordDefault(OfDefault):
    pass


class OfEnvironment(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(os.environ.get("PIPECOMPILE_TEST_SCALE", "2"))


class OfGetenv(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(os.getenv("PIPECOMPILE_TEST_SCALE") or 2)


class OfCall(Base):
    def forward(self, x: Tensor) -> Tensor:
        return OPERATORS(self.linear(x))


class OfItem(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * OPERATORS[1]


class OfBlock(Base):
    def forward(self, x: Tensor) -> Tensor:
        with OPERATORS as scale:
            return self.linear(x) * scale


class OfSlots(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.data) * SLOTS.scale


class OfText(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * getattr(CONFIG.inner, "scale")  # type: ignore[no-any-return]  # noqa: B009


class OfArgument(Base):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_by_config(self.linear(x), self.config)


class OfReplacedObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * CONFIG.inner.scale


class OfObjects(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * OBJECTS[0].scale


class OfArray(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * float(self.array[0])


class OfView(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * VIEW["scale"]


class OfContext(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.context.get()


class OfImport(Base):
    def forward(self, x: Tensor) -> Tensor:
        from tests.frontend.test_outside_values import SCALE

        return self.linear(x) * SCALE


class OfFunctionAttribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        return scaled_by_own_attribute(self.linear(x))


class OfListAsDefault(Base):
    def __init__(self) -> None:
        super().__init__()

        def scaled(x: Tensor, scales: list[float] = [2.0]) -> Tensor:  # noqa: B006
            return x * scales[0]

        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


class OfPartial(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = functools.partial(scaled_by, scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


class OfBoundMethod(Base):
    def __init__(self) -> None:
        super().__init__()
        self.operators = Operators()
        self.scaled = self.operators.__call__

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x))


Change = Callable[[pytest.MonkeyPatch, Any], object]
GLOBAL: Change = lambda patch, _: patch.setitem(globals(), "SCALE", 3.0)  # noqa: E731
ENVIRONMENT: Change = lambda patch, _: patch.setenv("PIPECOMPILE_TEST_SCALE", "3")  # noqa: E731
CASES: dict[type[Base], tuple[Change, str]] = {
    OfGlobal: (GLOBAL, "SCALE"),
    OfHelper: (GLOBAL, "SCALE"),
    OfDecorated: (GLOBAL, "SCALE"),
    OfMethod: (GLOBAL, "SCALE"),
    OfMethodOfObject: (GLOBAL, "SCALE"),
    OfOwnObject: (lambda patch, m: patch.setattr(m.config, "scale", 3.0), "0.config.scale"),
    OfGlobalObject: (lambda patch, _: patch.setattr(CONFIG.inner, "scale", 3.0), "inner.scale"),
    OfTable: (lambda patch, _: patch.setitem(TABLE["nested"], "deep", 3.0), "TABLE"),  # type: ignore[call-overload]
    OfClass: (lambda patch, _: patch.setattr(Settings, "scale", 3.0), "Settings.scale"),
    OfOwnClass: (lambda patch, _: patch.setattr(Base, "factor", 3.0), "Base.factor"),
    OfTensor: (lambda patch, _: patch.setitem(globals(), "MASK", torch.zeros(4)), "MASK"),
    OfClosure: (lambda _, m: m.change(3.0), "scale in enclosing"),
    OfDefault: (lambda patch, _: patch.setattr(scaled_by, "__defaults__", (3.0,)), "scaled_by"),
    OfKeywordDefault: (
        lambda patch, _: patch.setattr(scaled_by, "__kwdefaults__", {"factor": 3.0}),
        "scaled_by",
    ),
    **dict.fromkeys(
        (OfCall, OfItem, OfBlock),
        (lambda patch, _: patch.setattr(OPERATORS, "hidden", 3.0), "OPERATORS.hidden"),
    ),
    OfSlots: (lambda patch, _: patch.setattr(SLOTS, "scale", 3.0), "SLOTS.scale"),
    OfText: (lambda patch, _: patch.setattr(CONFIG.inner, "scale", 3.0), "inner.scale"),
    OfArgument: (lambda patch, m: patch.setattr(m.config, "scale", 3.0), "0.config.scale"),
    OfReplacedObject: (
        lambda patch, _: patch.setattr(CONFIG, "inner", SimpleNamespace(scale=3.0)),
        "CONFIG.inner",
    ),
    OfObjects: (lambda patch, _: patch.setattr(OBJECTS[0], "scale", 3.0), "OBJECTS.scale"),
    OfArray: (lambda _, m: m.array.fill(3.0), "0.array"),
    OfView: (lambda patch, _: patch.setitem(VIEW_OF, "scale", 3.0), "VIEW"),
    OfContext: (lambda _, m: m.context.set(3.0), "0.context"),
    OfImport: (GLOBAL, "SCALE"),
    OfFunctionAttribute: (
        lambda patch, _: patch.setattr(scaled_by_own_attribute, "scale", 3.0),
        "scaled_by_own_attribute.scale",
    ),
    OfListAsDefault: (lambda _, m: m.scaled.__defaults__[0].append(3.0), "scaled"),
    OfPartial: (lambda patch, m: patch.setitem(m.scaled.keywords, "scale", 3.0), "scaled.keywords"),
    OfBoundMethod: (lambda patch, m: patch.setattr(m.operators, "hidden", 3.0), "hidden"),
    OfEnvironment: (ENVIRONMENT, "PIPECOMPILE_TEST_SCALE"),
    OfGetenv: (ENVIRONMENT, "PIPECOMPILE_TEST_SCALE"),
}


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_what_a_forward_reads_outside_is_found(
    kind: type[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, where = CASES[kind]
    model = nn.Sequential(kind(), nn.Linear(4, 4))
    values = OutsideValues(model)
    assert values.changed() is None
    monkeypatch.setattr(CONFIG, "other", 2)  # read by nobody
    monkeypatch.setitem(globals(), "OTHER", 5.0)
    monkeypatch.setitem(globals(), "data", torch.zeros(1))
    model[0].config.other = 7
    assert values.changed() is None
    change(monkeypatch, model[0])
    changed = values.changed()
    assert changed is not None and where in changed


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_a_step_refuses_what_changed_since_the_compile(
    kind: type[Base], monkeypatch: pytest.MonkeyPatch
) -> None:
    change, where = CASES[kind]
    model, x = nn.Sequential(kind(), nn.Linear(4, 4)), torch.randn(4, 4)
    loss_fn = nn.functional.mse_loss
    pipeline = pipecompile(model, x, k=2, microbatches=2, costs="flops", loss_fn=loss_fn)
    pipeline.step(x, x)
    change(monkeypatch, model[0])
    with pytest.raises(InputError, match=rf"{where}.* has changed since the model was compiled"):
        pipeline.step(x, x)


def cubed(x: Tensor) -> Tensor:
    return x**3


ACTIVATION = torch.tanh


class OfCode(Base):
    """Calls functions that are found in several ways."""

    activation = staticmethod(torch.sin)

    def forward(self, x: Tensor) -> Tensor:
        return self.method(cubed(ACTIVATION(self.activation(self.linear(x)))))

    def method(self, x: Tensor) -> Tensor:
        return x * self.twice

    @property
    def twice(self) -> int:
        return 2


class OtherCode(OfCode):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


CODE_CHANGES: dict[str, Change] = {
    "OfCode.method": lambda patch, _: patch.setattr(OfCode, "method", lambda _, x: x),
    "OfCode.forward": lambda patch, _: patch.setattr(OfCode, "forward", OtherCode.forward),
    "OfCode.activation": lambda patch, _: patch.setattr(OfCode, "activation", torch.cos),
    "OfCode.twice": lambda patch, _: patch.setattr(OfCode, "twice", property(lambda _: 3)),
    "cubed": lambda patch, _: patch.setitem(globals(), "cubed", torch.square),
    "ACTIVATION": lambda patch, _: patch.setitem(globals(), "ACTIVATION", torch.sigmoid),
    "the class of 0": lambda patch, m: patch.setattr(m, "__class__", OtherCode),
}


@pytest.mark.parametrize("where", CODE_CHANGES)
def test_other_code_is_refused(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(OfCode(), nn.Linear(4, 4)), torch.randn(4, 4)
    loss_fn = nn.functional.mse_loss
    pipeline = pipecompile(model, x, k=2, microbatches=2, costs="flops", loss_fn=loss_fn)
    pipeline.step(x, x)
    CODE_CHANGES[where](monkeypatch, model[0])
    with pytest.raises(InputError, match=f"{where} has changed since the model was compiled"):
        pipeline.step(x, x)


def test_a_class_that_torch_makes_around_a_module_is_no_change() -> None:
    model = OfCode()
    values = OutsideValues(model)
    # As fully_shard and parametrizations do it.
    wrapper = type("Wrapped", (OfCode,), {"__module__": "torch.distributed.fsdp"})
    model.__class__ = wrapper
    assert values.changed() is None


def test_equal_values_have_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    values = OutsideValues(OfTable())
    monkeypatch.setitem(globals(), "TABLE", {"scale": 2.0, "nested": {"deep": 1.0}})
    assert values.changed() is None
    monkeypatch.setitem(globals(), "TABLE", {"scale": 2, "nested": {"deep": 1.0}})
    assert values.changed() is not None  # an int computes otherwise than a float


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.floats(0.5, 2.5) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
    ),
    max_leaves=4,
)


@given(before=PLAIN_VALUES, after=PLAIN_VALUES)
def test_any_value_that_is_written_otherwise_has_changed(before: Any, after: Any) -> None:
    model = OfOwnObject()
    for later in (copy.deepcopy(before), after):
        model.config.scale = copy.deepcopy(before)
        values = OutsideValues(model)
        model.config.scale = later
        assert (values.changed() is None) == (repr(later) == repr(before))


def test_a_large_container_is_compared_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    class OfWords(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * len(WORDS)

    values = OutsideValues(OfWords())
    monkeypatch.setitem(globals(), "WORDS", WORDS[:-1])
    assert values.changed() is not None


def test_torch_and_the_standard_library_are_not_followed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.TransformerEncoderLayer(4, 2))
    assert not NameSearch(model).found.values


class Link:
    """One of a chain of objects."""

    def __init__(self, behind: Link | None) -> None:
        self.behind, self.scale = behind, 1.0


class AtTheEnd(nn.Module):
    """Reads the last one of a long chain."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.link: Link | None = None
        for _ in range(length):
            self.link = Link(self.link)

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, 4) to the same shape."""
        link = self.link
        while link is not None and link.behind is not None:
            link = link.behind
        return x if link is None else x * link.scale


def test_a_chain_of_objects_may_be_longer_than_the_stack() -> None:
    model = AtTheEnd(3000)
    values, last = OutsideValues(model), model.link
    assert values.changed() is None
    while last is not None and last.behind is not None:
        last = last.behind
    assert last is not None
    last.scale = 2.0
    assert values.changed() is not None


def test_installed_packages_without_a_module_of_the_model_are_not_followed() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pytest.importorskip("torch")
            return x

    search = NameSearch(Named())
    named = [where for where, *_ in search.found.code if isinstance(where, str)]
    places = named + [each.where for each in search.found.values]
    assert any(where.endswith(".pytest") for where in places)
    assert not any("_pytest" in where for where in places)


SCALES = [torch.ones(2)]


class OfTensors(nn.Module):
    """Reads attributes that somebody has set on tensors, and how these lie in memory."""

    plain: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.plain = nn.Linear(2, 2), torch.ones(2, 3)
        self.register_buffer("buffer", torch.ones(4, 2))
        self.linear.weight.scale = 2.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, 2) to the same shape."""
        x = self.linear(x) * self.linear.weight.scale * getattr(self.buffer, "factor", 1.0)
        x = x * 3 if hasattr(self.plain, "is_large") else x
        return x * self.buffer.numel() * self.plain.stride(0) * getattr(SCALES[0], "factor", 1.0)


OF_TENSORS: dict[str, tuple[Callable[[Any], object], str]] = {
    "of a parameter": (lambda m: setattr(m.linear.weight, "scale", 3.0), "linear.weight.scale"),
    "of one, deleted": (lambda m: delattr(m.linear.weight, "scale"), "linear.weight.scale"),
    "of a buffer, new": (lambda m: setattr(m.buffer, "factor", 3.0), "buffer.factor"),
    "of a plain tensor, new": (lambda m: setattr(m.plain, "is_large", 3.0), "plain.is_large"),
    "of one in a global": (lambda m: setattr(SCALES[0], "factor", 3.0), "SCALES.factor"),
    "a buffer's shape": (lambda m: setattr(m.buffer, "data", torch.ones(3)), "buffer"),
    "a buffer that grew": (lambda m: m.buffer.resize_(5, 2), "buffer"),
    "another storage": (lambda m: m.plain.set_(torch.ones(3, 2).t()), "plain"),
    "another type": (lambda m: setattr(m.plain, "data", torch.ones(2, 3).double()), "plain"),
    "one in a global, transposed": (
        lambda m: setattr(SCALES[0], "data", torch.ones(2, 2).t()),
        "SCALES",
    ),
}


@pytest.mark.parametrize("case", OF_TENSORS)
def test_attributes_and_layouts_of_tensors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SCALES", [torch.ones(2)])
    change, place = OF_TENSORS[case]
    model: Any = OfTensors()
    values = OutsideValues(model)
    model.linear.weight.note, model.plain.note = 1, 2  # no code reads these
    model.buffer.mul_(2)
    assert values.changed() is None
    change(model)
    changed = values.changed()
    assert changed is not None
    assert changed.endswith(place)


def test_an_attribute_that_a_parameter_has_is_captured() -> None:
    model, x = OfTensors(), torch.ones(4, 2)
    _, module, _ = proven_capture(model, Arguments((x,), {}))
    assert torch.equal(module(x)[0], model(x))
