"""A forward reads tables, dispatch, metaclasses and places that are empty: changes are found."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import operator
import os
import sys
import weakref
from array import array
from collections import UserList, defaultdict
from collections.abc import Callable
from configparser import ConfigParser
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn
from transformers import PretrainedConfig
from transformers.activations import GELUActivation

from pipecompile.frontend.outside_values import OutsideValues

SCALE = 2.0
MORE = 1000  # items, of which only one changes


def doubled(x: Tensor) -> Tensor:
    return 2 * x


def tripled(x: Tensor) -> Tensor:
    return 3 * x


@fx.wrap
def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Scaler:
    factor = 2.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


class InheritingScaler(Scaler):
    pass


@dataclass
class Made:
    """Made in each forward."""

    scale: float = field(default_factory=lambda: SCALE)


class Meta(type):
    shared = 2.0

    @property
    def scale(cls) -> float:
        return cls.shared

    def __getitem__(cls, _: int) -> float:
        return cls.hidden  # type: ignore[attr-defined, no-any-return]


class OfMeta(metaclass=Meta):
    hidden = 2.0


@functools.singledispatch
def dispatched(x: Any) -> Any:
    return 2 * x


@dispatched.register(Tensor)
def _(x: Tensor) -> Tensor:
    return x * SCALE


class Dispatching:
    @functools.singledispatchmethod
    def scaled(self, x: Any) -> Any:
        return 2 * x


class WithPartial:
    def times(self, x: Tensor, scale: float) -> Tensor:
        return x * scale

    doubled = functools.partialmethod(times, scale=2.0)


class Named:
    """Compared, hashed, copied and printed by methods of its own."""

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale

    def __eq__(self, other: object) -> bool:
        return self.scale == other

    def __hash__(self) -> int:
        return hash(self.scale)

    def __copy__(self) -> list[float]:
        return [self.scale]

    def __str__(self) -> str:
        return str(self.scale)

    def __class_getitem__(cls, item: float) -> float:
        return item * cls.factor

    factor = 2.0


@dataclass
class Counted:
    """Compared and printed by what a dataclass makes."""

    counter: int = 0


class Choice(Enum):
    DOUBLE = 2.0

    @classmethod
    def _missing_(cls, value: object) -> Any:
        return cls.DOUBLE if value in CHOICES else None


CHOICES = {"double": 2.0}
OF_CLASS, COUNTED = Named(), Counted()
GETTER = operator.attrgetter("nested.inner")


def by_string(x: Tensor) -> Tensor:
    return x * float(f"{OF_CLASS}")


TABLE: dict[str, Any] = {"doubled": doubled, "scaled": scaled, "class": Scaler, "object": Scaler()}
FUNCTIONS = [doubled, scaled]
LARGE = {str(number): doubled for number in range(MORE)}
NUMBERS = np.ones(MORE)
ITEMS = UserList([2.0])
CONFIG = SimpleNamespace(other=1)
REFERRED = Scaler()
REFERENCE = weakref.ref(REFERRED)
PROXY = weakref.proxy(REFERRED)
BY_OBJECT = weakref.WeakKeyDictionary({REFERRED: 2.0})
OF_OBJECTS = weakref.WeakValueDictionary({"referred": REFERRED})
NESTED = SimpleNamespace(nested=({"numbers": np.ones(2)}, [bytearray(2)]))
LETTERS, CODES = bytearray(b"ab"), array("d", [2.0])
VIEW = memoryview(bytearray(b"ab"))
MAKING = defaultdict(lambda: 2.0)
PARSER = ConfigParser()
PARSER.read_string("[model]\nscale = 2.0")
SCALER, INHERITING = Scaler(), InheritingScaler()
OUTSIDE = nn.Linear(2, 2)
OUTSIDE.config = SimpleNamespace(scale=2.0)  # type: ignore[assignment]
DISPATCHING, WITH_PARTIAL = Dispatching(), WithPartial()


NAME, NAMES = "named", ["other", "listed"]
OF_GETTER = SimpleNamespace(nested=SimpleNamespace(inner=2.0))
NAMED = SimpleNamespace(inner=2.0, named=2.0, listed=2.0, looped=2.0, unlisted=1, data=2.0)


def looped(x: Tensor) -> Tensor:
    for name in ("looped", "other"):
        x = x * getattr(NAMED, name, 1.0)
    return x


def listed(x: Tensor) -> Tensor:
    for name in NAMES:
        x = x * getattr(NAMED, name, 1.0)
    return x


@functools.wraps(torch.relu)
def as_relu(x: Tensor) -> Tensor:
    return x * SCALE


NAMESPACE: dict[str, Any] = {"scale": 2.0}
exec("def without_module(x):\n    return x * scale", NAMESPACE)


class Calling(nn.Module):
    """Calls a function that torch.fx does not look into."""

    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return scaled(x)


class OwnData:
    """An attribute that tensors have too, and a method that calls `self` otherwise."""

    def __init__(self) -> None:
        self.data = 2.0

    def doubled(this) -> float:  # noqa: N805
        return 2 * this.data


OWN_DATA = OwnData()


def tried(x: Tensor) -> Tensor:
    try:
        return x * CONFIG.tried  # type: ignore[no-any-return]
    except AttributeError:
        return x


Patch = pytest.MonkeyPatch
Forward = Callable[[Tensor], Any]
Change = Callable[[Patch], object]
OF_SCALE: Change = lambda patch: patch.setitem(globals(), "SCALE", 3.0)  # noqa: E731


def put(name: str, value: Any, owner: Any = CONFIG) -> Change:
    return lambda patch: patch.setattr(owner, name, value, raising=False)


CASES: dict[str, tuple[Forward, Change, str]] = {
    "equality": (lambda x: x * (OF_CLASS == 2.0), put("scale", 3.0, OF_CLASS), "OF_CLASS.scale"),
    "a hash": (lambda x: x * {2.0: 3.0}[OF_CLASS], put("scale", 3.0, OF_CLASS), "OF_CLASS.scale"),
    "a copy": (lambda x: x * copy(OF_CLASS)[0], put("scale", 3.0, OF_CLASS), "OF_CLASS.scale"),
    "a string": (lambda x: x * float(str(OF_CLASS)), put("scale", 3.0, OF_CLASS), ".scale"),
    "an f-string": (by_string, put("scale", 3.0, OF_CLASS), "OF_CLASS.scale"),
    "a format string": (
        lambda x: x * float("{0.inner}".format(NAMED)),  # noqa: UP030, UP032
        put("inner", 3.0, NAMED),
        "NAMED.inner",
    ),
    "an item of a class": (lambda x: x * Named[2.0], put("factor", 3.0, Named), "Named.factor"),
    "a missing value": (
        lambda x: x * Choice("double").value,
        lambda patch: patch.delitem(CHOICES, "double"),
        "CHOICES",
    ),
    "a path that is got": (
        lambda x: x * GETTER(OF_GETTER),
        lambda patch: patch.setattr(OF_GETTER.nested, "inner", 3.0),
        "nested.inner",
    ),
    "a function in a table": (
        lambda x: TABLE["doubled"](x),
        lambda patch: patch.setitem(TABLE, "doubled", tripled),
        "TABLE",
    ),
    "a function in a large table": (
        lambda x: LARGE["7"](x),
        lambda patch: patch.setitem(LARGE, "7", tripled),
        "LARGE",
    ),
    "what a function in a table reads": (lambda x: TABLE["scaled"](x), OF_SCALE, "SCALE"),
    "what a function in a list reads": (lambda x: FUNCTIONS[1](x), OF_SCALE, "SCALE"),
    "an attribute of a class in a table": (
        lambda x: TABLE["class"]()(x),
        put("factor", 3.0, Scaler),
        "Scaler.factor",
    ),
    "a new attribute of an object in a table": (
        lambda x: TABLE["object"](x),
        put("factor", 3.0, TABLE["object"]),
        "TABLE.factor",
    ),
    "a number of a large array": (
        lambda x: x * float(NUMBERS[7]),
        lambda _: NUMBERS.__setitem__(7, 3.0),
        "NUMBERS",
    ),
    "an item of a UserList": (
        lambda x: x * ITEMS[0],
        lambda _: ITEMS.append(3.0),
        "ITEMS.data",
    ),
    "another function for a type": (
        lambda x: dispatched(x),
        lambda _: dispatched.register(nn.Parameter, tripled),
        "dispatched.registry",
    ),
    "what the function for a type reads": (lambda x: dispatched(x), OF_SCALE, "SCALE"),
    "another method for a type": (
        lambda x: DISPATCHING.scaled(x),
        lambda _: vars(Dispatching)["scaled"].register(Tensor, tripled),
        "registry",
    ),
    "an argument of a partial method": (
        lambda x: WITH_PARTIAL.doubled(x),
        lambda patch: patch.setitem(vars(WithPartial)["doubled"].keywords, "scale", 3.0),
        "doubled.keywords",
    ),
    "what a property of a metaclass reads": (
        lambda x: x * OfMeta.scale,
        put("shared", 3.0, Meta),
        "Meta.shared",
    ),
    "a property of a metaclass": (
        lambda x: x * OfMeta.scale,
        put("scale", property(lambda _: 3.0), Meta),
        "Meta.scale",
    ),
    "what an operator of a metaclass reads": (
        lambda x: x * OfMeta[0],
        put("hidden", 3.0, OfMeta),
        "OfMeta.hidden",
    ),
    "an attribute before that of the class": (
        lambda x: x * SCALER.factor,
        put("factor", 3.0, SCALER),
        "SCALER.factor",
    ),
    "a method of an object": (
        lambda x: SCALER.scaled(x),
        put("scaled", tripled, SCALER),
        "SCALER.scaled",
    ),
    "a method of a class before an inherited one": (
        lambda x: INHERITING.scaled(x),
        put("scaled", lambda _, x: x, InheritingScaler),
        "InheritingScaler.scaled",
    ),
    "what getattr did not find": (
        lambda x: x * getattr(CONFIG, "found", 2.0),
        put("found", 3.0),
        "CONFIG.found",
    ),
    "what hasattr did not find": (
        lambda x: 3 * x if hasattr(CONFIG, "flag") else x,
        put("flag", True),
        "CONFIG.flag",
    ),
    "an attribute whose name is a global": (
        lambda x: x * getattr(NAMED, NAME),
        put("named", 3.0, NAMED),
        "NAMED.named",
    ),
    "an attribute whose name is in a list": (listed, put("listed", 3.0, NAMED), "NAMED.listed"),
    "an attribute whose name is in a tuple": (looped, put("looped", 3.0, NAMED), "NAMED.looped"),
    "a method by its name": (
        lambda x: x * operator.methodcaller("doubled")(OWN_DATA),
        put("doubled", lambda _: 3.0, OwnData),
        "OwnData.doubled",
    ),
    "an attribute as tensors have it": (
        lambda x: x * OWN_DATA.doubled(),
        put("data", 3.0, OWN_DATA),
        "OWN_DATA.data",
    ),
    "what was no attribute": (tried, put("tried", 3.0), "CONFIG.tried"),
    "a global with the name of a builtin": (
        lambda x: x * abs(2.0),
        lambda patch: patch.setitem(globals(), "abs", int),
        "test_outside_code.abs",
    ),
    "the code of a function": (
        lambda x: doubled(x),
        put("__code__", tripled.__code__, doubled),
        "doubled",
    ),
    "what makes an object": (lambda x: x * Made().scale, OF_SCALE, "SCALE"),
    "what a weak reference refers to": (
        lambda x: x * REFERENCE().factor,  # type: ignore[union-attr]
        put("factor", 3.0, REFERRED),
        "REFERENCE()",
    ),
    "what a weak proxy stands for": (
        lambda x: x * PROXY.factor,
        put("factor", 3.0, REFERRED),
        "PROXY.factor",
    ),
    "what a weak dict has for an object": (
        lambda x: x * BY_OBJECT[REFERRED],
        lambda patch: patch.setitem(BY_OBJECT, REFERRED, 3.0),  # type: ignore[arg-type]
        "BY_OBJECT.data",
    ),
    "an object in a weak dict": (
        lambda x: x * OF_OBJECTS["referred"].factor,
        put("factor", 3.0, REFERRED),
        "OF_OBJECTS",
    ),
    "a number of an array in a dict in a tuple": (
        lambda x: x * float(NESTED.nested[0]["numbers"][1]),  # type: ignore[call-overload]
        lambda _: NESTED.nested[0]["numbers"].__setitem__(1, 3.0),
        "NESTED.nested",
    ),
    "a byte in a list in a tuple": (
        lambda x: x * NESTED.nested[1][0][1],  # type: ignore[index]
        lambda _: NESTED.nested[1][0].__setitem__(1, 3),
        "NESTED.nested",
    ),
    "a byte": (lambda x: x * LETTERS[0], lambda _: LETTERS.__setitem__(0, 3), "LETTERS"),
    "a number of an array of Python": (
        lambda x: x * CODES[0],
        lambda _: CODES.__setitem__(0, 3.0),
        "CODES",
    ),
    "a byte behind a view": (lambda x: x * VIEW[0], lambda _: VIEW.__setitem__(0, 3), "VIEW"),
    "what a file of settings has": (
        lambda x: x * PARSER.getfloat("model", "scale"),
        lambda _: PARSER.set("model", "scale", "3.0"),
        "PARSER._sections",
    ),
    "what makes the items of a defaultdict": (
        lambda x: x * MAKING["absent"],
        lambda _: setattr(MAKING, "default_factory", float),
        "MAKING.default_factory",
    ),
    "what a wrapper of a function of torch reads": (lambda x: as_relu(x), OF_SCALE, "SCALE"),
    "what code without a module reads": (
        NAMESPACE["without_module"],
        lambda patch: patch.setitem(NAMESPACE, "scale", 3.0),
        "without_module.scale",
    ),
    "what code that torch.fx generated calls": (
        fx.symbolic_trace(Calling()),
        OF_SCALE,
        "SCALE",
    ),
    "the config of a module outside the model": (
        lambda x: x * OUTSIDE.config.scale,
        put("scale", 3.0, OUTSIDE.config),
        "OUTSIDE.config.scale",
    ),
}


class OwnConfig:
    """A class that is itself the config."""

    scale_1 = 2.0
    table_1: ClassVar = {"scale": 2.0}


class ByItem(type):
    def __getitem__(cls, name: str) -> Any:
        return getattr(cls, name)


class OfItems(metaclass=ByItem):
    scale_1 = 2.0


class Own:
    """Looks its own attributes up."""

    def __init__(self) -> None:
        self.scale_1 = 2.0

    def __getattribute__(self, name: str) -> Any:
        if name == "scaled":
            return lambda index: object.__getattribute__(self, f"scale_{index}")
        return super().__getattribute__(name)


class WithSlots:
    __slots__ = ("scale_1",)

    def __init__(self) -> None:
        self.scale_1 = 2.0


class EqualClasses(type):
    """Its classes are all equal."""

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, EqualClasses)

    def __hash__(cls) -> int:
        return 1


class Equal(metaclass=EqualClasses):
    number = 2.0

    def scale(self) -> float:
        return self.number


class EqualToo(metaclass=EqualClasses):
    number = 2.0

    def scale(self) -> float:
        return self.number


def number_of(variable: str) -> float:
    return float(os.environ.get(variable, "2.0"))


EQUAL, EQUAL_TOO, of_environment = Equal(), EqualToo(), os.environ
VARIABLE = "TEST_OUTSIDE"
ONE = 1  # part of names that code computes
GET, OF_OWN = getattr, functools.partial(getattr, OwnConfig)
OWN, WITH_SLOTS, INNER = Own(), WithSlots(), SimpleNamespace(inner=SimpleNamespace(scale_1=2.0))
SCALE_1, SETTINGS = 2.0, ModuleType("settings")
SETTINGS.scale_1 = 2.0  # type: ignore[attr-defined]


def act_1(x: Tensor) -> Tensor:
    return x.tanh()


class OwnOperations:
    """Has functions, and nothing else."""

    @staticmethod
    def act_1(x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return x * SCALE


class Aliased:
    """Has another name for its scale, as configs of transformers do."""

    attribute_map: ClassVar[dict[str, str]] = {"alias": "scale"}

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattribute__(self, name: str) -> Any:
        get = super().__getattribute__
        return get(get("attribute_map").get(name, name))


ALIASED, OF_SCALE_1 = Aliased(), operator.attrgetter("scale_1")
ACTS = ModuleType("functions")
ACTS.act_1 = act_1  # type: ignore[attr-defined]
OPERATIONS = SimpleNamespace(act_1=act_1, config_1=SimpleNamespace(scale=2.0))

COMPUTED: dict[str, tuple[Forward, Change, str]] = {
    "of a class": (
        lambda x: x * getattr(OwnConfig, f"scale_{ONE}"),
        put("scale_1", 3.0, OwnConfig),
        "OwnConfig.scale_1",
    ),
    "a container of a class": (
        lambda x: x * getattr(OwnConfig, f"table_{ONE}")["scale"],
        lambda patch: patch.setitem(OwnConfig.table_1, "scale", 3.0),
        "OwnConfig.table_1",
    ),
    "in the dict of a class": (
        lambda x: x * vars(OwnConfig)[f"scale_{ONE}"],
        put("scale_1", 3.0, OwnConfig),
        "OwnConfig.scale_1",
    ),
    "absent in a class": (
        lambda x: x * getattr(OwnConfig, f"scale_{ONE + 1}", 2.0),
        put("scale_2", 3.0, OwnConfig),
        "OwnConfig.scale_2",
    ),
    "by getattr under another name": (
        lambda x: x * GET(OwnConfig, f"scale_{ONE}"),
        put("scale_1", 3.0, OwnConfig),
        "OwnConfig.scale_1",
    ),
    "by a partial function": (
        lambda x: x * OF_OWN(f"scale_{ONE}"),
        put("scale_1", 3.0, OwnConfig),
        "OwnConfig.scale_1",
    ),
    "by an attrgetter": (
        lambda x: x * operator.attrgetter(f"scale_{ONE}")(OwnConfig),
        put("scale_1", 3.0, OwnConfig),
        "OwnConfig.scale_1",
    ),
    "by a metaclass": (
        lambda x: x * OfItems[f"scale_{ONE}"],
        put("scale_1", 3.0, OfItems),
        "OfItems.scale_1",
    ),
    "of an object": (
        lambda x: x * getattr(INNER.inner, f"scale_{ONE}"),
        put("scale_1", 3.0, INNER.inner),
        "inner.scale_1",
    ),
    "absent in an object": (
        lambda x: x * getattr(INNER.inner, f"scale_{ONE + 1}", 2.0),
        put("scale_2", 3.0, INNER.inner),
        "inner.scale_2",
    ),
    "in a slot": (
        lambda x: x * getattr(WITH_SLOTS, f"scale_{ONE}"),
        put("scale_1", 3.0, WITH_SLOTS),
        "WITH_SLOTS.scale_1",
    ),
    "by a lookup of its own": (
        lambda x: x * OWN.scaled(ONE),
        put("scale_1", 3.0, OWN),
        "OWN.scale_1",
    ),
    "of a Python module": (
        lambda x: x * getattr(SETTINGS, f"scale_{ONE}"),
        put("scale_1", 3.0, SETTINGS),
        "SETTINGS.scale_1",
    ),
    "of a global": (
        lambda x: x * globals()[f"SCALE_{ONE}"],
        lambda patch: patch.setitem(globals(), "SCALE_1", 3.0),
        "SCALE_1",
    ),
    "a method of a class": (
        lambda x: getattr(OwnOperations, f"act_{ONE}")(x),
        put("act_1", staticmethod(torch.relu), OwnOperations),
        "OwnOperations.act_1",
    ),
    "what a method of a class reads": (
        lambda x: getattr(OwnOperations, f"act_{ONE}")(x),
        lambda patch: patch.setitem(globals(), "SCALE", 3.0),
        "SCALE",
    ),
    "a function of an object": (
        lambda x: getattr(OPERATIONS, f"act_{ONE}")(x),
        put("act_1", torch.relu, OPERATIONS),
        "OPERATIONS.act_1",
    ),
    "an object of an object": (
        lambda x: x * getattr(OPERATIONS, f"config_{ONE}").scale,
        put("scale", 3.0, OPERATIONS.config_1),
        "OPERATIONS.config_1.scale",
    ),
    "a function of a Python module": (
        lambda x: getattr(ACTS, f"act_{ONE}")(x),
        put("act_1", torch.relu, ACTS),
        "functions.act_1",
    ),
    "a function among the globals": (
        lambda x: globals()[f"act_{ONE}"](x),
        lambda patch: patch.setitem(globals(), "act_1", torch.relu),
        "act_1",
    ),
    "its own Python module among all": (
        lambda x: x * getattr(sys.modules[__name__], f"SCALE_{ONE}"),
        lambda patch: patch.setitem(globals(), "SCALE_1", 3.0),
        "SCALE_1",
    ),
    "an imported Python module": (
        lambda x: x * importlib.import_module("test_outside_code").SCALE_1,
        lambda patch: patch.setitem(globals(), "SCALE_1", 3.0),
        "SCALE_1",
    ),
    "a variable of the environment": (
        lambda x: x * float(os.environ[VARIABLE]),
        lambda patch: patch.setenv(VARIABLE, "3.0"),
        "TEST_OUTSIDE",
    ),
    "a variable of the environment in bytes": (
        lambda x: x * float(os.environb[b"TEST_OUTSIDE"]),
        lambda patch: patch.setenv(VARIABLE, "3.0"),
        "TEST_OUTSIDE",
    ),
    "a variable of the environment by another name": (
        lambda x: x * float(of_environment.get(VARIABLE, "2.0")),
        lambda patch: patch.setenv(VARIABLE, "3.0"),
        "TEST_OUTSIDE",
    ),
    "a variable of the environment that a helper is told": (
        lambda x: x * number_of("PIPECOMPILE_TEST_OUTSIDE_TOO"),
        lambda patch: patch.setenv("PIPECOMPILE_TEST_OUTSIDE_TOO", "3.0"),
        "PIPECOMPILE_TEST_OUTSIDE_TOO",
    ),
    "one of two classes that are equal": (
        lambda x: x * EQUAL.scale() * EQUAL_TOO.scale(),
        put("number", 3.0, EqualToo),
        "EqualToo.number",
    ),
    "by another name that its class has for it": (
        lambda x: x * ALIASED.alias,
        put("scale", 3.0, ALIASED),
        "ALIASED.scale",
    ),
    "by an attrgetter that was made before": (
        lambda x: x * OF_SCALE_1(OwnConfig),
        put("scale_1", 3.0, OwnConfig),
        "OwnConfig.scale_1",
    ),
    "of a global, by text": (
        lambda x: x * eval(f"SCALE_{ONE}"),
        lambda patch: patch.setitem(globals(), "SCALE_1", 3.0),
        "SCALE_1",
    ),
}


class Reading(nn.Module):
    """Calls a function, which reads something."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return self.function(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_found(name: str, monkeypatch: Patch) -> None:
    function, change, where = CASES[name]
    values = OutsideValues(Reading(function))
    assert values.changed() is None
    monkeypatch.setattr(CONFIG, "other", 2)  # read by nobody
    monkeypatch.setattr(CONFIG, "new", 2, raising=False)
    assert values.changed() is None
    change(monkeypatch)
    changed = values.changed()
    assert changed is not None and where in changed


@pytest.mark.parametrize("name", COMPUTED)
def test_a_change_is_found_behind_a_name_that_code_computes(name: str, monkeypatch: Patch) -> None:
    function, change, where = COMPUTED[name]
    values = OutsideValues(Reading(function))
    assert values.changed() is None
    change(monkeypatch)
    changed = values.changed()
    assert changed is not None and where in changed


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * getattr(OwnConfig, "scale_1"),  # noqa: B009
        lambda x: x * getattr(OwnConfig, "absent", SCALE),
        lambda x: x if hasattr(OwnConfig, "absent") else OwnConfig.scale_1,
        lambda x: getattr(x * OwnConfig.scale_1, "relu")(),  # noqa: B009
    ],
)
def test_names_that_code_has_are_not_computed(function: Forward, monkeypatch: Patch) -> None:
    values = OutsideValues(Reading(function))
    monkeypatch.setattr(OwnConfig, "read_by_nobody", 1, raising=False)
    assert values.changed() is None


def refusing(x: Tensor) -> Tensor:
    if x.dim() > 9:
        raise ValueError(f"{PRINTED} and {COUNTED}")
    return x * PRINTED.scale * (COUNTED != 1)


class Printed:
    """What a training loop prints has what changes in it."""

    scale, step = 2.0, 0

    def __repr__(self) -> str:
        return f"step {self.step}"


PRINTED = Printed()


def test_what_is_printed_for_people_alone_may_change(monkeypatch: Patch) -> None:
    values = OutsideValues(Reading(refusing))
    monkeypatch.setattr(PRINTED, "step", 1)
    monkeypatch.setattr(COUNTED, "counter", 1)
    assert values.changed() is None
    monkeypatch.setattr(PRINTED, "scale", 1.0)
    assert values.changed() is not None


STATE = SimpleNamespace(temperature=2.0, step=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: getattr(torch.nn.functional, f"gel{'u'}")(x) * STATE.temperature,
        lambda x: getattr(torch, f"tan{'h'}")(x) * STATE.temperature,
        lambda x: getattr(math, f"sqr{'t'}")(2) * STATE.temperature * x,
    ],
)
def test_names_that_are_computed_of_torch_are_of_nothing_else(
    function: Forward, monkeypatch: Patch
) -> None:
    values = OutsideValues(Reading(function))
    monkeypatch.setattr(STATE, "step", 1)
    assert values.changed() is None
    monkeypatch.setattr(STATE, "temperature", 1.0)
    assert values.changed() is not None


@pytest.mark.parametrize(
    "function",
    [
        lambda x: getattr(STATE or torch, f"ste{'p'}") * x,
        lambda x: getattr(torch.nn.functional if x is None else STATE, f"ste{'p'}") * x,
        lambda x: getattr(functools.partial(STATE), f"fun{'c'}").step * x,
    ],
)
def test_names_that_are_computed_of_something_else_count(
    function: Forward, monkeypatch: Patch
) -> None:
    values = OutsideValues(Reading(function))
    monkeypatch.setattr(STATE, "step", 1)
    assert values.changed() is not None


class Typed(nn.Module):
    """Has a config, and asks a tensor for its type."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config.dtype, self.config.device = None, "cpu"
        # Only what packages with modules of the model have is followed.
        self.activation = GELUActivation()

    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return x.to(x.dtype)


class TypedByConfig(Typed):
    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return x.to(self.config.dtype)


class TypedByArgument(Typed):
    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return typed(x, self.config)


class TypedByText(Typed):
    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return x.to(getattr(self.config, "dtype"))  # noqa: B009


class TypedByKeyword(Typed):
    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return torch.add(x, torch.zeros(1, dtype=x.dtype, device=getattr(self.config, "device")))  # noqa: B009


def typed(x: Tensor, config: Any) -> Tensor:
    return x.to(config.dtype)


@pytest.mark.parametrize(
    "kind", [Typed, TypedByKeyword, TypedByConfig, TypedByArgument, TypedByText]
)
def test_attributes_of_tensors_count_where_code_reads_them_of_an_object(kind: type[Typed]) -> None:
    model = kind()
    values = OutsideValues(model)
    # As `save_pretrained` of transformers does it.
    model.config.dtype = "float32"
    changed = values.changed()
    assert changed == (None if kind in (Typed, TypedByKeyword) else "config.dtype")


class Statistics:
    """An object of the user's, whose attribute is called as one of tensors is."""

    def __init__(self) -> None:
        self.mean = 1.0


@dataclass
class Measured:
    """A class that patterns read by position."""

    mean: float = 1.0


def by_local_name(model: Any) -> float:
    statistics = model.of["a"]
    return float(statistics.mean)


def by_loop(model: Any) -> float:
    return float(sum(each.mean for each in model.of.values()))


def by_unpacking(model: Any) -> float:
    (statistics,) = model.of.values()
    return float(statistics.mean)


def by_keyword_pattern(model: Any) -> float:
    match model.of["a"]:
        case Statistics(mean=value) | Measured(mean=value):
            return float(value)
    return 0.0


def by_positional_pattern(model: Any) -> float:
    match model.of["a"]:
        case Measured(value):
            return float(value)
    return 0.0


@pytest.mark.parametrize("kind", [Statistics, Measured, lambda: SimpleNamespace(mean=1.0)])
@pytest.mark.parametrize(
    "read",
    [
        lambda model: model.of["a"].mean,
        lambda model: model.of.get("a").mean,
        by_local_name,
        by_loop,
        by_unpacking,
        by_keyword_pattern,
        by_positional_pattern,
    ],
)
def test_an_attribute_of_a_nameless_object_that_is_called_as_one_of_tensors(
    kind: Callable[[], Any], read: Callable[[Any], float]
) -> None:
    model: Any = Reading(lambda x: x * read(model))
    model.of = {"a": kind()}
    values, result = OutsideValues(model), read(model)
    model.of["a"].mean = 2.0
    # A pattern of another class reads nothing.
    assert result == read(model) or values.changed() == "of.mean"


LONG_LIST = list(range(3000))
LARGE_TABLE = {f"entry {number}": float(number) for number in range(3000)}
LARGE_ARRAY = np.zeros(3000)
NORMAL = torch.distributions.Normal(0.0, 1.0)
OPTIMIZER = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
SQUARE = np.poly1d([1.0, 0.0, 0.0])
TIMES = np.vectorize(lambda value: value * Known.factor)
ENTERED = contextlib.nullcontext(SimpleNamespace(scale=1.0))


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda: LONG_LIST[-1], lambda: LONG_LIST.__setitem__(-1, -1)),
        (lambda: LARGE_TABLE["entry 7"], lambda: LARGE_TABLE.update({"entry 7": 1.5})),
        (lambda: LARGE_ARRAY.sum(), lambda: LARGE_ARRAY.__setitem__(5, LARGE_ARRAY[5] + 1)),
        (lambda: NORMAL.loc, lambda: setattr(NORMAL, "loc", torch.ones(()))),
        (
            lambda: OPTIMIZER.param_groups[0]["lr"],
            lambda: OPTIMIZER.param_groups[0].update(lr=OPTIMIZER.param_groups[0]["lr"] / 2),
        ),
        (lambda: SQUARE(2.0), lambda: SQUARE.coeffs.__setitem__(2, SQUARE.coeffs[2] + 1)),
        (lambda: TIMES(2.0), lambda: setattr(Known, "factor", Known.factor + 1)),
        (
            lambda: ENTERED.__enter__().scale,
            lambda: setattr(ENTERED.enter_result, "scale", ENTERED.enter_result.scale + 1),
        ),
    ],
)
def test_large_values_and_objects_of_torch_and_numpy(
    read: Callable[[], Any], change: Callable[[], None]
) -> None:
    values = OutsideValues(Reading(lambda x: x * read()))
    assert values.changed() is None
    change()
    assert values.changed() is not None


OF_ALL = Measured()


def mean_of(anything: Any) -> float:
    return float(anything.mean)


class Known:
    """Objects that methods and functions find by other names than their own."""

    current: Any = Measured()
    factor = 2.0

    def __init__(self) -> None:
        self.mean = 1.0

    @classmethod
    def latest(cls) -> Any:
        return cls.current

    def read(this) -> float:  # noqa: N805
        return this.mean


def in_a_class_of_a_function() -> tuple[Any, Callable[[], float]]:
    class Local:
        def __init__(self) -> None:
            self.mean = 1.0

        def read(self) -> float:
            return self.mean

    local = Local()
    return local, lambda: local.read()


def by_assignment() -> tuple[Any, Callable[[], float]]:
    def read() -> float:
        first = second = OF_ALL
        del second
        return float((third := first).mean + 0 * third.mean)

    return OF_ALL, read


def by_self_of_another_name() -> tuple[Any, Callable[[], float]]:
    known = Known()
    return known, lambda: known.read()


@pytest.mark.parametrize(
    "made",
    [
        lambda: (OF_ALL, lambda: mean_of(OF_ALL)),
        lambda: (OF_ALL, lambda: sum(each.mean for each in (OF_ALL, Statistics()))),
        lambda: (Known.current, lambda: Known.latest().mean),
        in_a_class_of_a_function,
        by_assignment,
        by_self_of_another_name,
    ],
)
def test_an_object_that_is_passed_on_has_other_names(
    made: Callable[[], tuple[Any, Callable[[], float]]], monkeypatch: Patch
) -> None:
    owner, read = made()
    values = OutsideValues(Reading(lambda x: x * read()))
    monkeypatch.setattr(owner, "mean", 3.0)
    assert (values.changed() or "").endswith(".mean")


@functools.lru_cache
def cached_settings() -> Any:
    return SimpleNamespace(scale=2.0)


@functools.cache
def cached_table(_name: str) -> dict[str, float]:
    return {"scale": 2.0}


@functools.lru_cache(maxsize=1)
def cached_pair() -> tuple[Any, list[float]]:
    return SimpleNamespace(scale=2.0), [1.0]


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda: cached_settings().scale, lambda: setattr(cached_settings(), "scale", 3.0)),
        (lambda: cached_table("a")["scale"], lambda: cached_table("a").update(scale=3.0)),
        (lambda: cached_pair()[0].scale, lambda: setattr(cached_pair()[0], "scale", 3.0)),
        (lambda: cached_pair()[1][0], lambda: cached_pair()[1].append(3.0)),
    ],
)
def test_what_a_cached_function_returns_may_change(
    read: Callable[[], float], change: Callable[[], None]
) -> None:
    for cached in (cached_settings, cached_table, cached_pair):
        cached.cache_clear()
    read()
    values = OutsideValues(Reading(lambda x: x * read()))
    assert values.changed() is None
    change()
    assert "cached_" in (values.changed() or "")


def test_tables_of_installed_packages_get_entries_for_other_models(monkeypatch: Patch) -> None:
    is_installed = "pipecompile.frontend.found_places.is_installed"
    monkeypatch.setattr(is_installed, lambda package: package == "tests")
    values = OutsideValues(Reading(lambda x: TABLE["doubled"](x)))
    monkeypatch.setitem(TABLE, "new", tripled)
    assert values.changed() is None
    monkeypatch.setitem(TABLE, "doubled", tripled)
    assert values.changed() == f"{__name__}.TABLE['doubled']"


class Lazy:
    @functools.cached_property
    def scale(self) -> float:
        return 2.0


LAZY = Lazy()


def test_a_cached_property_that_is_first_read_later_is_no_change() -> None:
    values = OutsideValues(Reading(lambda x: x * LAZY.scale))
    assert LAZY.scale == 2.0
    assert values.changed() is None


class Hiding:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("hidden")


HIDING = Hiding()


class Copying:
    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return {"scale": 2.0}


COPYING = Copying()


def test_an_object_may_hide_its_attributes() -> None:
    assert OutsideValues(Reading(lambda x: x if HIDING else -x)).changed() is None


def test_an_object_may_show_another_table_each_time() -> None:
    assert OutsideValues(Reading(lambda x: x if COPYING else -x)).changed() is None


HOLDING: list[Any] = [2.0]
HOLDING.append({"itself": HOLDING})


def test_a_container_may_hold_itself(monkeypatch: Patch) -> None:
    values = OutsideValues(Reading(lambda x: x * HOLDING[0]))
    assert values.changed() is None
    monkeypatch.setitem(HOLDING[1], "more", 1)
    assert values.changed() is not None


@pytest.mark.parametrize("module", [None, 1, "", "torch.nn.functional", "json"])
def test_a_function_may_say_anything_of_its_module(module: Any, monkeypatch: Patch) -> None:
    monkeypatch.setattr(scaled, "__module__", module)
    values = OutsideValues(Reading(lambda x: scaled(x)))
    assert values.changed() is None
    OF_SCALE(monkeypatch)
    assert values.changed() == f"{__name__}.SCALE"


def test_what_a_weak_proxy_stood_for_may_be_gone(monkeypatch: Patch) -> None:
    gone = Scaler()
    monkeypatch.setattr(CONFIG, "gone", weakref.proxy(gone), raising=False)
    del gone
    assert OutsideValues(Reading(lambda x: x * CONFIG.gone.factor)).changed() is None


def test_the_name_of_a_type_is_that_type() -> None:
    """Saving a model of transformers writes it so into its config."""
    model: Any = Reading(lambda x: x.to(model.settings.kind))
    model.settings = SimpleNamespace(kind=torch.float32)
    values = OutsideValues(model)
    model.settings.kind = "float32"
    assert values.changed() is None
    model.settings.kind = "bfloat16"
    assert values.changed() == "settings.kind"


class Cached(Typed):
    """Reads whether it is to keep a cache, as decoders of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return x * self.config.scale if self.config.use_cache else x.clone() * self.config.scale


def test_whether_a_model_of_transformers_keeps_a_cache_is_no_change() -> None:
    """Pipelines leave caches out, and a trainer that is made for its callbacks sets this."""
    model = Cached()
    model.config.scale, model.config.use_cache = 2.0, True
    values = OutsideValues(model)
    model.config.use_cache = False
    assert values.changed() is None
    model.config.scale = 3.0
    assert values.changed() == "config.scale"
