"""One training microbatch on fake tensors: what each node returns, reads and saves, and how long each storage lives."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node, saved_tensors_hooks

from pipecompile.cost_models.protocol import NodeCall
from pipecompile.errors import CaptureError
from pipecompile.graph.autograd_nodes import autograd_nodes_since, known_uses
from pipecompile.graph.layout import dense_order, is_dense, strides_with_gaps
from pipecompile.graph.model_state import named_state
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import size_bytes
from pipecompile.ir.encodings import ELEMENT_BYTES, Use
from pipecompile.ir.graph import Content, GradientStorage, SavesAt
from pipecompile.profiling.caller import NodeCaller
from pipecompile.profiling.destinations import GradientDestinations, Sources
from pipecompile.profiling.kernel_scratch import Scratch
from pipecompile.profiling.storage_tracker import StorageTracker
from pipecompile.profiling.workload import Workload

__all__ = ["NodeObservation", "StepObservation", "observe"]


@dataclass(frozen=True)
class NodeObservation:
    """One node: its value, and the storages (indices into `Observation.storages`) that its backward keeps.

    `bytes` and `gradient_bytes` count the elements of the value and of its differentiable part; `storages` are the ones
    it lies in, `permuted`, `dense` and `spread_bytes` are as in the cost graph's `Tensor`. `saved` is in order of first
    use, `uses` has what for, by saved tensor. Storages of parameters and buffers appear nowhere. `forward_peak` and
    `backward_peak` are the most bytes that live while it runs, above what lived when it began; `scratch` is what its
    kernels take beside that. `packs` is as in the cost graph's `Node`. `parameters` are the canonical names of what it
    reads, `given_as_views` and `early` some of these, `silent` the readers of its value that give no gradient for it,
    if others do; `differentiable` and `mutates` are as in `Call`.
    """

    operator: str
    bytes: int
    gradient_bytes: int
    storages: tuple[int, ...]
    permuted: bool
    dense: bool
    spread_bytes: int
    saved: tuple[int, ...]
    uses: tuple[tuple[Use, ...], ...]
    forward_peak: int
    backward_peak: int
    scratch: int
    packs: SavesAt
    parameters: tuple[str, ...]
    given_as_views: tuple[str, ...]
    early: tuple[str, ...]
    silent: tuple[str, ...]
    differentiable: tuple[bool, ...]
    mutates: bool


@dataclass(frozen=True)
class StepObservation:
    """The facts of every node but `get_attr`, by name, the bytes of the storages they speak of, and the gradients.

    `contents` are of storages that are saved, where they are plain elements. `gradients` are those that live longer
    than the node that makes them or are captured, without those of parameters and inputs. `expanded` has by
    node the only reader that gives a gradient for it, if that repeats elements.
    """

    nodes: dict[str, NodeObservation]
    storages: tuple[int, ...]
    contents: Mapping[int, Content]
    gradients: tuple[GradientStorage, ...]
    expanded: Mapping[str, str]


def observe(workload: Workload, scratch: Scratch) -> StepObservation:
    """Runs `workload`, which is fake, forward and backward once; no real memory is touched.

    `scratch` is that of the kernels that it would run on.

    CaptureError if its backward cannot run on fake tensors.
    """
    observer = _Observer(workload, scratch)
    try:
        with torch.enable_grad():
            observer.interpret()
            observer.differentiate()
        return observer.observation()
    finally:
        observer.destinations.leave()


class _Packed:
    """A saved tensor as the hook of its saving leaves it."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.shape = value, value.shape


class _Observer(NodeCaller):
    """Ticks 0 … n − 1 are the forwards of the n nodes in order, n … 2n − 1 their backwards, the last node's first."""

    def __init__(self, workload: Workload, scratch: Scratch) -> None:
        super().__init__(workload)
        self.facts: list[tuple[str, NodeObservation]] = []
        self.numbers: list[int] = []  # the autograd sequence number at which each node begins
        self.state = [value for _, value in named_state(workload.module)]
        self.ledger = StorageTracker(self.state, scratch)
        self.roots: tuple[Tensor, ...] = ()
        self.contents: dict[int, Content | None] = {}
        self.destinations = GradientDestinations(self.ledger)

    def perform(self, call: NodeCall) -> Any:
        tick = len(self.facts)
        self.ledger.enter(tick)
        self.numbers.append(torch._C._autograd._get_sequence_nr())
        versions = [argument._version for argument in call.arguments]
        sources = self._sources(call.node)
        value, uses, packs = self._kept(call)
        outputs = tensor_leaves(value)
        behind = [output.grad_fn for output in outputs if output.grad_fn is not None]
        self.destinations.follow(
            call.node.name, outputs, list(autograd_nodes_since(self.numbers[-1], behind)), sources
        )
        differentiable = tuple(output for output in outputs if output.requires_grad)
        facts = NodeObservation(
            operator=call.operator,
            bytes=size_bytes(outputs),
            gradient_bytes=size_bytes(differentiable),
            storages=self.ledger.indices(outputs),
            permuted=len(outputs) == 1
            and dense_order(outputs[0]) != tuple(range(outputs[0].dim())),
            dense=len(outputs) != 1 or is_dense(outputs[0]),
            spread_bytes=_spread_bytes(outputs[0]) if len(outputs) == 1 else 0,
            saved=tuple(uses),
            uses=tuple(uses.values()),
            forward_peak=0,
            backward_peak=0,
            scratch=0,
            packs=packs,
            parameters=tuple(self.workload.names[id(parameter)] for parameter in call.parameters),
            given_as_views=(),
            early=(),
            silent=(),
            differentiable=call.differentiable,
            mutates=versions != [argument._version for argument in call.arguments],
        )
        self.facts.append((call.node.name, facts))
        if call.node.op == "output":
            self.roots = differentiable
        return value

    def _sources(self, node: fx.Node) -> Sources:
        found: dict[Node | None, list[str]] = defaultdict(list)
        for source in node.all_input_nodes:
            for value in tensor_leaves(self.env[source]):
                if value.grad_fn is not None and source.op != "get_attr":
                    found[value.grad_fn].append(source.name)
        return found

    def _kept(self, call: NodeCall) -> tuple[Any, dict[int, tuple[Use, ...]], SavesAt]:
        """The value of a node, the storages that its backward keeps and for what, and when it was given the last."""
        saved: dict[int, list[_Packed]] = {}
        begin = self.ledger.kernels
        when: list[int] = []

        def keep(value: Tensor) -> _Packed:
            packed = _Packed(value)
            for index in self.ledger.indices([value]):
                saved.setdefault(index, []).append(packed)
            when.append(self.ledger.kernels)
            return packed

        with saved_tensors_hooks(keep, attrgetter("value")), self.ledger:
            value = super().perform(call)
        packs: SavesAt = "never" if not when else "before" if when[-1] == begin else "after"
        return value, self._uses(value, saved), packs

    def _uses(
        self, value: Any, saved: Mapping[int, Sequence[_Packed]]
    ) -> dict[int, tuple[Use, ...]]:
        """What each storage is saved for, by tensor; on the way its contents are noted."""
        values = [
            *tensor_leaves(value),
            *(packed.value for every in saved.values() for packed in every),
        ]
        roots = [each.grad_fn for each in values if each.grad_fn is not None]
        known = [
            use
            for node in autograd_nodes_since(self.numbers[-1], roots)
            for use in known_uses(node, _Packed)
        ]
        uses: dict[int, Use] = {id(packed): use for packed, use, _ in known}
        bounds = {id(packed): bound for packed, _, bound in known if bound}
        for index, every in saved.items():
            for packed in every:
                content = self._content(index, packed.value, bounds.get(id(packed)))
                before = self.contents.setdefault(index, content)
                if before is not None and content is not None and before.dtype == content.dtype:
                    self.contents[index] = content if before.bound is None else before
                else:  # views of several types, or more than elements
                    self.contents[index] = None
        return {
            index: tuple(uses.get(id(packed), "other") for packed in every)
            for index, every in saved.items()
        }

    def _content(self, index: int, value: Tensor, bound: int | None) -> Content | None:
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout != torch.strided or not value.numel() or dtype not in ELEMENT_BYTES:
            return None
        return Content(
            dtype=dtype, is_mask=dtype == "bool" or index in self.ledger.masks, bound=bound
        )

    def differentiate(self) -> None:
        """The backward of one microbatch, from the loss, or from all outputs where there is none."""
        roots, self.roots = self.roots, ()
        if not roots:
            return
        seeds = [torch.ones_like(root) for root in roots]
        self.ledger.exclude(seeds)
        self.ledger.tick_of, self.ledger.shared = self._tick_of, self._shared_shapes()
        self.ledger.enter(len(self.facts))
        try:
            with self.ledger:
                torch.autograd.backward(roots, seeds)
        except Exception as error:
            raise CaptureError(
                f"the backward of {self._running()} does not run on fake tensors: {type(error).__name__}: {error}; "
                "a custom autograd.Function must not read values in its backward"
            ) from error

    def _shared_shapes(self) -> set[torch.Size]:
        readers = Counter(name for _, facts in self.facts for name in facts.parameters)
        return {value.shape for value in self.state if readers[self.workload.names[id(value)]] > 1}

    def _tick_of(self, number: int) -> int | None:
        """The backward in which the autograd node with this sequence number runs."""
        if number > self.numbers[-1] + 2**32:
            return None  # what accumulates a parameter's gradient has no number of its own
        return self._backward_tick(bisect_right(self.numbers, number) - 1)

    def _backward_tick(self, place: int) -> int:
        return 2 * len(self.facts) - 1 - place

    def _running(self) -> str:
        return self.facts[2 * len(self.facts) - 1 - max(self.ledger.tick, len(self.facts))][0]

    def observation(self) -> StepObservation:
        """What was seen."""
        gradients = (
            self._gradients()
        )  # before those of parameters, which are not among them, are let go
        for value in self.state:
            value.grad = None
        rises, scratch = self.ledger.rises, self.ledger.scratch
        users = {node.name: tuple(node.users) for node in self.workload.graph.nodes}
        nodes = {
            name: replace(
                facts,
                # What arrives is of the minibatch, which is there before.
                forward_peak=0 if facts.operator == "placeholder" else rises[place],
                backward_peak=rises.get(back, 0),
                scratch=max(scratch.get(place, 0), scratch.get(back, 0)),
                given_as_views=tuple(self._named(self.destinations.given_as_views[name])),
                early=tuple(self._named(self.destinations.early[name])),
                silent=self._silent(name, users[name]),
            )
            for place, (name, facts) in enumerate(self.facts)
            for back in [self._backward_tick(place)]
        }
        contents = {
            index: content for index, content in self.contents.items() if content is not None
        }
        readers = self.destinations.readers
        expanded = {
            name: reader for name, reader in self.destinations.expanded if readers[name] == {reader}
        }
        storages = tuple(life.bytes for life in self.ledger.lives)
        return StepObservation(nodes, storages, contents, gradients, expanded)

    def _silent(self, name: str, users: Iterable[fx.Node]) -> tuple[str, ...]:
        """The readers of a node that give no gradient for it, if others do."""
        giving = self.destinations.readers[name]
        return tuple(user.name for user in users if user.name not in giving) if giving else ()

    def _named(self, ids: Iterable[int]) -> Iterator[str]:
        """The parameters among these leaves of the graph; others are inputs."""
        return (
            self.workload.names[each] for each in dict.fromkeys(ids) if each in self.workload.names
        )

    def _gradients(self) -> tuple[GradientStorage, ...]:
        """Storages of the backward that live longer than the node that makes them, or that are captured."""
        count, last = len(self.facts), 2 * len(self.facts) - 1
        found: list[GradientStorage] = []
        where = self.destinations
        places: dict[int | None, int | None] = {
            None: None
        }  # of each life, or of what it goes on for
        for index, life in enumerate(self.ledger.lives):
            before = places.get(life.continues)
            places[index] = before
            captured = tuple(dict.fromkeys(where.captured[index]))
            given = tuple(dict.fromkeys(where.given[index]))
            if life.born >= count and life.died is not None and (life.died > life.born or captured):
                producer, end = (self.facts[last - tick][0] for tick in (life.born, life.died))
                readers = tuple(
                    self.facts[last - tick][0] for tick in sorted(life.read) if tick < life.died
                )
                places[index] = len(found)
                found.append(
                    GradientStorage(
                        producer=producer,
                        last=end,
                        bytes=life.bytes,
                        readers=readers,
                        captured_at=captured,
                        edges=given,
                        is_sum=life.sum,
                        is_copy=index in self.ledger.copies,
                        continues=before,
                    )
                )
        return tuple(found)


def _spread_bytes(value: Tensor) -> int:
    """What a copy laid out as `value` takes; nothing if that is dense."""
    strides = strides_with_gaps(value)
    if strides is None or not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))
    return (last + 1) * value.element_size()
