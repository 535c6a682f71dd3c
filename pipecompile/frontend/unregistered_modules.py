"""Modules that a forward may call and that the model does not register: a global dropout, a frozen
teacher in a list. The graph has in it what they are, as if the model's own code did what they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from pipecompile.frontend.leaves import is_torch_leaf
from pipecompile.frontend.packages import is_foreign
from pipecompile.graph.attributes import (
    ABSENT,
    TABLES,
    AttributeItems,
    deep_copy,
    is_same_value,
    settings_of,
)

__all__ = ["UnregisteredModules"]


class UnregisteredModules:
    """What such modules are now: their modes, and which parameters, buffers, submodules and hooks
    they have, and which of the tensors require gradients; of those of torch.nn also their settings,
    such as `p` of a dropout.
    """

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self._tensors = [
            (f"{where}.{name}", tensor)
            for where, module in modules
            for name, tensor in chain(
                module.named_parameters(recurse=False), module.named_buffers(recurse=False)
            )
        ]
        self._trained = self._currently_trained()
        self._before, self._items = self._settings(), self._current_items()

    def changed(self) -> str | None:
        """Return what has changed, None if nothing has."""
        if not self._modules:
            return None
        trained = self._currently_trained()
        if trained != self._trained:
            pairs = zip(self._tensors, trained, self._trained, strict=True)
            where = next(where for (where, _), now, before in pairs if now != before)
            return f"whether {where} requires a gradient"
        if self._items.are_the_same():
            return None
        now, before = self._settings(), self._before
        for place in before | now:
            if not is_same_value(before.get(place, ABSENT), now.get(place, ABSENT)):
                index, name = place
                return f"{self._modules[index][0]}.{name}"
        # They are equal, and the next steps compare the objects that are there now.
        self._items = self._current_items()
        return None

    def _currently_trained(self) -> list[bool]:
        return [tensor.requires_grad for _, tensor in self._tensors]

    def _settings(self) -> dict[tuple[int, str], Any]:
        # By index, since all items of a container have its name.
        return {
            (index, name): deep_copy(vars(module)[name])
            for index, (_, module) in enumerate(self._modules)
            for name in ("training", *_names(module))
        }

    def _current_items(self) -> AttributeItems:
        return AttributeItems(
            (module, ("training", *_names(module))) for _, module in self._modules
        )


def _names(module: nn.Module) -> Sequence[str]:
    """Return what counts of a module; what code of the user reads of one is found by its name."""
    is_of_torch = is_torch_leaf(module) or is_foreign(type(module).__module__)
    return settings_of(module) if is_of_torch else TABLES
