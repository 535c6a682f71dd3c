"""Which storages live when, while a graph runs forward and backward on real or fake tensors.

Time is counted in ticks, one for the forward of each node and one for its backward. A storage is born in the tick in
which an operator returns it, and dies in the one in which its last holder lets go. Fake tensors show what operators
return and not the scratch that kernels take inside.

Where gradients of several readers meet, autograd adds to the first in place if nobody else holds it, but not with fake
tensors (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp). What is let go as soon as it is added to
something is therefore taken to live on in the sum.
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
        super().__init__()  # type: ignore[no-untyped-call]
        self.scratch: dict[int, int] = {}
        self._scratch_of = scratch_of
        self.lives: list[Life] = []
        self.rises: dict[int, int] = {}
        self.tick_of: Callable[[int], int | None] = lambda sequence_number: None
        self._excluded: set[int] = set()
        self.exclude(excluded)
        self._known: dict[int, tuple[Any, int]] = {}
        self._makers: list[int | None] = []  # of each storage the sequence number of the autograd node that made it
        self._maker: int | None = None
        self._sum: tuple[int, Any] | None = None
        self._last_dead: tuple[int, int] | None = None
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
        self._settle()
        node = torch._C._current_autograd_node()
        self._maker = None if node is None else node._sequence_nr()
        if node is not None:
            tick = self.tick_of(node._sequence_nr())
            if tick is not None and tick != self.tick:
                self.enter(tick)
        result = func(*args, **(kwargs or {}))
        if node is not None and func is torch.ops.aten.add.Tensor and self._is_earlier(args[0]):
            self._sum = args[0].untyped_storage()._cdata, result.untyped_storage()
        else:
            self.indices(tensors(result))
        if scratch := self._scratch_of(func, args, result):
            self.scratch[self.tick] = max(self.scratch.get(self.tick, 0), scratch)
        return result

    def _is_earlier(self, value: Tensor) -> bool:
        """Whether another autograd node has made `value`."""
        known = self._known.get(value.untyped_storage()._cdata)
        return known is not None and self._makers[known[1]] != self._maker

    def _settle(self) -> None:
        """A sum of gradients lives in its first summand if that one was let go, else by itself."""
        if self._sum is None:
            return
        (summand, storage), self._sum = self._sum, None
        if self._last_dead is None or self._last_dead[0] != summand:
            self._bear(storage)
            return
        index = self._last_dead[1]
        self.lives[index].died = None
        self._now += self.lives[index].bytes
        self._know(storage, index)

    def _bear(self, storage: Any) -> int:
        index = len(self.lives)
        life = Life(storage.nbytes(), self.tick)
        self.lives.append(life)
        self._now += life.bytes
        self.rises[self.tick] = max(self.rises.get(self.tick, 0), self._now - self._began)
        self._makers.append(self._maker)
        self._know(storage, index)
        return index

    def _know(self, storage: Any, index: int) -> None:
        self._known[storage._cdata] = weakref.ref(storage, self._burial(storage._cdata, index)), index

    def _burial(self, key: int, index: int) -> Callable[[object], None]:
        def bury(_: object) -> None:
            self.lives[index].died = self.tick
            self._now -= self.lives[index].bytes
            self._last_dead = key, index
            del self._known[key]

        return bury
