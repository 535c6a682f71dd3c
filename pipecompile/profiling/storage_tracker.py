"""The storage tracker: which storages live when, while a graph runs forward and backward.

The tensors may be real or fake. Time is counted in ticks: one for the forward of each node, and one
for its backward. A storage is born in the tick in which an operator returns it, and dies in the
tick in which its last holder releases it:

    tick                 0             1          2              3
                         linear        relu       relu's B       linear's B
    linear's result      ██████████████████                                      born 0, died 1
    relu's result                      ████████████████                          born 1, died 2

Fake tensors show what operators return, but not the workspace that kernels allocate inside.

Where gradients of several readers meet, autograd adds to the first one in place if nobody else
holds it (can_accumulate_inplace in torch/csrc/autograd/input_buffer.cpp), but never with fake
tensors. The tracker therefore treats such a gradient as if it became the sum. It treats the
gradient of a parameter with several readers likewise, as these may come to be in different stages.
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
from pipecompile.graph.side_effects import versions_of_lists
from pipecompile.profiling.kernel_workspace import Workspace, hidden_bytes

__all__ = ["StorageLiveRange", "StorageTracker"]

aten = torch.ops.aten
_DRAWS = (aten.bernoulli_.float, aten.bernoulli.default, aten.bernoulli.p)
_SCALINGS = (aten.div_.Scalar, aten.mul_.Scalar)


@dataclass
class StorageLiveRange:
    """A storage of `bytes` from the tick in which it is born to the one in which it dies.

    `died` is None while it lives. `read_in` are the ticks after the first whose autograd nodes take
    it as an argument. `is_sum` marks a sum of gradients of several readers. `continues` is the
    index of the live range to which the others were added in place.
    """

    bytes: int
    born: int
    died: int | None = None
    read_in: set[int] = field(default_factory=set)
    is_sum: bool = False
    continues: int | None = None


class StorageTracker(TorchDispatchMode):
    """Follows every storage that operators return while it is active, except for excluded ones.

    Results, each by tick or by index into `live_ranges`:

        `peaks`         by tick the most bytes that lived in it, above what lived when it began;
                        without sums with a gradient of another tick, which are made at its end
        `workspace`       by tick the most bytes that `workspace_of` says of an operator in it
        `masks`         indices of storages whose elements are zero or one constant: drawn as such,
                        and only scaled since
        `copies`        indices of storages that were made by copying another one
        `kernel_count`  how many operators have computed something, so without views

    In a backward the tick is that of the autograd node that runs: `tick_of` returns it for the
    node's sequence number, or None for the tick as before. `shared_shapes` are the shapes of
    parameters with several readers.
    """

    def __init__(self, excluded: Iterable[Tensor], workspace_of: Workspace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_ranges: list[StorageLiveRange] = []
        self.peaks: dict[int, int] = {}
        self.workspace: dict[int, int] = {}
        self.masks: set[int] = set()
        self.copies: set[int] = set()
        self.kernel_count = 0
        self.tick_of: Callable[[int], int | None] = lambda sequence_number: None
        self.shared_shapes: set[torch.Size] = set()
        self.tick = 0
        self._workspace_of = workspace_of
        self._bytes_at_tick_begin = self._live_bytes = 0
        # By the address of a storage: a weak reference, which calls back when the storage dies, and
        # the index of its live range.
        self._tracked: dict[int, tuple[Any, int]] = {}
        self._excluded: set[int] = set()
        self.exclude(excluded)
        # The sequence number of the autograd node that runs, and by live range that of the node
        # that made the storage; None outside of a backward.
        self._current_node: int | None = None
        self._makers: list[int | None] = []
        self._continued: set[int] = set()  # addresses of storages that became part of a sum
        # Counted, since how many holders torch itself has is no business of this code.
        self._holders_if_alone = _holders(torch.empty(1))

    def exclude(self, values: Iterable[Tensor]) -> None:
        """Do not count the storages of `values`, which must outlive the tracker."""
        self._excluded |= {value.untyped_storage()._cdata for value in values}

    def enter(self, tick: int) -> None:
        """Begin `tick`: all that follows happens in it."""
        self.tick, self._bytes_at_tick_begin = tick, self._live_bytes
        self.peaks.setdefault(tick, 0)

    def indices(self, values: Iterable[Tensor]) -> tuple[int, ...]:
        """Return the storages of `values` as indices into `live_ranges`.

        They are distinct and in order, without excluded ones. A storage that is not tracked yet is
        born now.
        """
        return tuple(dict.fromkeys(self._indices(values)))

    def tracked(self, values: Iterable[Tensor]) -> Iterator[int]:
        """Yield the indices of those storages of `values` that are tracked already."""
        for value in values:
            index = self._index_of(value)
            if index is not None:
                yield index

    def _indices(self, values: Iterable[Tensor]) -> Iterator[int]:
        for value in values:
            storage = value.untyped_storage()
            if storage._cdata not in self._excluded:
                index = self._index_of(value)
                yield self._begin(storage) if index is None else index

    def _index_of(self, value: Tensor) -> int | None:
        entry = self._tracked.get(value.untyped_storage()._cdata)
        return None if entry is None else entry[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = torch._C._current_autograd_node()
        self._current_node = None if node is None else node._sequence_nr()
        if node is not None:
            # Autograd decides the order of backwards, so the running node tells the tick.
            tick = self.tick_of(node._sequence_nr())
            if tick is not None and tick != self.tick:
                self.enter(tick)
            self._note_reads(args)
        # Checked before the operator runs, which then holds the summand too.
        summand = self._summand(func, args)
        becomes_sum = summand is not None and self._becomes_sum(args[0])
        with versions_of_lists(func, args, kwargs):
            result = func(*args, **(kwargs or {}))
        if summand is not None:
            address = args[0].untyped_storage()._cdata
            self._add_sum(address, summand, result.untyped_storage(), becomes_sum)
        # What has no new storage is a view, or works in place.
        count = len(self.live_ranges)
        if hidden := hidden_bytes(func, args, result):
            self._begin(hidden[0].untyped_storage(), hidden[1])
        results = self.indices(tensor_leaves(result))
        if func is aten.clone.default:
            self.copies.update(results)
        self._note_mask(func, args, result)
        self.kernel_count += len(self.live_ranges) > count or func._schema.is_mutable
        taken = self._workspace_of(func, args, result)
        self.workspace[self.tick] = max(self.workspace.get(self.tick, 0), taken)
        return result

    def _note_reads(self, arguments: Any) -> None:
        for index in self.tracked(tensor_leaves(arguments)):
            if self.live_ranges[index].born < self.tick:
                self.live_ranges[index].read_in.add(self.tick)

    def _note_mask(self, func: Any, arguments: Any, result: Any) -> None:
        """Note a drawn mask, or that a write other than scaling has made it none."""
        if func in _DRAWS:
            self.masks.update(self.indices([result]))
        elif func._schema.is_mutable and func not in _SCALINGS:
            self.masks.difference_update(self.indices(tensor_leaves(arguments)))

    def _summand(self, func: Any, arguments: Any) -> int | None:
        """Return the index of the first gradient if `func` is autograd's sum of two gradients.

        Autograd adds the gradients from two nodes when the second one has run. So in such a sum the
        first argument was made by another autograd node than the one that runs.
        """
        summands = arguments[:2]
        # A number may be added, also before a tensor.
        if func is not aten.add.Tensor or not all(isinstance(each, Tensor) for each in summands):
            return None
        first, second = map(self._index_of, summands)
        if first is None or second is None:
            return None
        makers = self._makers[first], self._makers[second]
        return None if None in makers or makers[0] == self._current_node else first

    def _becomes_sum(self, value: Tensor) -> bool:
        """Return whether autograd would add in place to `value` in a run with real tensors."""
        return _holders(value) == self._holders_if_alone or value.shape in self.shared_shapes

    def _add_sum(self, address: int, summand: int, storage: Any, becomes_sum: bool) -> None:
        """Track the sum in `storage` of another gradient and `summand`, which is at `address`.

        A sum with a gradient of an earlier tick gets a live range of its own. Within one tick, a
        gradient that becomes the sum just goes on.
        """
        first = self.live_ranges[summand]
        born_in_this_tick = first.born == self.tick
        if becomes_sum:
            self._continued.add(address)
        if becomes_sum and born_in_this_tick:
            self._track(storage, summand)
        elif becomes_sum:
            # The bytes stay: they pass from the gradient to the sum.
            first.died = self.tick
            total = StorageLiveRange(first.bytes, self.tick, is_sum=True, continues=summand)
            self._append(storage, total)
        elif not born_in_this_tick:
            self._live_bytes += storage.nbytes()
            self._append(storage, StorageLiveRange(storage.nbytes(), self.tick, is_sum=True))

    def _begin(self, storage: Any, size: int | None = None) -> int:
        """Begin the live range of `storage` and return its index."""
        live_range = StorageLiveRange(storage.nbytes() if size is None else size, self.tick)
        self._live_bytes += live_range.bytes
        risen = self._live_bytes - self._bytes_at_tick_begin
        self.peaks[self.tick] = max(self.peaks.get(self.tick, 0), risen)
        return self._append(storage, live_range)

    def _append(self, storage: Any, live_range: StorageLiveRange) -> int:
        self.live_ranges.append(live_range)
        self._makers.append(self._current_node)
        index = len(self.live_ranges) - 1
        self._track(storage, index)
        return index

    def _track(self, storage: Any, index: int) -> None:
        on_death = self._death_callback(storage._cdata, index)
        self._tracked[storage._cdata] = weakref.ref(storage, on_death), index

    def _death_callback(self, address: int, index: int) -> Callable[[object], None]:
        def end(_: object) -> None:
            # At once, since the next storage may get the same
            # address, and would be taken for this one.
            del self._tracked[address]
            if address in self._continued:
                self._continued.remove(address)  # its bytes live on in the sum
                return
            self.live_ranges[index].died = self.tick
            self._live_bytes -= self.live_ranges[index].bytes

        return end


def _holders(value: Tensor) -> int:
    """Return how many hold the storage of `value`, itself included."""
    return int(torch._C._storage_Use_Count(value.untyped_storage()._cdata))
