"""Which storages live when, while a graph runs forward and backward on real or fake tensors.

Time is counted in ticks, one for the forward of each node and one for its backward. A storage is born in the tick in
which an operator returns it, and dies in the one in which its last holder lets go. Fake tensors show what operators
return and not the scratch that kernels take inside.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.cost_models.protocol import tensors
from pipecompile.profiling.scratch import Scratch

__all__ = ["Ledger", "Life"]


@dataclass
class Life:
    """A storage of `bytes`, from the tick in which it is born to the one in which it dies (None: it outlives all)."""

    bytes: int
    born: int
    died: int | None = None


class Ledger(TorchDispatchMode):
    """Follows every storage that operators return while it is active; `excluded` ones are not counted.

    `rises` is, per tick, the most that lived in it above what lived when it began. In a backward the tick is that of
    the autograd node that runs, which `tick_of` tells from its sequence number (None: as before). `scratch` is, per
    tick, the most that `scratch_of` says of an operator in it.
    """

    def __init__(self, excluded: Iterable[Tensor], scratch_of: Scratch) -> None:
        super().__init__()
        self.scratch: dict[int, int] = {}
        self._scratch_of = scratch_of
        self.lives: list[Life] = []
        self.rises: dict[int, int] = {}
        self.tick_of: Callable[[int], int | None] = lambda sequence_number: None
        self._excluded: set[int] = set()
        self.exclude(excluded)
        self._known: dict[int, tuple[Any, int]] = {}
        self.tick = self._began = self._now = 0

    def exclude(self, values: Iterable[Tensor]) -> None:
        """Does not count the storages of `values`, which must outlive this."""
        self._excluded |= {value.untyped_storage()._cdata for value in values}

    def enter(self, tick: int) -> None:
        """All that follows happens in `tick`."""
        self.tick, self._began = tick, self._now
        self.rises.setdefault(tick, 0)

    def indices(self, values: Iterable[Tensor]) -> tuple[int, ...]:
        """The storages of `values`, as indices into `lives`: distinct, in order, without the excluded ones."""
        return tuple(dict.fromkeys(self._indices(values)))

    def _indices(self, values: Iterable[Tensor]) -> Iterator[int]:
        for value in values:
            storage = value.untyped_storage()
            if storage._cdata not in self._excluded:
                known = self._known.get(storage._cdata)
                yield known[1] if known is not None else self._bear(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        if node is not None:
            tick = self.tick_of(node._sequence_nr())
            if tick is not None and tick != self.tick:
                self.enter(tick)
        result = func(*args, **(kwargs or {}))
        self.indices(tensors(result))
        if scratch := self._scratch_of(func, args):
            self.scratch[self.tick] = max(self.scratch.get(self.tick, 0), scratch)
        return result

    def _bear(self, storage: Any) -> int:
        index = len(self.lives)
        life = Life(storage.nbytes(), self.tick)
        self.lives.append(life)
        self._now += life.bytes
        self.rises[self.tick] = max(self.rises.get(self.tick, 0), self._now - self._began)
        self._known[storage._cdata] = weakref.ref(storage, self._burial(storage._cdata, life)), index
        return index

    def _burial(self, key: int, life: Life) -> Callable[[object], None]:
        def bury(_: object) -> None:
            life.died = self.tick
            self._now -= life.bytes
            del self._known[key]

        return bury
