"""The one memory model: (storages, order of actions, recompute) → bytes by kind.

A stage is an interval of a topological order, so what it holds is a function of two positions. The model is that
of the distributed runtime: for each microbatch in flight a stage keeps the storages that its backward needs and
the outputs it produced; the receive buffers of all microbatches exist from the first step on.

Each figure comes twice. `expected` counts the bytes asked for; `bound` rounds each storage up to the allocator's
block and doubles the workspace. That the bound holds on a given device is not proven by this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.schedule import BACKWARDS, Action, Kind
from pipecompile.ir.serde import NonNegative, Value

__all__ = [
    "BLOCK_BYTES",
    "Amount",
    "Footprint",
    "Layout",
    "RankMemory",
    "activation_curve",
    "buffers",
    "changes",
    "floors",
    "rank_memory",
]

BLOCK_BYTES = 512  # kMinBlockSize of c10/cuda/CUDACachingAllocator


class Amount(Value, frozen=True, kw_only=True):
    """Bytes twice: what is asked for, and what an allocator may take for it."""

    expected: NonNegative
    bound: NonNegative

    def __add__(self, other: Amount) -> Amount:
        return Amount(expected=self.expected + other.expected, bound=self.bound + other.bound)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(expected=self.expected - other.expected, bound=self.bound - other.bound)

    def __neg__(self) -> Amount:
        return ZERO - self

    def __mul__(self, times: int) -> Amount:
        return Amount(expected=self.expected * times, bound=self.bound * times)

    @staticmethod
    def of(sizes: Iterable[int]) -> Amount:
        """The sum of storages of these sizes."""
        sizes = tuple(sizes)
        return Amount(expected=sum(sizes), bound=sum(map(_rounded, sizes)))


ZERO = Amount(expected=0, bound=0)
Size = TypeVar("Size", int, Amount)


class Footprint(Value, frozen=True, kw_only=True):
    """What one stage holds: resident, for a microbatch, and while it computes.

    `kept` is held from a microbatch's forward to its backward; when the stage recomputes, only `outputs` of it are.
    `received` and `received_gradients` are the buffers of one microbatch on the two sides of the stage.
    """

    parameters: Amount
    gradients: Amount
    kept: Amount
    outputs: Amount
    received: Amount
    received_gradients: Amount
    workspace: Amount

    def bound(self, *, in_flight: int, microbatches: int, recompute: bool) -> int:
        """The bound of a rank that holds this stage alone, with so many microbatches between forward and backward."""
        resident = self.parameters + self.gradients + self.workspace
        activations = self.kept + self.outputs * (in_flight - 1) if recompute else self.kept * in_flight
        buffers = (self.received + self.received_gradients) * microbatches
        return (resident + activations + buffers).bound


class RankMemory(Value, frozen=True, kw_only=True):
    """The peak of one rank by kind. Kinds peak at different moments: the true peak is at most their sum."""

    parameters: Amount
    gradients: Amount
    optimizer: Amount
    activations: Amount
    buffers: Amount
    workspace: Amount

    @property
    def total(self) -> Amount:
        """All kinds together."""
        kinds = (self.parameters, self.gradients, self.optimizer, self.activations, self.buffers, self.workspace)
        return sum(kinds, ZERO)


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage by position: produced in unit `first`, wanted until `last`, saved for backward from `saved` on."""

    first: int
    last: int
    saved: int | None
    bytes: int

    def kept_by(self, start: int, stop: int) -> bool:
        """Whether the stage [start, stop) keeps it: it produces it, and saves it or passes it on."""
        return start <= self.first < stop and (self.last >= stop or (self.saved is not None and self.saved < stop))


@dataclass(frozen=True)
class Layout:
    """A cost graph laid out in a topological order of units (nodes that stay together), ready to be cut."""

    graph: CostGraph
    units: tuple[tuple[str, ...], ...]

    @cached_property
    def position(self) -> dict[str, int]:
        """The unit of each node."""
        return {name: index for index, unit in enumerate(self.units) for name in unit}

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int, int], ...]:
        """Per tensor that crosses between units: producer, last consumer, bytes of value and of gradient."""
        rows = ((*self._reach(t.producer, t.consumers), t.bytes, t.gradient_bytes) for t in self.graph.tensors)
        return tuple(row for row in rows if row[1] > row[0])

    def _reach(self, producer: str, consumers: Iterable[str]) -> tuple[int, int]:
        first = self.position[producer]
        return first, max((self.position[name] for name in consumers), default=first)

    @cached_property
    def storages(self) -> tuple[_Storage, ...]:
        """Every storage that a stage may keep."""
        saved: dict[int, int] = {}
        for node in self.graph.nodes:
            for storage in node.saved:
                saved[storage] = min(saved.get(storage, len(self.units)), self.position[node.name])
        first, last = dict(saved), dict(saved)
        for tensor in self.graph.tensors:
            if tensor.storage is not None:
                begin, end = self._reach(tensor.producer, tensor.consumers)
                first[tensor.storage] = min(first.get(tensor.storage, begin), begin)
                last[tensor.storage] = max(last.get(tensor.storage, end), end)
        return tuple(_Storage(first[s], last[s], saved.get(s), self.graph.storages[s]) for s in sorted(first))

    @cached_property
    def uses(self) -> dict[str, tuple[int, ...]]:
        """Per parameter the units that read it, in order."""
        found: dict[str, set[int]] = {}
        for node in self.graph.nodes:
            for name in node.parameters:
                found.setdefault(name, set()).add(self.position[node.name])
        return {name: tuple(sorted(places)) for name, places in sorted(found.items())}

    @cached_property
    def anonymous(self) -> tuple[tuple[int, int], ...]:
        """(unit, bytes) of nodes that state parameter bytes without naming parameters."""
        nodes = (node for node in self.graph.nodes if not node.parameters and node.parameter_bytes)
        return tuple((self.position[node.name], node.parameter_bytes) for node in nodes)

    @cached_property
    def workspaces(self) -> tuple[int, ...]:
        """Per unit the largest workspace of its nodes, bytes."""
        by_name = self.graph.by_name
        return tuple(max(by_name[name].workspace_bytes for name in unit) for unit in self.units)

    def footprint(self, start: int, stop: int) -> Footprint:
        """What the stage made of units start … stop − 1 holds."""
        read = [name for name, places in self.uses.items() if any(start <= p < stop for p in places)]
        parameters = [self.graph.parameter_by_name[name] for name in read]
        anonymous = [size for place, size in self.anonymous if start <= place < stop]
        largest = max(self.workspaces[start:stop], default=0)
        return Footprint(
            parameters=Amount.of([*(p.bytes for p in parameters), *anonymous]),
            gradients=Amount.of([*(p.bytes for p in parameters if p.trainable), *anonymous]),
            kept=Amount.of(s.bytes for s in self.storages if s.kept_by(start, stop)),
            outputs=Amount.of(s.bytes for s in self.storages if start <= s.first < stop <= s.last),
            received=Amount.of(size for first, last, size, _ in self.spans if first < start <= last),
            received_gradients=Amount.of(size for first, last, _, size in self.spans if first < stop <= last),
            workspace=Amount(expected=largest, bound=2 * _rounded(largest)),
        )


def buffers(graph: CostGraph, microbatches: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """As `Footprint.bound` counts them: buffers of values and of gradients by producer, workspace by node."""
    arriving = {tensor.producer: microbatches * _rounded(tensor.bytes) for tensor in graph.tensors}
    returning = {tensor.producer: microbatches * _rounded(tensor.gradient_bytes) for tensor in graph.tensors}
    return arriving, returning, {node.name: 2 * _rounded(node.workspace_bytes) for node in graph.nodes}


def floors(graph: CostGraph, *, recompute: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes per node, resident and per microbatch in flight, whose sums no stage's bound is below.

    A parameter counts in equal parts for the nodes that read it; a saved storage for its producer, whose stage keeps
    it until the backward: as often as microbatches are in flight, or once if stages recompute.
    """
    resident, saved = ({node.name: 0 for node in graph.nodes} for _ in range(2))
    readers: dict[str, list[str]] = {}
    savers: dict[int, set[str]] = {}
    for node in graph.nodes:
        if not node.parameters:
            resident[node.name] += 2 * _rounded(node.parameter_bytes)
        for name in node.parameters:
            readers.setdefault(name, []).append(node.name)
        for storage in node.saved:
            savers.setdefault(storage, set()).add(node.name)
    for name, nodes in readers.items():
        parameter = graph.parameter_by_name[name]
        for reader in nodes:
            resident[reader] += _rounded(parameter.bytes) * (1 + parameter.trainable) // len(nodes)
    kept = resident if recompute else saved
    for producer, storage in _roots(graph, savers):
        kept[producer] += _rounded(graph.storages[storage])
    return resident, saved


def _roots(graph: CostGraph, savers: Mapping[int, set[str]]) -> Iterator[tuple[str, int]]:
    """Saved storages with the node that all others that make a view of them or save them come after."""
    tensors: dict[int, list[Tensor]] = {}
    for tensor in graph.tensors:
        if tensor.storage is not None:
            tensors.setdefault(tensor.storage, []).append(tensor)
    for storage, (first, *views) in tensors.items():
        after = {first.producer, *first.consumers}
        for view in views:
            after |= set(view.consumers) if view.producer in after else {""}
        if storage in savers and savers[storage] <= after and "" not in after:
            yield first.producer, storage
    for storage, nodes in savers.items():
        if storage not in tensors and len(nodes) == 1:  # what a node saves for itself, such as a mask
            yield next(iter(nodes)), storage


def changes(*, kept: Size, recomputed: Size, between: Size) -> dict[Kind, Size]:
    """What each action of a microbatch adds to the bytes its stage holds of it.

    `kept` from the forward on and `recomputed` from the recompute on, until the backward; `between` of them stay from
    the gradients of the inputs to those of the weights.
    """
    return {
        Kind.FORWARD: kept,
        Kind.RECOMPUTE: recomputed,
        Kind.BACKWARD: -kept - recomputed,
        Kind.BACKWARD_INPUT: between - kept - recomputed,
        Kind.BACKWARD_WEIGHT: -between,
    }


def _rounded(size: int) -> int:
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


def rank_memory(stages: dict[int, Footprint], row: Sequence[Action], *, microbatches: int) -> RankMemory:
    """The peak of a rank that holds `stages` (by index) and performs `row`; no PyTorch, no simulation.

    Activations depend on the rank's own order alone. A backward frees what its forward or recompute kept.
    """
    held = [stages[index] for index in sorted(stages)]
    parameters = sum((stage.parameters for stage in held), ZERO)
    gradients = sum((stage.gradients for stage in held), ZERO)
    buffers = sum((stage.received + stage.received_gradients for stage in held), ZERO)
    largest = max((stage.workspace for stage in held), key=lambda amount: amount.bound)
    return RankMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=ZERO,  # no optimizer is named yet: reports say that its state is not counted
        activations=_peak_activations(stages, row),
        buffers=buffers * microbatches,
        workspace=largest,
    )


def activation_curve(stages: dict[int, Footprint], row: Sequence[Action]) -> Iterator[tuple[Action, Amount]]:
    """After each action of `row`, the activations that the rank holds; of an evaluation, those of one forward."""
    recomputed = {(a.stage, a.microbatch) for a in row if a.kind is Kind.RECOMPUTE}
    # torch keeps everything until the gradients of the weights.
    whole = {s: changes(kept=f.kept, recomputed=ZERO, between=f.kept) for s, f in stages.items()}
    again = {s: changes(kept=f.outputs, recomputed=f.kept - f.outputs, between=f.kept) for s, f in stages.items()}
    now, trains = ZERO, any(action.kind in BACKWARDS for action in row)
    for action in row:
        now = now if trains else ZERO
        table = again if (action.stage, action.microbatch) in recomputed else whole
        now += table[action.stage].get(action.kind, ZERO)
        yield action, now


def _peak_activations(stages: dict[int, Footprint], row: Sequence[Action]) -> Amount:
    amounts = [amount for _, amount in activation_curve(stages, row)]
    return Amount(
        expected=max((a.expected for a in amounts), default=0), bound=max((a.bound for a in amounts), default=0)
    )
