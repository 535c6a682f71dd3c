"""The layers of a model, found from the paths of its modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from pipecompile.errors import InputError
from pipecompile.ir.module_paths import block_of

__all__ = ["LayerList", "ancestors", "find_layers", "lies_in"]


@dataclass(frozen=True)
class LayerList:
    """The layers of a model and its MTP layers, by the paths of their modules, in order.

    `container` is the path of the list of layers: transformer.h for transformer.h.0 and so on.
    """

    container: str
    layers: tuple[str, ...]
    mtp: tuple[str, ...] = ()

    def layer_of(self, module: str) -> tuple[str, int] | None:
        """Return the symbol and number of the layer that `module` lies in: ("t", 3); None for a
        module outside of them.
        """
        for symbol, paths in (("t", self.layers), ("m", self.mtp)):
            for index, path in enumerate(paths):
                if lies_in(module, path):
                    return symbol, index
        return None

    def __str__(self) -> str:
        """Return the range of layers for messages: transformer.h.0-11."""
        return f"{self.layers[0]}-{self.layers[-1].rpartition('.')[2]}"


def lies_in(module: str, path: str) -> bool:
    """Return whether a module is the one at `path` or lies in it."""
    return not path or module == path or module.startswith(f"{path}.")


def ancestors(module: str) -> list[str]:
    """Return a path and those of the modules around it, the longest first: a.b, a and ""."""
    parts = module.split(".") if module else []
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def find_layers(ns_by_module: Mapping[str, int], given: str | None = None) -> LayerList:
    """Return the layers of a model: those in the container `given`, or in the list of blocks that
    takes more than half of the time of all lists.

    `ns_by_module` has the time of each module's own nodes. InputError if there are no layers, or if
    several lists may be meant.
    """
    lists = _lists_of_blocks(ns_by_module)
    # Layers that predict further tokens have lists of their own, and symbols too.
    mtp = [name for name in lists if re.search(r"mtp|nextn", name.rpartition(".")[2].lower())]
    if given is not None:
        layers = _numbered(ns_by_module, given.rstrip("."))
        if not layers:
            raise InputError(
                f"layers={given!r}, but no module is numbered there; choose from {_shown(lists)}"
            )
        container = given.rstrip(".")
    else:
        container = _main_list({name: ns for name, ns in lists.items() if name not in mtp})
        layers = _numbered(ns_by_module, container)
    extra = [path for name in mtp if name != container for path in _numbered(ns_by_module, name)]
    return LayerList(container, layers, tuple(extra))


def _lists_of_blocks(ns_by_module: Mapping[str, int]) -> dict[str, int]:
    """Return the time in each outermost list of numbered modules, by its path."""
    lists: dict[str, int] = {}
    for path, ns in ns_by_module.items():
        # The outermost numbered module: of layers.0.experts.3 it is layers.0.
        block = block_of(path)
        if block.rpartition(".")[2].isdigit():
            container = block.rpartition(".")[0]
            lists[container] = lists.get(container, 0) + ns
    return lists


def _main_list(lists: Mapping[str, int]) -> str:
    if not lists:
        raise InputError(
            "the model has no numbered modules that could be its layers; write a layout of modules "
            "for each stage (json)"
        )
    # By time and not by the number of modules: a list of norms may be as long as that of layers.
    container = max(lists, key=lambda name: lists[name])
    # An encoder beside a decoder: nobody could tell which of them a layout counts.
    if 2 * lists[container] <= sum(lists.values()) and len(lists) > 1:
        raise InputError(
            f"the model has several lists of layers: {_shown(lists)}; name one (in Python "
            f"layers={container!r}, on the command line --layers {container})"
        )
    return container


def _numbered(modules: Iterable[str], container: str) -> tuple[str, ...]:
    """Return the paths of the numbered modules in a container, in the order of their numbers."""
    start = f"{container}." if container else ""
    # As numbers, so that 10 comes after 9.
    numbers = {
        int(number)
        for path in modules
        if path.startswith(start) and (number := path[len(start) :].partition(".")[0]).isdigit()
    }
    return tuple(f"{start}{number}" for number in sorted(numbers))


def _shown(lists: Collection[str]) -> str:
    return ", ".join(name or "the numbered modules of the model itself" for name in lists) or "none"
