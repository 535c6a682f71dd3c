"""The search for what a forward reads and calls besides what its modules hold: by name, without
running anything, in the code of the forward and of all that it may call.

    def forward(self, x):
        return helper(x, self.config) * table["scale"]
    def helper(x, config):
        return x * config.scale           names: helper, config, table, scale

    helper, table      globals of the function that names them: its names are read too
    self.config        an object: of its attributes those that any function names, here `scale`,
                       since a function may be given what another one has found
    Model.scale        likewise of classes, and of Python modules; of functions also what they
                       enclose, their defaults and their code
    table              a container: its items, and what these lead to
    F.gelu             of Python modules of others which functions are there, without their names
    os.environ         of a function that reads it, the variables that its strings name;
    sys.modules        and likewise Python modules

A name that is in no place now, but that code would find there, is found too: an attribute that
an object has of its class, a method that a class inherits, `getattr(config, "scale", 1.0)`.

    x.dtype            a name that tensors have too: of an object of an installed package only if
                       it is called as the variable or attribute is that some code reads the name
                       of
    getattr(table, f"scale_{i}")
                       a name that the user's own code computes may be that of any value in the
                       user's classes, objects and Python modules, except for objects whose reads
                       are known

So more may be found than is read, but nothing that changes during training is likely among it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from operator import attrgetter, methodcaller
from types import FunctionType, ModuleType
from typing import Any
from weakref import ProxyTypes, ReferenceType

from torch import Tensor, fx, nn

from pipecompile.frontend.attribute_reads import ALL
from pipecompile.frontend.caches import CACHES, entries_of
from pipecompile.frontend.code_names import MATCHED, CodeNames, names_in
from pipecompile.frontend.compared_value import (
    MAPPINGS,
    MOST_ITEMS,
    NUMBERS,
    content,
    itself,
    referent,
)
from pipecompile.frontend.found_attributes import (
    aliased_names,
    attributes_of,
    data_names,
    may_be_hidden,
    names_there,
    newest_name,
)
from pipecompile.frontend.found_names import FIRST_NAMES, FoundNames
from pipecompile.frontend.found_places import FoundPlaces
from pipecompile.frontend.implicit_reads import MAKING, REGISTRY, operators
from pipecompile.frontend.known_reads import NOTHING_KNOWN, KnownReads
from pipecompile.frontend.object_shape import ObjectShape
from pipecompile.frontend.packages import (
    has_own_attributes,
    is_installed,
    is_of_all_models,
    names_foreign_module,
    package_of,
)
from pipecompile.frontend.places import GONE, Attribute, Item, variable
from pipecompile.frontend.readable_names import ReadableNames
from pipecompile.frontend.replaceable_code import (
    functions_among,
    operators_of_tensors,
    run_by_a_call,
)
from pipecompile.graph.attributes import CONTAINERS, PLAIN, plain_container
from pipecompile.graph.collector import collector_paused

__all__ = ["NameSearch"]

OF_ENVIRONMENT = frozenset({"environ", "environb", "getenv", "getenvb"})
"""What finds variables of the environment by strings."""
BY_STRING = OF_ENVIRONMENT | {"modules", "import_module", "__import__"}
"""What finds these or Python modules by strings."""
ANY_GLOBAL = frozenset({"globals", "eval", "exec"})
"""What finds globals by names that code computes."""
BY_VALUE = (getattr, hasattr, vars, attrgetter, methodcaller)
"""What reads attributes by names that code computes, also if code has another name for it."""
OF_CACHES = frozenset({"use_cache"})
"""What configs of transformers say of caches, which pipelines leave out: a trainer sets it."""
PLAIN_READING: Any = object.__getattribute__
SPACE = re.compile(r"\s")
LEADING_NOWHERE = (*PLAIN, *NUMBERS, type)
HOLDING_ITEMS = (*CONTAINERS, *MAPPINGS, tuple)


class NameSearch:
    """Follows the names in functions to values and to other functions.

    A name of a function is looked up among its globals and what it encloses, and among the
    attributes of all objects, classes and Python modules that are found. The search begins with
    `names`, those of an earlier one of the same.
    """

    def __init__(
        self,
        model: nn.Module,
        known: KnownReads = NOTHING_KNOWN,
        names: FoundNames = FIRST_NAMES,
    ) -> None:
        self._known = known
        self._shapes: dict[int, ObjectShape] = {}
        # By id, since a class may be equal to another one; with the class, which so keeps its id.
        self._attributes: dict[int, tuple[type, Mapping[str, Any]]] = {}
        named_modules = list(model.named_modules())
        before: FoundNames | None = None
        self._packages = {package_of(type(module).__module__) for _, module in named_modules}
        self._readable = ReadableNames(names, known, self._packages)
        with collector_paused():
            # A function that is found may name attributes of what was found before it.
            while before != self.found_names:
                before = self.found_names
                self._search(named_modules)

    def _search(self, named_modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Find all that the names lead to that are known now; there may be more names then."""
        self.found = FoundPlaces()
        self._readable = ReadableNames(self.found_names, self._known, self._packages)
        # What modules of the model hold is compared by itself.
        self._seen = {id(module) for _, module in named_modules}
        self._made: set[int] = set()
        self._called: set[int] = set()
        self._known_globals: dict[int, set[str]] = {}
        self._of_user: list[tuple[FunctionType, CodeNames]] = []
        for path, module in named_modules:
            self._look_in_module(path, module)
        self._look_up_all()
        if self._reads_environment():
            # A function may be given the name of a variable by another one.
            for function, reads in self._of_user:
                self._look_at_strings(function, reads)
            self._look_up_all()
        self.found.note_absent_of_tensors(self.found_names.may_be_absent)
        self.found.code += operators_of_tensors()
        by_value = (each.__name__ for each in BY_VALUE if self.has_found(each))
        self._readable.names = self._readable.names.with_computing(by_value)

    def _look_up_all(self) -> None:
        while self.found.to_follow:
            self._look_up(*self.found.to_follow.popleft())

    @property
    def found_names(self) -> FoundNames:
        """What a search that may find the same begins with, to be done in one pass."""
        return self._readable.names

    @property
    def names(self) -> frozenset[str]:
        """All names in the code that was found."""
        return self.found_names.names

    @property
    def looks_past_classes(self) -> bool:
        """Whether code names what reads an attribute without asking the class of its object."""
        return self.found_names.look_past_classes

    def has_found(self, value: Any) -> bool:
        """Return whether code may have this function, object or Python module, by any name."""
        return id(value) in self._seen or id(value) in self._made

    def _look_in_module(self, path: str, module: nn.Module) -> None:
        self._look_in_class(type(module))
        if not self._known.runs_itself(path):
            self._note_calling(type(module))
        self._look_at_read(path, type(module))
        attributes = vars(module)
        for name in self.found_names.among(attributes):
            if not self._known.may_read(path, name):
                continue
            where, value = f"{path}.{name}".lstrip("."), attributes[name]
            # The others are compared by the modules' owner.
            if isinstance(value, (*NUMBERS, *MAPPINGS)) and self._known.must_stay(path, name):
                self.found.look(where, Item(attributes, name))
            if self._known.has_noted(type(value)):
                self._readable.noted.add(id(value))
            self.found.follow(where, value)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            self.found.follow(f"{path}.{name}".lstrip("."), tensor)
        self._look_in_slots(path, module)
        if not self._known.runs_itself(path):
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self.found.follow("a hook", hook)

    def _look_up(self, where: str, value: Any) -> None:
        """Look up in `value`, and in what it consists of, the names that can reach it."""
        if type(value) in ProxyTypes:  # of what is gone not even the class can be asked
            self.found.look(where, partial(referent, value))
            return
        if isinstance(value, type):
            self._look_in_class(value)
            self._look_at_making(value)
        if id(value) in self._seen or isinstance(value, LEADING_NOWHERE):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            self.found.tensors.append((where, value))
            attributes = attributes_of(value)
            self.found.look_among(where, attributes, self.found_names.among(attributes))
            return
        if isinstance(value, Iterator):
            self.found.iterators.append((where, value))
        if isinstance(value, FunctionType):
            self._look_in_function(value)
        elif has_own_attributes(value, self._packages):
            self._look_in_object(where, value)
        elif isinstance(value, ModuleType):
            self._look_in_foreign(value)
        if isinstance(value, nn.Module):  # that the model does not register
            self.found.modules.append((where, value))
            self._note_calling(type(value))
            for name, child in value.named_children():
                self.found.follow(f"{where}.{name}", child)
        if isinstance(value, (attrgetter, methodcaller)):
            texts = (each for each in value.__reduce__()[1] if isinstance(each, str))
            self._readable.names = self._readable.names.with_texts(
                each.split(".") for each in texts
            )
        if isinstance(value, ContextVar):
            self.found.look(f"{where}.get()", partial(value.get, GONE))
        if isinstance(value, ReferenceType):
            self.found.look(f"{where}()", value)
        for part in self._shape_of(value).parts:
            self.found.look(f"{where}.{part}", Attribute(value, part))
        if isinstance(value, CACHES) and not is_installed(package_of(value.__module__)):
            for _, result in entries_of(value)[:MOST_ITEMS]:
                self.found.look(f"{where}()", partial(itself, result))
        if isinstance(value, HOLDING_ITEMS) and len(value) <= MOST_ITEMS:
            items = plain_container(value)
            for item in items.values() if isinstance(items, (dict, *MAPPINGS)) else items:
                if isinstance(item, NUMBERS):
                    self.found.look(where, partial(itself, item))
                elif not is_of_all_models(item):
                    self.found.follow(where, item)

    def _look_in_function(self, function: FunctionType) -> None:
        # It may say the module of a function that it wraps. Code that was made by `exec` has none,
        # and what generates code (torch.fx) lets it call the functions of the user.
        module: str = function.__globals__.get("__name__") or ""
        if (
            module
            and self._readable.is_foreign(module)
            and self._readable.is_foreign(function.__module__)
        ):
            return
        reads = names_in(function.__code__)
        self._readable.names = self._readable.names.with_code(reads)
        of_globals = reads.globals
        if reads.computing:
            texts = (function.__globals__.get(name) for name in reads.globals)
            self._readable.names = self._readable.names.with_texts(texts)
        if reads.computing and not is_installed(package_of(module)):
            self._readable.names = self._readable.names.with_computing(
                name
                for name, owner in reads.computing
                if not names_foreign_module(function.__globals__, owner)
            )
            if reads.names & ANY_GLOBAL:
                of_globals = of_globals.union(data_names(function.__globals__))
                self.found.note_functions(module, function.__globals__)
        self._look_at_globals(function, of_globals)
        self._look_at_parts(function)
        for name in reads.imports:
            self.found.follow(name, sys.modules.get(name))
        if reads.names & BY_STRING:
            self._look_at_strings(function, reads)
        elif not is_installed(package_of(module)):
            self._of_user.append((function, reads))

    def _look_at_strings(self, function: FunctionType, reads: CodeNames) -> None:
        """Look at the variables of the environment, and at the Python modules, that the strings of
        a function may name: its constants, globals, and what it encloses.
        """
        values: list[Any] = [*function.__code__.co_consts, function.__globals__.get("__name__")]
        values += (function.__globals__.get(name) for name in reads.globals)
        values += map(content, function.__closure__ or ())
        strings = (os.fsdecode(each) for each in values if isinstance(each, str | bytes))
        # No name has spaces.
        for text in {each for each in strings if not SPACE.search(each)}:
            self.found.look(f"os.environ[{text!r}]", variable(text))
            self.found.follow(text, sys.modules.get(text))

    def _reads_environment(self) -> bool:
        """Return whether code reads variables of the environment, by any name."""
        found = self.has_found(os.environ) or self.has_found(os.getenv)
        return found or bool(self.names & OF_ENVIRONMENT)

    def _look_at_globals(self, function: FunctionType, named: frozenset[str]) -> None:
        """Look at the globals that a function names."""
        of_module = function.__globals__
        module = str(of_module.get("__name__") or function.__qualname__)
        # Functions of one module share its globals.
        known = self._known_globals.setdefault(id(of_module), set())
        names = (named & of_module.keys()) - known
        known |= names
        self.found.look_among(module, of_module, names, module)
        # What is not there now is found among the builtins, until somebody sets it.
        self.found.note_absent(module, of_module, named)

    def _look_at_parts(self, function: FunctionType) -> None:
        """Look at what a function has besides its names: attributes, code, what it encloses, and
        defaults.
        """
        code, where, attributes = function.__code__, function.__qualname__, vars(function)
        self.found.look_among(where, attributes, self.found_names.among(attributes))
        if REGISTRY in attributes:
            self.found.look(f"{where}.{REGISTRY}", Item(attributes, REGISTRY))
        self.found.code.append((where, Attribute(function, "__code__"), code))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self.found.look(f"{name} in {where}", Attribute(cell, "cell_contents"))
        # Who calls a function without defaults gives all arguments, whatever it has later.
        for part in ("__defaults__", "__kwdefaults__"):
            read = Attribute(function, part)
            if isinstance(read(), tuple) and all(isinstance(each, PLAIN) for each in read()):
                self.found.code.append((f"{part} of {where}", read, read()))
            elif read():
                self.found.look(f"{part} of {where}", read)

    def _look_in_object(self, where: str, value: Any) -> None:
        attributes = attributes_of(value)
        names = {
            *self._readable.named_of(where, value, attributes),
            *self._readable.computed(value, attributes),
        }
        names.update(attributes.keys() & aliased_names(type(value), self.names))
        if is_installed(package_of(type(value).__module__)):
            names -= OF_CACHES
        self.found.look_among(where, attributes, names)
        if isinstance(value, ModuleType):
            if self._readable.is_read_by_text(value):
                self.found.note_functions(value.__name__, attributes)
            return
        self._look_in_class(type(value))
        self._note_identity(where, value, attributes)
        inherited = {
            *self._readable.inherited(type(value).__mro__),
            *self._look_at_read(where, type(value)),
        }
        self.found.note_absent(where, attributes, self.found_names.may_be_absent | inherited)
        self._note_new(where, value, attributes, type(value))
        self._look_in_slots(where, value)

    def _note_identity(self, where: str, value: Any, attributes: Mapping[str, Any]) -> None:
        """Note the class of an object, and the table of its attributes, which may be replaced."""
        self.found.code.append((f"the class of {where}", partial(type, value), type(value)))
        # Another way to read attributes is code of the user, and may give another table each time.
        if type(value).__getattribute__ is PLAIN_READING and attributes_of(value) is attributes:
            read = Attribute(value, "__dict__")
            self.found.code.append((f"{where}.__dict__", read, attributes))

    def _look_in_foreign(self, module: ModuleType) -> None:
        """Note the functions of torch or another foreign package that code names, and look in the
        Python modules of it.
        """
        names = list(self.found_names.among(vars(module)))
        for name in names:
            value = vars(module)[name]
            if isinstance(value, ModuleType):
                self.found.follow(f"{module.__name__}.{name}", value)
        self.found.code += functions_among(module, names)

    def _note_calling(self, kind: type) -> None:
        """Note what runs when a module of this class is called."""
        if id(kind) not in self._called:
            self.found.code += run_by_a_call(kind)
        self._called.add(id(kind))

    def _look_in_slots(self, where: str, value: Any) -> None:
        for slots in self._shape_of(value).slots:
            named = self._readable.named_of(where, value, slots)
            for name in {*named, *self._readable.computed(value, slots)}:
                self.found.look(f"{where}.{name}".lstrip("."), Attribute(value, name))

    def _shape_of(self, value: Any) -> ObjectShape:
        """Return the shape of a value, which is the same for all objects of most classes."""
        kind = type(value)
        if value.__class__ is not kind:  # a proxy says that it is what it stands for
            return ObjectShape.of(value)
        if id(kind) not in self._shapes:
            self._shapes[id(kind)] = ObjectShape.of(value)
        return self._shapes[id(kind)]

    def _look_in_class(self, kind: type) -> None:
        if type(kind) is not type:
            self._look_in_class(type(kind))
        for base in kind.__mro__:
            is_generated = issubclass(base, fx.GraphModule) and base is not fx.GraphModule
            is_own = is_generated or not self._readable.is_foreign(base.__module__)
            if is_own and id(base) not in self._seen:
                self._seen.add(id(base))
                if MATCHED in self.names:
                    self._readable.names = self._readable.names.with_texts(
                        [vars(base).get(MATCHED)]
                    )
                own = self._own(base)
                data = self._readable.computed(base, own)
                names = {*self.found_names.among(own), *operators(base, self.names), *data}
                self.found.look_among(base.__qualname__, own, names, base.__module__)
                self._note_new(base.__qualname__, base, own, base)
                inherited = self._readable.inherited(base.__mro__[1:])
                absent = self.found_names.may_be_absent.union(inherited)
                self.found.note_absent(base.__qualname__, own, absent)
                order = Attribute(base, "__mro__")
                self.found.code.append((f"the bases of {base.__qualname__}", order, order()))

    def _own(self, kind: type) -> Mapping[str, Any]:
        """Return the attributes of a class; the same object each time, by which they are told."""
        return self._attributes.setdefault(id(kind), (kind, vars(kind)))[1]

    def _look_at_read(self, where: str, kind: type) -> set[str]:
        """Look at the attributes of a class that were read of its object at `where` by a name that
        code computes; return those that the object may get itself.
        """
        hidden = set[str]()
        # All that was read is its dict, which has nothing of its class.
        for base in () if self._known.has_read(where, ALL) else kind.__mro__:
            if not self._readable.is_foreign(base.__module__):
                read = [name for name in vars(base) if self._known.has_read(where, name)]
                self.found.look_among(base.__qualname__, self._own(base), read, base.__module__)
                hidden.update(filter(partial(may_be_hidden, base), read))
        return hidden

    def _look_at_making(self, kind: type) -> None:
        """Note what makes objects of a class that code names. No forward makes modules."""
        if not is_of_all_models(kind) and id(kind) not in self._made:
            self._made.add(id(kind))
            for base in kind.__mro__:
                if not self._readable.is_foreign(base.__module__):
                    own = self._own(base)
                    self.found.look_among(base.__qualname__, own, MAKING & own.keys())

    def _note_new(self, where: str, owner: Any, attributes: Mapping[str, Any], kind: type) -> None:
        """Note that `owner` has no attribute yet that such code would find."""
        if self._readable.is_read_by_text(owner):
            known = names_there(attributes, kind)
            read = partial(known.issuperset, attributes)
            self.found.code.append((partial(newest_name, where, attributes, known), read, True))
