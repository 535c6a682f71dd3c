"""Which storages live when, while a graph runs forward and backward on real or fake tensors.

Time is counted in ticks, one for the forward of each node and one for its backward. A storage is born in the tick in
which an operator returns it, and dies in the one in which its last holder lets go. Fake tensors show what operators
return and not the scratch that kernels take inside.

Where gradients of several readers meet, autograd adds to the first in place if nobody else holds it, but not with fake
tensors (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp). What nobody else holds is therefore taken to
go over into the sum. So is the gradient of a parameter that several nodes read, as these may come to lie in stages
apart.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.profiling.kernel_scratch import Scratch, hidden_bytes

__all__ = ["StorageTracker", "StorageLife"]

aten = torch.ops.aten
_DRAWS = (aten.bernoulli_.float, aten.bernoulli.default, aten.bernoulli.p)
_SCALINGS = (aten.div_.Scalar, aten.mul_.Scalar)


@dataclass
class StorageLife:
    """A storage of `bytes`, from the tick in which it is born to the one in which it dies (None: it outlives all).

    `read` are the ticks after the first whose autograd nodes take it. A `sum` is one of gradients of several readers;
    `continues` is the life, as an index, to which others were added in place to make it.
    """

    bytes: int
    born: int
    died: int | None = None
    read: set[int] = field(default_factory=set)
    sum: bool = False
    continues: int | None = None


class StorageTracker(TorchDispatchMode):
    """Follows every storage that operators return while it is active; `excluded` ones are not counted.

    `rises` is, per tick, the most that lived in it above what lived when it began, without sums of
    gradients that came from other ticks: they are made when a node is done. In a backward the tick
    is that of the autograd node that runs, which `tick_of` tells from its sequence number (None: as
    before). `scratch` is, per tick, the most that `scratch_of` says of an operator in it. `masks`
    are lives, as indices, whose elements are zero or one constant: drawn as such, and at most
    scaled since; `copies` are made by copying another. `kernels` counts operators that compute,
    views aside. `shared` are the shapes of parameters with several readers.
    """

    def __init__(self, excluded: Iterable[Tensor], scratch_of: Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scratch: dict[int, int] = {}
        self.kernels = 0
        self.masks: set[int] = set()
        self.copies: set[int] = set()
        self._scratch_of = scratch_of
        self.lives: list[StorageLife] = []
        self.rises: dict[int, int] = {}
        self.tick_of: Callable[[int], int | None] = lambda sequence_number: None
        self._excluded: set[int] = set()
        self.exclude(excluded)
        self._known: dict[int, tuple[Any, int]] = {}
        self._makers: list[
            int | None
        ] = []  # of each storage the sequence number of the autograd node that made it
        self._maker: int | None = None
        self._handed_on: set[int] = set()
        self._alone = _holders(torch.empty(1))
        self.shared: set[torch.Size] = set()
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

    def known(self, values: Iterable[Tensor]) -> Iterator[int]:
        """The storages of `values` that are followed, as indices into `lives`."""
        found = (self._known.get(value.untyped_storage()._cdata) for value in values)
        return (known[1] for known in found if known is not None)

    def _indices(self, values: Iterable[Tensor]) -> Iterator[int]:
        for value in values:
            storage = value.untyped_storage()
            if storage._cdata not in self._excluded:
                known = self._known.get(storage._cdata)
                yield known[1] if known is not None else self._bear(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        self._maker = None if node is None else node._sequence_nr()
        if node is not None:
            tick = self.tick_of(node._sequence_nr())
            if tick is not None and tick != self.tick:
                self.enter(tick)
            self._read(args)
        summand = self._summand(func, args)
        in_place = summand is not None and self._lives_on(args[0])
        result = func(*args, **(kwargs or {}))
        if summand is not None:
            self._sum_up(
                args[0].untyped_storage()._cdata, summand, result.untyped_storage(), in_place
            )
        made = len(self.lives)
        if hidden := hidden_bytes(func, args, result):
            self._bear(hidden[0].untyped_storage(), hidden[1])
        made_now = self.indices(tensor_leaves(result))
        self.copies.update(made_now if func is aten.clone.default else ())
        self._note_mask(func, args, result)
        self.kernels += len(self.lives) > made or func._schema.is_mutable
        self._note_scratch(func, args, result)
        return result

    def _note_scratch(self, func: Any, arguments: Any, result: Any) -> None:
        taken = self._scratch_of(func, arguments, result)
        self.scratch[self.tick] = max(self.scratch.get(self.tick, 0), taken)

    def _read(self, arguments: Any) -> None:
        for value in tensor_leaves(arguments):
            known = self._known.get(value.untyped_storage()._cdata)
            if known is not None and self.lives[known[1]].born < self.tick:
                self.lives[known[1]].read.add(self.tick)

    def _note_mask(self, func: Any, arguments: Any, result: Any) -> None:
        """A draw of zeros and ones makes a mask, in place or anew; what else writes to a storage makes it none."""
        if func in _DRAWS:
            self.masks.update(self.indices([result]))
        elif func._schema.is_mutable and func not in _SCALINGS:
            self.masks.difference_update(self.indices(tensor_leaves(arguments)))

    def _summand(self, func: Any, arguments: Any) -> int | None:
        """The life of the first gradient, made by another autograd node, to which the one that runs adds its own."""
        if func is not torch.ops.aten.add.Tensor or not isinstance(arguments[1], Tensor):
            return None
        first, second = (self._known.get(value.untyped_storage()._cdata) for value in arguments[:2])
        if first is None or second is None:
            return None
        makers = self._makers[first[1]], self._makers[second[1]]
        return None if None in makers or makers[0] == self._maker else first[1]

    def _lives_on(self, value: Tensor) -> bool:
        """Whether `value` lives on in the sum that is made of it."""
        return _holders(value) == self._alone or value.shape in self.shared

    def _sum_up(self, key: int, summand: int, storage: Any, in_place: bool) -> None:
        """The first summand, which lies under `key`, is part of a sum in `storage`; in one tick that is no event."""
        born_here = self.lives[summand].born == self.tick
        if in_place:
            self._handed_on.add(key)
        if in_place and born_here:
            self._know(storage, summand)
        elif in_place:
            self.lives[summand].died = self.tick
            self._add(
                storage, StorageLife(self.lives[summand].bytes, self.tick, sum=True, continues=summand)
            )
        elif not born_here:
            self._now += storage.nbytes()
            self._add(storage, StorageLife(storage.nbytes(), self.tick, sum=True))

    def _bear(self, storage: Any, size: int | None = None) -> int:
        life = StorageLife(storage.nbytes() if size is None else size, self.tick)
        self._now += life.bytes
        self.rises[self.tick] = max(self.rises.get(self.tick, 0), self._now - self._began)
        return self._add(storage, life)

    def _add(self, storage: Any, life: StorageLife) -> int:
        """The index of `life`, which is that of `storage`."""
        self.lives.append(life)
        self._makers.append(self._maker)
        self._know(storage, len(self.lives) - 1)
        return len(self.lives) - 1

    def _know(self, storage: Any, index: int) -> None:
        self._known[storage._cdata] = (
            weakref.ref(storage, self._burial(storage._cdata, index)),
            index,
        )

    def _burial(self, key: int, index: int) -> Callable[[object], None]:
        def bury(_: object) -> None:
            del self._known[key]
            if key in self._handed_on:
                self._handed_on.remove(key)
                return
            self.lives[index].died = self.tick
            self._now -= self.lives[index].bytes

        return bury


def _holders(value: Tensor) -> int:
    """How many hold the storage of `value`, itself among them."""
    return int(torch._C._storage_Use_Count(value.untyped_storage()._cdata))
