"""What a forward reads and calls besides what its modules hold: globals, attributes of classes and
of objects, functions and methods, the classes of modules, torch's global flags.

A graph has these in it as they were at the capture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.frontend.compared_value import (
    MAPPINGS,
    MOST_COMPARED,
    NUMBERS,
    ComparedValue,
    comparable,
)
from pipecompile.frontend.found_names import FIRST_NAMES, FoundNames
from pipecompile.frontend.global_flags import asked_flags
from pipecompile.frontend.iterators import position
from pipecompile.frontend.known_reads import NOTHING_KNOWN, KnownReads
from pipecompile.frontend.name_search import NameSearch
from pipecompile.frontend.packages import is_foreign
from pipecompile.frontend.places import Places
from pipecompile.frontend.unregistered_modules import UnregisteredModules
from pipecompile.graph.attributes import CONTAINERS, ContainerItems
from pipecompile.graph.storages import is_irregular

__all__ = ["GLOBAL_HOOKS", "OutsideValues"]

GLOBAL_HOOKS = tuple(
    f"_global_{direction}{kind}hooks"
    for direction in ("forward", "backward")
    for kind in ("_", "_pre_")
)


class OutsideValues:
    """The values that the forward of a model may read now, besides what its modules hold
    themselves. `read_again` are more of them, which are read in each step.

    `looks_past_classes` is whether some code reads attributes so that no class can tell which.
    `found_names` are those by which they were found, which may be `names` for the next time.
    """

    def __init__(
        self,
        model: nn.Module,
        known: KnownReads = NOTHING_KNOWN,
        names: FoundNames = FIRST_NAMES,
        read_again: Sequence[ComparedValue] = (),
    ) -> None:
        search = NameSearch(model, known, names)
        self.found_names = search.found_names
        self.looks_past_classes = search.looks_past_classes
        self._values = [*search.found.values, *_hooks_of_all_modules()]
        flags = [(where, read, read()) for where, read in asked_flags(search)]
        self._code = [*search.found.code, *flags]
        self._read_again = read_again
        self._remember_objects()
        # Parameters are compared by their owner.
        laid_out = [
            (where, each)
            for where, each in search.found.tensors
            if not (isinstance(each, nn.Parameter) or is_irregular(each))
        ]
        # The model's parameters are asked by their owner.
        own = set(map(id, model.parameters()))
        self._found_tensors = [each for each in search.found.tensors if id(each[1]) not in own]
        self._all_tensors = [tensor for _, tensor in self._found_tensors]
        self._trained = self._currently_trained()
        self._tensor_places = [where for where, _ in laid_out]
        self._tensors = [each for _, each in laid_out]
        self._layouts = self._current_layouts()
        self._iterators = [(where, each, position(each)) for where, each in search.found.iterators]
        self._unregistered = UnregisteredModules(search.found.modules)
        self._named_modules = list(model.named_modules())
        self._modules = [module for _, module in self._named_modules]
        self._kinds = list(map(type, self._modules))

    @property
    def values(self) -> Iterator[tuple[str, Any]]:
        """The values that are compared by what they hold, and where they are."""
        return ((each.where, each.read()) for each in self._values)

    def changed(self) -> str | None:
        """Return where there is something else now; None if all is the same."""
        # There are many, so they are first compared as objects, without loops in Python.
        are_the_same = self._places.are_the_same()
        if not are_the_same and (place := self._other_code()):
            return place
        # `parallelize` gives modules classes that torch makes around theirs: these are the same
        # as before.
        if list(map(type, self._modules)) != self._kinds and (place := self._other_class()):
            return place
        trained = self._currently_trained()
        if trained != self._trained:
            found = zip(self._found_tensors, trained, self._trained, strict=True)
            where = next(where for (where, _), now, before in found if now != before)
            return f"whether {where} requires a gradient"
        layouts = self._current_layouts()
        if layouts != self._layouts:
            pairs = zip(self._tensor_places, layouts, self._layouts, strict=True)
            return next(where for where, now, before in pairs if now != before)
        if place := self._unregistered.changed():
            return place
        if are_the_same and self._containers.are_the_same():
            suspects = self._read_each_time
        else:
            suspects = self._values
        changed = (each.where for each in (*suspects, *self._read_again) if not each.is_the_same)
        place = next(changed, None)
        if not (place or suspects is self._read_each_time):
            # They are equal, and the next steps compare the objects that are there now.
            self._remember_objects()
        return place

    def advanced(self) -> str | None:
        """Return which iterator that the forward may read has gone on; None if none has."""
        return next(
            (where for where, each, before in self._iterators if position(each) != before), None
        )

    def _currently_trained(self) -> list[bool]:
        return list(map(_requires_gradient, self._all_tensors))

    def _current_layouts(self) -> list[Any]:
        return list(zip(map(_kind, self._tensors), map(Tensor.stride, self._tensors), strict=True))

    def _remember_objects(self) -> None:
        """Remember which objects are there now, to compare them in each step."""
        now = [(each, each.read()) for each in self._values]
        lasting = [(each.read, value) for each, value in now if each.read() is value]
        self._places = Places([*((read, value) for _, read, value in self._code), *lasting])
        small = (value for _, value in lasting if isinstance(value, (*CONTAINERS, tuple)))
        self._containers = ContainerItems(each for each in small if len(each) <= MOST_COMPARED)
        # Those that are made when they are read, and those that change in place while they stay the
        # same object, and have no items that could be compared as objects.
        self._read_each_time = [
            each
            for each, value in now
            if isinstance(value, (*NUMBERS, *MAPPINGS)) or each.read() is not value
        ]

    def _other_code(self) -> str | None:
        """Return the place of code that is other code now."""
        changed = (where for where, read, value in self._code if read() is not value)
        place = next(changed, None)
        return place if place is None or isinstance(place, str) else place()

    def _other_class(self) -> str | None:
        """Return which module has another class of its own; torch may have put one around it."""
        for (path, module), kind in zip(self._named_modules, self._kinds, strict=True):
            if _own_class(type(module)) is not _own_class(kind):
                return f"the class of {path}" if path else "the class of the model"
        return None


# In C, since each step asks all tensors.
_requires_gradient = attrgetter("requires_grad")
_kind = attrgetter("dtype", "shape")


def _hooks_of_all_modules() -> Iterator[ComparedValue]:
    """Yield the hooks that every module calls."""
    for name in GLOBAL_HOOKS:
        read = partial(_own_hooks, name)
        hooks = read()
        yield ComparedValue(f"torch.nn.modules.module.{name}", read, hooks, comparable(hooks))


def _own_hooks(name: str) -> tuple[Any, ...]:
    # Those of torch's own tools, which count operators for example, change nothing.
    hooks = getattr(torch.nn.modules.module, name).values()
    return tuple(each for each in hooks if not is_foreign(getattr(each, "__module__", None)))


def _own_class(kind: type) -> type:
    """Return a class of modules; the one inside, if torch made a class around it."""
    own: Iterator[type] = (base for base in kind.__mro__ if not is_foreign(base.__module__))
    # Modules of torch itself run as they are.
    return next(own, nn.Module)
