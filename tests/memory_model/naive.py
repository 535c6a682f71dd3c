"""What a rank holds, found the long way: a set of live things, action by action and node by node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipecompile.ir.graph import CostGraph, GradientStorage, Node, Tensor
from pipecompile.ir.schedule import COMPUTE, Action, Kind

__all__ = ["highest"]

Key = tuple[Any, ...]
Saving = tuple[Sequence[str], Sequence[str]]
NONE: Mapping[int, Sequence[Sequence[str]]] = {}
NO_SAVING: Mapping[int, Sequence[Saving]] = {}
WIDTHS = {"bool": 1, "float16": 2, "float32": 4, "int64": 8}


@dataclass
class _Live:
    """What is held, by what it is; nothing is held twice under one name."""

    sizes: dict[Key, int] = field(default_factory=dict)
    highest: int = 0

    def hold(self, key: Key, size: int) -> None:
        assert key not in self.sizes
        self.sizes[key] = size

    def need(self, more: int) -> None:
        self.highest = max(self.highest, sum(self.sizes.values()) + more)

    def drop(self, *start: Any) -> None:
        """All whose name starts so."""
        for key in [key for key in self.sizes if key[: len(start)] == start]:
            del self.sizes[key]


@dataclass
class _Form:
    """What stands for a storage: bytes, those beside while it is made or read, and whose backwards read it."""

    storage: int
    size: int
    beside: int
    made: str
    waits: bool
    savers: list[str]
    back: str


@dataclass
class _Spread:
    """A copy of what came: bytes, which nodes are done when a forward lets go of it, and whose backwards need it."""

    key: Key
    size: int
    until: set[str]
    savers: list[str]
    holders: list[str]
    sent: bool


class _Stage:
    """One of a cut's stages: lives of what it makes, read off the graph. `regions` are computed again.

    These are known by their index; None stands for the forward. Nodes in `saving` save by policies.
    """

    def __init__(
        self,
        graph: CostGraph,
        cut: Sequence[Sequence[str]],
        index: int,
        regions: Sequence[Sequence[str]],
        saving: Sequence[Saving] = (),
    ) -> None:
        self.graph, self.index, self.regions, self.saving = graph, index, regions, saving
        self.of = {name: stage for stage, names in enumerate(cut) for name in names}
        self.nodes = [node for node in graph.nodes if self.of[node.name] == index]
        self.order = [node.name for node in graph.nodes]
        self.forms = self._forms()

    def run(self, name: str) -> Sequence[str]:
        """The nodes that save by policies together with this one; empty if it does not."""
        return next((names for names, _ in self.saving if name in names), ())

    def _forms(self) -> dict[Key, _Form]:
        found: dict[Key, _Form] = {}
        for names, policies in self.saving:
            waits = "relu" in policies or "pool" in policies
            for storage in self.own():
                uses = [
                    (name, use)
                    for name in self._savers_in(names, storage)
                    for use in self._uses(name, storage)
                ]
                small = [self._by_use(use, policies, storage) for _, use in uses]
                if not uses or not self.graph.contents[storage] or not self.graph.storages[storage]:
                    continue
                if None not in small:
                    for number, ((name, _), sizes) in enumerate(zip(uses, small, strict=True)):
                        assert sizes is not None
                        found[storage, name, number] = _Form(
                            storage, *sizes, names[-1], True, [name], name
                        )
                    continue
                for policy in policies:
                    if (sizes := self._by_policy(policy, storage)) is not None:
                        savers = self._savers_in(names, storage)
                        made = names[-1] if waits else savers[0]
                        form = found.setdefault(
                            (storage, policy), _Form(storage, *sizes, made, waits, [], "")
                        )
                        form.savers += savers
                        form.back = (
                            names[-1]
                            if policy == "offload" and self.graph.allocator == "cuda"
                            else savers[-1]
                        )
                        break
        return found

    def _savers_in(self, names: Sequence[str], storage: int) -> list[str]:
        return [name for name in names if storage in self.graph.by_name[name].saved]

    def _uses(self, name: str, storage: int) -> tuple[str, ...]:
        node = self.graph.by_name[name]
        return node.uses[node.saved.index(storage)] if node.uses else ("other",)

    def _count(self, storage: int) -> int:
        content = self.graph.contents[storage]
        assert content is not None
        return self.graph.storages[storage] // WIDTHS[content.dtype]

    def _by_use(self, use: str, policies: Sequence[str], storage: int) -> tuple[int, int] | None:
        content = self.graph.contents[storage]
        if content is None or use == "other" or use.split()[0] not in policies:
            return None
        if use == "pool input":
            return 0, 0
        count = self._count(storage)
        if use == "relu":
            return -(-count // 8), 2 * min(
                count, 1 << (16 if self.graph.allocator == "cpu" else 22)
            )
        width = next(
            (w for bits, w in ((8, 1), (15, 2), (31, 4)) if (content.bound or 2**63) <= 2**bits),
            None,
        )
        return None if width is None else (count * width, 0)

    def _by_policy(self, policy: str, storage: int) -> tuple[int, int] | None:
        content, size, on_cpu = (
            self.graph.contents[storage],
            self.graph.storages[storage],
            self.graph.allocator == "cpu",
        )
        assert content is not None
        count, chunk = self._count(storage), 1 << (16 if on_cpu else 22)
        if policy == "mask" and (content.dtype == "bool" or (content.is_mask and on_cpu)):
            return -(-count // 8), (1 + (WIDTHS[content.dtype] if on_cpu else 1)) * min(
                count, chunk
            )
        if policy == "half" and content.dtype == "float32":
            return size // 2, 0
        return (size * on_cpu, 0) if policy == "offload" else None

    def inside(self, names: Iterable[str]) -> list[str]:
        wanted = set(names)
        return [name for name in self.order if name in wanted and self.of[name] == self.index]

    def later(self, names: Iterable[str]) -> bool:
        return any(self.of[name] > self.index for name in names)

    def readers(self, storage: int) -> set[str]:
        return {
            name
            for tensor in self.graph.tensors
            if tensor.storage == storage
            for name in tensor.consumers
        }

    def savers(self, storage: int) -> list[str]:
        return self.inside(node.name for node in self.graph.nodes if storage in node.saved)

    def made(self, node: Node) -> list[int]:
        """The storages that nobody before `node` made; inputs of the minibatch are none of the stage's."""
        if node.operator == "placeholder":
            return []
        return [
            storage
            for storage in range(len(self.graph.storages))
            if self._maker(storage) == node.name
        ]

    def _maker(self, storage: int) -> str | None:
        makers = {tensor.producer for tensor in self.graph.tensors if tensor.storage == storage}
        makers = makers or {node.name for node in self.graph.nodes if storage in node.saved}
        return min(makers, key=self.order.index, default=None)

    def own(self) -> list[int]:
        return [storage for node in self.nodes for storage in self.made(node)]

    def sent(self, storage: int) -> bool:
        tensors = [
            tensor for tensor in self.graph.tensors if tensor.storage == storage and tensor.is_dense
        ]
        own = [tensor for tensor in tensors if self.of[tensor.producer] == self.index]
        return self.later(name for tensor in own for name in tensor.consumers)

    @cached_property
    def copies(self) -> dict[Key, int]:
        """What is sent as copies: of views that repeat elements or have gaps, these also if they came and are read."""
        leaving = [
            tensor
            for tensor in self.graph.tensors
            if self.leaves(tensor.producer, tensor.consumers)
        ]
        own = [t for t in leaving if self.of[t.producer] == self.index and not t.is_dense]
        others = [
            t
            for t in leaving
            if self.of[t.producer] < self.index
            and t.strided_copy_bytes
            and t.gradient_bytes
            and self.inside(t.consumers)
        ]
        return {("copy", tensor.producer): tensor.bytes for tensor in [*own, *others]}

    @property
    def messages(self) -> dict[Key, int]:
        """What is sent of its own: storages, copies of views, and what came and was laid out with gaps."""
        storages: dict[Key, int] = {
            (s,): self.graph.storages[s] for s in filter(self.sent, self.own())
        }
        return (
            storages
            | self.copies
            | {spread.key: spread.size for spread in self.spreads if spread.sent}
        )

    def lying_in(self, key: Key) -> list[str]:
        """The tensors that travel as a message of this stage."""
        if key[0] in ("copy", "spread"):
            (tensor,) = [t for t in self.graph.tensors if t.producer == key[1]]
            if key[0] == "copy":
                return [key[1]]
        storage = key[0] if key[0] != "spread" else tensor.storage
        alike = [
            t
            for t in self.graph.tensors
            if t.storage == storage and t.is_dense and self.later(t.consumers)
        ]
        return [t.producer for t in alike if self.of[t.producer] == self.index]

    def hands_on(self, name: str) -> bool:
        """Whether what came is sent as it came, or as a view of it."""
        (tensor,) = [t for t in self.graph.tensors if t.producer == name]
        leaving = [t for t in self.graph.tensors if self.leaves(t.producer, t.consumers)]
        plain = [t for t in leaving if ("copy", t.producer) not in self.copies]
        alike = [
            t
            for t in plain
            if t.storage == tensor.storage is not None
            and t.is_dense
            and not tensor.strided_copy_bytes
        ]
        return tensor in [*plain, *alike] or bool(alike)

    def wants(self, name: str) -> bool:
        """Whether the second half of a backward needs what came: saved, or as autograd's node where a way ends."""
        (tensor,) = [t for t in self.graph.tensors if t.producer == name]
        is_all = self.begun_at_outputs or not self.splits
        passed = [node.name for node in self.nodes if is_all or node.name in self.passed]
        if any(reader in passed for reader in tensor.consumers_with_gradient):
            return True
        saved = [self.graph.by_name[name].saved for name in passed]
        return not tensor.strided_copy_bytes and any(tensor.storage in each for each in saved)

    @cached_property
    def spreads(self) -> list[_Spread]:
        """What is laid out with gaps again as it comes."""
        return [self._spread(tensor) for tensor in self.read() if tensor.strided_copy_bytes]

    def _spread(self, tensor: Tensor) -> _Spread:
        seen, views, sent = set(tensor.consumers), [tensor], False
        while views:
            view = views.pop()
            seen |= set(view.consumers)
            sent |= view is not tensor and view.is_dense and self.later(view.consumers)
            inside = self.inside(view.consumers)
            views += [
                t
                for t in self.graph.tensors
                if t.producer in inside and t.storage == tensor.storage is not None
            ]
        savers = [
            name for name in self.inside(seen) if tensor.storage in self.graph.by_name[name].saved
        ]
        regions = [set(region) for region in self.regions if set(region) & seen]
        runs = [name for reader in seen for name in self.run(reader)]
        holders = [name for name in savers if not self.region(name)]
        for index, region in enumerate(self.regions):
            if self.frame(region) is None and self.is_needed(index) and set(region) & seen:
                holders.append(region[0])
        until = {name for name in seen if self.of[name] >= self.index}.union(runs, *regions)
        return _Spread(
            ("spread", tensor.producer),
            tensor.strided_copy_bytes,
            until,
            savers,
            self.inside(holders),
            sent,
        )

    def region(self, name: str) -> Sequence[str]:
        """The outermost region that a node is in; empty if in none."""
        return max((region for region in self.regions if name in region), key=len, default=())

    def beginning(self, name: str) -> list[int]:
        """The regions that begin with a node."""
        return [index for index, region in enumerate(self.regions) if region[0] == name]

    def written(self, names: Iterable[str]) -> int:
        """What is copied so that these nodes can run again with buffers as they were."""
        return sum(sum(self.graph.by_name[name].buffer_copies) for name in names)

    def frame(self, names: Iterable[str]) -> int | None:
        """The innermost region that these nodes lie in, but for one that they are all of."""
        wanted = set(names)
        found = [
            index for index, region in enumerate(self.regions) if wanted <= set(region) != wanted
        ]
        return min(found, key=lambda index: len(self.regions[index]), default=None)

    def frame_of(self, name: str) -> int | None:
        found = [index for index, region in enumerate(self.regions) if name in region]
        return min(found, key=lambda index: len(self.regions[index]), default=None)

    def home(self, frame: int | None, storage: int) -> int | None:
        """Whose run made what a frame holds: its own, or that of a frame around it."""
        while frame is not None and self._maker(storage) not in self.regions[frame]:
            frame = self.frame(self.regions[frame])
        return frame

    def reads(self, frame: int) -> list[int]:
        """What a region gets from outside."""
        nodes = set(self.regions[frame])
        used = [s for s in self.own() if nodes & (self.readers(s) | set(self.savers(s)))]
        return [storage for storage in used if self._maker(storage) not in nodes]

    def is_needed(self, frame: int) -> bool:
        return any(self.graph.by_name[name].saves_at != "never" for name in self.regions[frame])

    def packs(self, frame: int) -> list[tuple[int, bool, Key, Sequence[int]]]:
        """What is put aside for a region when it runs again: before or after its node of this number, by whom."""
        names = self.regions[frame]
        found: list[tuple[int, bool, Key, Sequence[int]]] = []
        for number, name in enumerate(names):
            node = self.graph.by_name[name]
            if self.frame_of(name) == frame and node.saves_at != "never":
                found.append((number, node.saves_at == "after", ("node", name), node.saved))
        for inner, region in enumerate(self.regions):
            if inner != frame and self.frame(region) == frame:
                found.append((names.index(region[0]), False, ("region", inner), self.reads(inner)))
        return sorted(found)

    def holders(self, storage: int) -> list[str]:
        """Whose backwards need what the forward kept: savers outside regions, and regions that run again."""
        home = self.region(self._maker(storage) or "")
        formed = {name for _, form in self.standing(storage) for name in form.savers}
        found = [
            name for name in self.savers(storage) if not self.region(name) and name not in formed
        ]
        for index, region in enumerate(self.regions):
            is_outer = self.frame(region) is None and self.is_needed(index)
            if (
                is_outer
                and region is not home
                and set(region) & (self.readers(storage) | set(self.savers(storage)))
            ):
                found.append(region[0])
        return self.inside(found)

    def forgotten(self, storage: int, done: set[str]) -> bool:
        """Whether nothing needs it once the nodes in `done` have run; what a run was given it holds to its end."""
        users = {form.made for _, form in self.standing(storage) if form.waits}
        users |= {name for run in self.given_to(storage) for name in run}
        is_read = users <= done and self.read_by(storage, done)
        return not self.sent(storage) and not self.holders(storage) and is_read

    def given_to(self, storage: int) -> list[Sequence[str]]:
        """The runs that read what was made before them."""
        maker = self._maker(storage)
        return [run for reader in self.readers(storage) if maker not in (run := self.run(reader))]

    def standing(self, storage: int) -> list[tuple[Key, _Form]]:
        """The forms of a storage."""
        return [(key, form) for key, form in self.forms.items() if form.storage == storage]

    def every_form(self) -> list[tuple[Key, _Form]]:
        return [found for storage in self.own() for found in self.standing(storage)]

    def read_by(self, storage: int, done: set[str]) -> bool:
        """Whether all readers have run, to the end of the regions for which it is an input."""
        regions = [set(region) for region in self.regions if self._maker(storage) not in region]
        waiting = [region for region in regions if region & self.readers(storage)]
        return set().union(self.readers(storage), *waiting) <= done

    def trained(self) -> dict[str, list[str]]:
        """The nodes of the stage that read each parameter which gets a gradient."""
        trained = [parameter.name for parameter in self.graph.parameters if parameter.trainable]
        readers = {
            name: [node.name for node in self.nodes if name in node.parameters] for name in trained
        }
        return {name: nodes for name, nodes in readers.items() if nodes}

    def adds_anew(self, parameter: str, node: str) -> bool:
        """Whether the second gradient of it is made here, after one that is a view, to which it cannot be added."""
        readers = self.trained()[parameter]
        return (
            readers[-2:-1] == [node] and parameter in self.graph.by_name[readers[-1]].view_gradients
        )

    def size(self, parameter: str, *, trained: bool = False) -> int:
        found = self.graph.parameter_by_name[parameter]
        return found.bytes * (found.trainable or not trained)

    def flows(self, *, hold: bool) -> Iterator[tuple[Key, int, str, str | None]]:
        """Gradients of tensors: name, bytes, the node whose backward makes it, and the one that lets it go.

        Without the latter where it is returned; a first half, which is to `hold`, returns also what others have.
        """
        homes = self.homes(hold=hold)
        for number, gradient in self.gradients():
            last: str | None = gradient.last
            is_held = hold and self.splits and self.captors(gradient)
            if number in homes.values() or (number in self.parts.values() and not is_held):
                last = None
            elif self.of[gradient.last] != self.index:
                last = next(
                    iter(self.inside([*gradient.readers, *gradient.captured_at])),
                    gradient.producer,
                )
            yield (
                ("complete" if last is None else "own", number),
                gradient.bytes,
                gradient.producer,
                last,
            )
        for tensor in self.zeros():
            yield (
                ("complete", "zeros", tensor.producer),
                tensor.gradient_bytes,
                self.nodes[0].name,
                None,
            )
        for tensor in self.given():
            if tensor.producer not in homes and not (hold and tensor.producer in self.parts):
                reader = self.completing(tensor)
                yield ("complete", "copy", tensor.producer), tensor.gradient_bytes, reader, None

    def gradients(self) -> list[tuple[int, GradientStorage]]:
        """What is made here: copies are not, of what comes in order from a later stage."""
        own = [
            (n, g) for n, g in enumerate(self.graph.gradients) if self.of[g.producer] == self.index
        ]
        return [(n, g) for n, g in own if not (g.is_copy and self.from_later(g.producer))]

    def ways(self, number: int, name: str) -> set[str]:
        """Whose gradients lie in the same storage as that of a node, up from it."""
        found: set[str] = set()
        for tensor in self.graph.tensors:
            is_read = name in tensor.consumers and tensor.gradient_bytes
            if is_read and self.lying((tensor.producer, name)) == [number]:
                found |= {tensor.producer, *self.ways(number, tensor.producer)}
        return found

    def lying(self, pair: tuple[str, str]) -> list[int]:
        """The storages in which the gradient of a node by a reader lies."""
        return [n for n, gradient in enumerate(self.graph.gradients) if pair in gradient.edges]

    def from_later(self, name: str) -> bool:
        """Whether all of a node's gradient comes from later stages, through views at the most."""
        tensors = [tensor for tensor in self.graph.tensors if tensor.producer == name]
        read = self.inside(
            reader for tensor in tensors for reader in tensor.consumers_with_gradient
        )
        if not read:
            return self.later(reader for tensor in tensors for reader in tensor.consumers)
        (tensor,) = tensors
        views = [
            t
            for t in self.graph.tensors
            if [t.producer] == list(tensor.consumers) and t.storage is not None
        ]
        alike = [
            t
            for t in views
            if (t.storage, t.gradient_bytes) == (tensor.storage, tensor.gradient_bytes)
        ]
        return bool(alike) and self.from_later(alike[0].producer)

    def homes(self, *, hold: bool) -> dict[str, int]:
        """By input that is read the gradient of this stage in which its own lies; others are copies."""
        sizes = {number: gradient.bytes for number, gradient in self.gradients()}
        return {
            tensor.producer: number
            for tensor in self.given()
            if hold or tensor.is_permuted or self.is_seen(tensor)
            for number in self.sole(tensor)
            if sizes.get(number) == tensor.gradient_bytes
        }

    @cached_property
    def parts(self) -> dict[str, int]:
        """By input the larger gradient of which its own is a part; that lives until the backward is done."""
        return {
            tensor.producer: number
            for tensor in sorted(self.given(), key=lambda each: self.order.index(each.producer))
            if not tensor.strided_copy_bytes
            for number in self.sole(tensor)
            if self.graph.gradients[number].bytes > tensor.gradient_bytes
        }

    def sole(self, tensor: Tensor) -> list[int]:
        """That in which the gradient of an input lies, if there is one and one node alone gives it."""
        found = self.lying((tensor.producer, self.completing(tensor)))
        return found if len(found) == 1 and self.is_sole(tensor) else []

    def is_seen(self, tensor: Tensor) -> bool:
        """Whether its one reader is a view of all of it."""
        views = [
            t
            for t in self.graph.tensors
            if [t.producer] == list(tensor.consumers) and t.storage is not None
        ]
        return [(t.storage, t.gradient_bytes) for t in views] == [
            (tensor.storage, tensor.gradient_bytes)
        ]

    def read(self) -> list[Tensor]:
        """What arrives and is read."""
        arriving = [
            tensor
            for tensor in self.graph.tensors
            if self.arrives(tensor.producer, tensor.consumers)
        ]
        return [tensor for tensor in arriving if self.inside(tensor.consumers)]

    def completing(self, tensor: Tensor) -> str:
        """The node of the stage in whose backward the gradient of an input is complete."""
        return self.inside(tensor.consumers_with_gradient)[0]

    def is_sole(self, tensor: Tensor) -> bool:
        """Whether one node alone gives its gradient, here or later: one of the stage."""
        return [name for name in tensor.consumers_with_gradient if self.of[name] >= self.index] == [
            self.completing(tensor)
        ]

    def given(self) -> list[Tensor]:
        """What arrives and is given a gradient."""
        return [tensor for tensor in self.read() if self.inside(tensor.consumers_with_gradient)]

    def only_views(self, tensor: Tensor) -> bool:
        """Whether later stages read views of views of it alone, which are sent as it is; its gradient is one too."""
        is_dense = tensor.is_dense
        while len(tensor.consumers) == 1 and tensor.storage is not None:
            (reader,) = tensor.consumers
            views = [
                t for t in self.graph.tensors if t.producer == reader and self.inside([reader])
            ]
            same = [t for t in views if t.storage == tensor.storage]
            if [t.gradient_bytes for t in same] != [tensor.gradient_bytes]:
                return False
            (tensor,) = same
            if not self.inside(tensor.consumers):
                return bool(tensor.consumers) and is_dense and tensor.is_dense
        return False

    def met(self, node: str, *, hold: bool) -> int:
        """What was added to the sums that are new.

        Those in place are so if the first part came from later, or if it is to be held.
        """
        waiting = {
            number for number, gradient in self.gradients() if hold and self.captors(gradient)
        }
        sizes = [
            g.bytes
            for _, g in self.gradients()
            if g.producer == node and g.is_sum and g.continues is None
        ]
        staying = waiting.union(self.homes(hold=hold).values(), self.parts.values())
        read = {t.producer for t in self.graph.tensors if node in t.consumers_with_gradient}
        first = sum(
            gradient.bytes
            for number, gradient in self.gradients()
            if gradient.last == node
            and sizes
            and gradient.bytes >= sizes[-1]
            and number not in staying
            if any(name in read and reader != node for name, reader in gradient.edges)
        )
        summed = self.trained() if not hold else self.early()
        new = sum(2 * self.size(name) for name in summed if self.adds_anew(name, node))
        return (
            first
            + new
            + sum(
                gradient.bytes
                for _, gradient in self.gradients()
                if gradient.producer == node and gradient.is_sum
                if gradient.continues in (None, *waiting)
                or self.of[self.graph.gradients[gradient.continues or 0].producer] > self.index
            )
        )

    def arrives(self, producer: str, consumers: Iterable[str]) -> bool:
        return self.of[producer] < self.index and any(
            self.of[name] >= self.index for name in consumers
        )

    def leaves(self, producer: str, consumers: Iterable[str]) -> bool:
        return self.of[producer] <= self.index and self.later(consumers)

    @property
    def splits(self) -> bool:
        """Whether there are gradients of inputs to compute."""
        return any(
            t.gradient_bytes and self.arrives(t.producer, t.consumers) for t in self.graph.tensors
        )

    def waits(self, key: Key) -> str | None:
        """The node up to which a gradient waits in the second half of a backward; what is returned lies elsewhere."""
        if not self.splits or key[0] != "own":
            return None
        captors = self.captors(dict(self.gradients())[key[1]])
        return (
            self.inside([*captors, *(name for captor in captors for name in self.behind(captor))])[
                0
            ]
            if captors
            else None
        )

    def retains(self, name: str) -> bool:
        """Whether the first half holds the gradient that it received of what leaves."""
        if not self.splits or self.begun_at_outputs:
            return True
        own = {number for number, _ in self.gradients()}
        return any(
            number not in own and self.captors(gradient) and name in self.came_for(number)
            for number, gradient in enumerate(self.graph.gradients)
        )

    def came_for(self, number: int) -> list[str]:
        """The leaving tensors whose gradient a received one may be that is captured; all if none is known."""
        gradient = self.graph.gradients[number]
        users = set(gradient.captured_at)
        names = [t.producer for t in self.graph.tensors if self.leaves(t.producer, t.consumers)]
        met = [name for name in names if {name, *self.ways(number, name)} & users]
        return met or names

    def relays(self, name: str) -> bool:
        """Whether an input's gradient is what was received of what leaves."""
        arriving = [t for t in self.graph.tensors if self.arrives(t.producer, t.consumers)]
        passing = [
            tensor.producer
            for tensor in arriving
            if not self.inside(tensor.consumers_with_gradient)
        ]
        viewed = [
            t for t in arriving if self.inside(t.consumers_with_gradient) and self.only_views(t)
        ]
        return name in [*passing, *map(self.last_view, viewed)]

    def last_view(self, tensor: Tensor) -> str:
        """Of what only views are taken of for later stages, the one that is sent."""
        while self.inside(tensor.consumers):
            (tensor,) = [
                view for view in self.graph.tensors if [view.producer] == list(tensor.consumers)
            ]
        return tensor.producer

    def given_back(self, *, hold: bool) -> dict[Any, tuple[int, list[str]]]:
        """The gradients of inputs that are memory of their own: size, and the inputs whose gradients lie in it."""
        homes = self.homes(hold=hold)
        found: dict[Any, tuple[int, list[str]]] = {}
        for tensor in self.given():
            home = homes.get(tensor.producer, tensor.producer)
            if not self.only_views(tensor):
                _, names = found.get(home, (0, []))
                found[home] = tensor.gradient_bytes, [*names, tensor.producer]
        return found | {
            tensor.producer: (tensor.gradient_bytes, [tensor.producer]) for tensor in self.zeros()
        }

    def zeros(self) -> list[Tensor]:
        """What arrives, is read by no later stage and gets no gradient: zeros are sent for that."""
        arriving = [
            t
            for t in self.graph.tensors
            if self.arrives(t.producer, t.consumers) and t.gradient_bytes
        ]
        return [
            t
            for t in arriving
            if not self.inside(t.consumers_with_gradient) and not self.later(t.consumers)
        ]

    def lends(self, home: Any) -> bool:
        """Whether the first half holds what it returns."""
        return self.splits and any(
            home == n and self.captors(gradient) for n, gradient in self.gradients()
        )

    def behind(self, name: str) -> list[str]:
        """What runs in the second half because of a node: those that lead to parameters alone."""
        aside = [source for source in self.read_by_node(name) if source in self.aside]
        return [*aside, *(each for source in aside for each in self.behind(source))]

    def captors(self, gradient: GradientStorage) -> list[str]:
        """Where the second half begins with it."""
        return self.inside(filter(self.begins, gradient.captured_at))

    def begins(self, name: str) -> bool:
        """Whether the second half begins at a node on the way to inputs."""
        return self.begins_by_its_own(name) or self.begins_by_others(name)

    def begins_by_its_own(self, name: str) -> bool:
        """Whether the second half begins at a node on the way to inputs, for a parameter that it reads."""
        reads = [parameter for parameter, nodes in self.trained().items() if name in nodes]
        return name in self.to_inputs and any(
            self.roots(parameter) == {name} for parameter in reads
        )

    def begins_by_others(self, name: str) -> bool:
        """Whether it does so for parameters behind what the node reads."""
        before = [source for source in self.read_by_node(name) if source in self.aside]
        return name in self.to_inputs and any(self.ways_in(source) == {name} for source in before)

    def ways_in(self, name: str) -> set[str]:
        """The nodes on the way to inputs by which a backward comes to one that is aside; "" for the outputs."""
        tensors = [t for t in self.graph.tensors if t.producer == name and t.gradient_bytes]
        readers = self.inside(
            reader for tensor in tensors for reader in tensor.consumers_with_gradient
        )
        is_sent = any(self.later(tensor.consumers) for tensor in tensors)
        found = {""} if is_sent or not readers else set[str]()
        for reader in readers:
            found |= {reader} if reader in self.to_inputs else self.ways_in(reader)
        return found

    def roots(self, parameter: str) -> set[str]:
        """The same of a parameter's gradient; it is made in the first half if there are several."""
        names = self.trained()[parameter]
        found = {
            way
            for name in names
            for way in ({name} if name in self.to_inputs else self.ways_in(name))
        }
        at_once = any(
            name in self.to_inputs
            and parameter in self.graph.by_name[name].gradients_by_input_backward
            for name in names
        )
        return found | ({"one of them", "another"} if at_once else set())

    def early(self) -> list[str]:
        """The parameters whose gradients the first half makes, and holds."""
        return self.hanging_off_several() if self.splits else []

    def hanging_off_several(self) -> list[str]:
        return [parameter for parameter in self.trained() if len(self.roots(parameter)) > 1]

    def reads_later(self, name: str) -> bool:
        """Whether it reads a parameter whose gradient the second half makes."""
        several = self.hanging_off_several()
        return any(
            name in nodes for parameter, nodes in self.trained().items() if parameter not in several
        )

    def reads_trained(self, name: str) -> bool:
        return any(name in nodes for nodes in self.trained().values())

    def read_by_node(self, name: str) -> list[str]:
        """The stage's nodes that it has a gradient for."""
        tensors = (t for t in self.graph.tensors if name in t.consumers_with_gradient)
        return self.inside(tensor.producer for tensor in tensors)

    @cached_property
    def to_inputs(self) -> set[str]:
        """The nodes whose gradients lead to inputs."""
        found: set[str] = set()
        for node in self.nodes:
            sources = [
                t.producer for t in self.graph.tensors if node.name in t.consumers_with_gradient
            ]
            if any(self.of[source] < self.index or source in found for source in sources):
                found.add(node.name)
        return found

    @cached_property
    def aside(self) -> set[str]:
        """The nodes whose gradients lead to parameters alone, some of which the second half makes."""
        found: set[str] = set()
        for name in self.inside(node.name for node in self.nodes):
            to_parameters = self.reads_later(name) or not found.isdisjoint(self.read_by_node(name))
            if to_parameters and name not in self.to_inputs:
                found.add(name)
        return found

    @cached_property
    def passed(self) -> set[str]:
        """The nodes where the second half begins, and those that such depend on."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            readers = [
                r
                for t in self.graph.tensors
                if t.producer == node.name
                for r in t.consumers_with_gradient
            ]
            if self.begins(node.name) or not found.isdisjoint(readers):
                found.add(node.name)
        return found

    @cached_property
    def begun_at_outputs(self) -> bool:
        return any(self.roots(parameter) == {""} for parameter in self.trained())


@dataclass
class _Rank:
    """A rank at work; keys are (stage, microbatch, what, …)."""

    stages: dict[int, _Stage]
    recomputed: set[tuple[int, int]]
    live: _Live = field(default_factory=_Live)
    summed: set[int] = field(default_factory=set)
    halved: set[tuple[int, int]] = field(default_factory=set)
    split: set[tuple[int, int]] = field(default_factory=set)
    done: set[tuple[int, int]] = field(default_factory=set)
    frames: dict[Key, set[tuple[Key, int]]] = field(default_factory=dict)

    def forward(self, stage: _Stage, microbatch: int, run: str) -> None:
        done: set[str] = set()
        for spread in stage.spreads:
            self.live.hold((stage.index, microbatch, run, *spread.key), spread.size)
            self.live.need(0)
        for node in stage.nodes:
            for index in stage.beginning(node.name):
                self.live.hold(
                    (stage.index, microbatch, "region's copies", index),
                    stage.written(stage.regions[index]),
                )
            made = [(key, form) for key, form in stage.every_form() if form.made == node.name]
            for key, form in made:
                if not form.waits:
                    self.live.hold((stage.index, microbatch, "form", *key), form.size)
            beside = max((form.beside for _, form in made if not form.waits), default=0)
            self._work(node.forward_peak_bytes, node.workspace_bytes, beside)
            done.add(node.name)
            for storage in stage.made(node):
                self.live.hold(
                    (stage.index, microbatch, run, storage), stage.graph.storages[storage]
                )
            self._settle(
                stage, microbatch, run, [(key, form) for key, form in made if form.waits], done
            )
            self._let_go(stage, microbatch, run, done)
            self.live.need(0)
            for index, region in enumerate(stage.regions):
                if region[-1] == node.name and not stage.is_needed(index):
                    self.live.drop(stage.index, microbatch, "region's copies", index)
        for key, size in stage.copies.items():
            self.live.hold((stage.index, microbatch, run, *key), size)
        self.live.need(0)
        self._let_go(stage, microbatch, run, set(stage.order))

    def _let_go(self, stage: _Stage, microbatch: int, run: str, done: set[str]) -> None:
        for storage in stage.own():
            if stage.forgotten(storage, done):
                self.live.drop(stage.index, microbatch, run, storage)
        for spread in stage.spreads:
            if not spread.holders and not spread.sent and spread.until <= done:
                self.live.drop(stage.index, microbatch, run, *spread.key)

    def _settle(
        self,
        stage: _Stage,
        microbatch: int,
        kind: str,
        made: Sequence[tuple[Key, _Form]],
        done: set[str],
    ) -> None:
        """At the end of a run: one form after the other; a storage goes with its last unless the run was given it."""
        if not made:
            return
        end = made[0][1].made
        run = stage.run(end)
        gone = [storage for storage in stage.own() if stage.forgotten(storage, done)]
        given = [storage for storage in gone if run in stage.given_to(storage)]
        waiting = [form.storage for _, form in made]
        for storage in gone:
            if storage not in given and storage not in waiting:
                self.live.drop(stage.index, microbatch, kind, storage)
        self.live.need(0)
        for key, form in sorted(
            made, key=lambda pair: min(run.index(n) for n in pair[1].savers if n in run)
        ):
            self.live.hold((stage.index, microbatch, "form", *key), form.size)
            self.live.need(form.beside)
            waiting.remove(form.storage)
            if form.storage in gone and form.storage not in (*given, *waiting):
                self.live.drop(stage.index, microbatch, kind, form.storage)

    def _work(self, rise: int, scratch: int, beside: int = 0) -> None:
        """What begins to live in a node is part of its rise; one that takes nothing does not run."""
        self.live.need(beside + (rise + scratch if rise else 0))

    def forget(self, stage: _Stage, microbatch: int) -> None:
        """Keeps only the outputs of a forward."""
        for storage in stage.own():
            if not stage.sent(storage):
                self.live.drop(stage.index, microbatch, "kept", storage)
        for spread in stage.spreads:
            self.live.drop(stage.index, microbatch, "kept", *spread.key)
        for key, size in stage.messages.items():
            self.live.drop(stage.index, microbatch, "kept", *key)
            self.live.hold((stage.index, microbatch, "bare", *key), size)

    def backward(self, stage: _Stage, microbatch: int, kind: Kind) -> None:
        first = kind is not Kind.BACKWARD_WEIGHT and (kind is Kind.BACKWARD or stage.splits)
        second = kind is not Kind.BACKWARD_INPUT
        whole = kind is Kind.BACKWARD or not stage.splits
        for node in reversed(stage.nodes if first or second else []):
            if node.saves_at != "never":
                self._recompute(stage, microbatch, stage.frame_of(node.name))
            for key, form in stage.every_form() if kind is Kind.BACKWARD else ():
                if form.back == node.name:
                    self.live.hold(
                        (stage.index, microbatch, "copy", *key), stage.graph.storages[form.storage]
                    )
                    self.live.need(form.beside)
            self._work(self._rise(stage, node, whole, kind), node.workspace_bytes)
            if first or (second and whole):
                self._flow(stage, microbatch, node.name, hold=not whole)
            elif second:
                self._release(stage, microbatch, node.name)
            if first and not whole:
                for name in stage.early():
                    if stage.trained()[name][-1] == node.name:
                        self.live.sizes[stage.index, microbatch, "early", name] = stage.size(name)
            if second:
                self._sum(stage, node, whole=whole)
                again = (stage.index, microbatch) in self.recomputed
                is_stripped = kind is Kind.BACKWARD_WEIGHT and again
                for storage in stage.own():
                    goes = is_stripped or not stage.sent(storage)
                    if goes and stage.holders(storage)[:1] == [node.name]:
                        self.live.drop(stage.index, microbatch, "kept", storage)
                for spread in stage.spreads:
                    if (is_stripped or not spread.sent) and spread.holders[:1] == [node.name]:
                        self.live.drop(stage.index, microbatch, "kept", *spread.key)
                for key, form in stage.every_form():
                    if form.savers[0] == node.name:
                        self.live.drop(stage.index, microbatch, "form", *key)
                        self.live.drop(stage.index, microbatch, "copy", *key)
                for index in stage.beginning(node.name):
                    self.live.drop(stage.index, microbatch, "region's copies", index)
                self._take(stage, microbatch, stage.frame_of(node.name), ("node", node.name))
            self.live.need(
                stage.met(node.name, hold=not whole) if first or (second and whole) else 0
            )
            if second and not whole:
                late = (name for name in stage.trained() if name not in stage.early())
                self.live.need(
                    sum(2 * stage.size(name) for name in late if stage.adds_anew(name, node.name))
                )
        if kind is Kind.BACKWARD_INPUT:
            self._drop(stage, microbatch)
        if first or (second and whole):
            self._return(stage, microbatch, hold=not whole)
        if kind is Kind.BACKWARD_INPUT:
            self._drop_outputs(stage, microbatch)
        if second:
            self.done.add((stage.index, microbatch))
            self.halved.discard((stage.index, microbatch))
            self._finish(stage, microbatch)
        else:
            self.halved.add((stage.index, microbatch))
            self.split.add((stage.index, microbatch))
        self._hand_over(stage.index, microbatch)
        self._hand_over(stage.index - 1, microbatch)

    def _recompute(self, stage: _Stage, microbatch: int, frame: int | None) -> None:
        """The forward of a region, unless it ran again before; first that of the region around it: it has its inputs.

        Torch's rules: what nodes save is put aside for the innermost region, and what a region reads for the one around
        it, before it runs. A run ends when all is put aside.
        """
        if frame is None or (stage.index, microbatch, frame) in self.frames:
            return
        outer = stage.frame(stage.regions[frame])
        self._recompute(stage, microbatch, outer)
        aside = self.frames[stage.index, microbatch, frame] = set()
        packs, done = stage.packs(frame), set[str]()
        for number, name in enumerate(stage.regions[frame]):
            packs = self._put_aside(stage, aside, packs, (number, False))
            if not packs:
                break
            node = stage.graph.by_name[name]
            self._work(node.forward_peak_bytes, node.workspace_bytes)
            done.add(name)
            for storage in stage.made(node):
                self.live.hold(
                    (stage.index, microbatch, "again", frame, storage),
                    stage.graph.storages[storage],
                )
            packs = self._put_aside(stage, aside, packs, (number, True))
            self._sweep(stage, microbatch, frame, done)
            self.live.need(0)
            if not packs:
                break
        self._sweep(stage, microbatch, frame, set(stage.order))
        self._take(stage, microbatch, outer, ("region", frame))

    @staticmethod
    def _put_aside(
        stage: _Stage,
        aside: set[tuple[Key, int]],
        packs: Sequence[tuple[int, bool, Key, Sequence[int]]],
        moment: tuple[int, bool],
    ) -> Sequence[tuple[int, bool, Key, Sequence[int]]]:
        """Does it for this moment; returns what is still to come."""
        for _, _, who, storages in (pack for pack in packs if pack[:2] == moment):
            if who[0] == "node" or stage.is_needed(who[1]):
                aside.update((who, storage) for storage in storages)
        return [pack for pack in packs if pack[:2] > moment]

    def _take(self, stage: _Stage, microbatch: int, frame: int | None, who: Key) -> None:
        """What was put aside is there only once."""
        aside = self.frames.get((stage.index, microbatch, frame), set())
        aside.difference_update([each for each in aside if each[0] == who])
        for index, _ in enumerate(stage.regions):
            self._sweep(stage, microbatch, index, set(stage.order))

    def _sweep(self, stage: _Stage, microbatch: int, frame: int, done: set[str]) -> None:
        """Lets go of what a region's run made if it is put aside nowhere, and read only by what is `done`."""
        for storage in stage.own():
            needed = any(
                (stage.index, microbatch) == key[:2] and stage.home(key[2], storage) == frame
                for key, aside in self.frames.items()
                if storage in {each[1] for each in aside}
            )
            if not needed and stage.read_by(storage, done):
                self.live.drop(stage.index, microbatch, "again", frame, storage)

    def _rise(self, stage: _Stage, node: Node, whole: bool, kind: Kind) -> int:
        if whole:
            return node.backward_peak_bytes
        if kind is Kind.BACKWARD_INPUT:
            later = set(node.parameters) - set(stage.early())
            return max(
                0, node.backward_peak_bytes - sum(stage.size(name, trained=True) for name in later)
            )
        own = (g for g in stage.graph.gradients if g.producer == node.name and not g.is_sum)
        fresh = (g for g in own if g.last not in stage.aside or stage.captors(g))
        made = sum(gradient.bytes for gradient in fresh)
        made += sum(
            stage.size(parameter) for parameter in stage.early() if parameter in node.parameters
        )
        runs = stage.begins(node.name) or node.name in stage.aside
        return max(0, node.backward_peak_bytes - made) if runs else 0

    def _flow(self, stage: _Stage, microbatch: int, node: str, *, hold: bool) -> None:
        flows = list(stage.flows(hold=hold))
        for key, size, maker, _ in flows:
            if maker == node:
                self.live.sizes[(stage.index, microbatch, *key)] = size
        for key, _, _, last in flows:
            if last == node and not (hold and stage.waits(key)):
                self.live.drop(stage.index, microbatch, *key)

    def _release(self, stage: _Stage, microbatch: int, node: str) -> None:
        for key, _, _, _ in stage.flows(hold=True):
            if stage.waits(key) == node:
                self.live.drop(stage.index, microbatch, *key)
        found = [(number, g) for number, g in stage.gradients() if g.last in stage.aside]
        aside = [(number, g) for number, g in found if not stage.captors(g)]
        for number, gradient in aside:
            if gradient.producer == node:
                self.live.sizes[stage.index, microbatch, "aside", number] = gradient.bytes
        for number, gradient in aside:
            if gradient.last == node:
                self.live.drop(stage.index, microbatch, "aside", number)

    def _sum(self, stage: _Stage, node: Node, *, whole: bool) -> None:
        """Gradients of parameters: those of the first backward stay, others are made and added.

        Those that a first half made are copied, or added, when all else is done.
        """
        early = () if whole else stage.early()
        for name in early if stage.index not in self.summed and node is stage.nodes[0] else ():
            self.live.sizes[stage.index, "gradient", name] = stage.size(name)
        for name, readers in stage.trained().items():
            if name in early:
                continue
            key = (stage.index, "gradient" if stage.index not in self.summed else "added", name)
            if readers[-1] == node.name and (key[1] == "gradient" or len(readers) > 1):
                self.live.sizes[key] = stage.size(name)
            if readers[0] == node.name and key[1] == "added":
                self.live.drop(*key)

    def _drop(self, stage: _Stage, microbatch: int) -> None:
        """No second half comes by but at nodes with parameters and those before: what only others saved is let go."""
        for storage in stage.own():
            savers = stage.savers(storage)
            if savers and not stage.sent(storage) and not self._is_passed(stage, savers):
                self.live.drop(stage.index, microbatch, "kept", storage)
        for spread in stage.spreads:
            if spread.savers and not spread.sent and not self._is_passed(stage, spread.savers):
                self.live.drop(stage.index, microbatch, "kept", *spread.key)

    def _drop_outputs(self, stage: _Stage, microbatch: int) -> None:
        """Those that no second half needs and that were computed again: what was sent are those of the first forward.

        And those that are handed over to the next stage, on the same rank: it may need them longer.
        """
        if (stage.index, microbatch) not in self.recomputed and stage.index + 1 not in self.stages:
            return
        for storage in filter(stage.sent, stage.own()):
            if not self._is_passed(stage, stage.savers(storage)):
                self.live.drop(stage.index, microbatch, "kept", storage)
        for spread in stage.spreads:
            if spread.sent and not self._is_passed(stage, spread.savers):
                self.live.drop(stage.index, microbatch, "kept", *spread.key)
        for key in stage.copies:
            self.live.drop(stage.index, microbatch, "kept", *key)

    @staticmethod
    def _is_passed(stage: _Stage, savers: Sequence[str]) -> bool:
        at_outputs = stage.begun_at_outputs or not stage.splits
        return bool(savers) and (at_outputs or any(saver in stage.passed for saver in savers))

    def _is_wanted(self, stage: _Stage, microbatch: int, key: Key) -> bool:
        """Whether the next stage of the rank needs an output in its second half, or sends it on."""
        behind = self.stages[stage.index + 1]
        is_half = (behind.index, microbatch) in self.halved
        return any(
            behind.hands_on(name) or (is_half and behind.wants(name))
            for name in stage.lying_in(key)
        )

    def _return(self, stage: _Stage, microbatch: int, *, hold: bool) -> None:
        """The gradients of what is read are memory of its own, others lie in what was received."""
        parts = stage.parts if hold else {}
        sizes = {tensor.producer: tensor.gradient_bytes for tensor in stage.graph.tensors}
        for index, (name, number) in enumerate(parts.items()):
            self.live.hold((stage.index, microbatch, "part", name), sizes[name])
            self.live.need(0)
            if number not in [*list(parts.values())[index + 1 :], *stage.homes(hold=hold).values()]:
                self.live.drop(stage.index, microbatch, "complete", number)
        self.live.drop(stage.index, microbatch, "part")
        self.live.drop(stage.index, microbatch, "complete")
        for home, (size, _) in stage.given_back(hold=hold).items():
            self.live.sizes[stage.index, microbatch, "returned", home] = size
        self.live.need(0)

    def _hand_over(self, index: int, microbatch: int) -> None:
        """Of what this stage and the next, on the same rank, gave each other stays what one of them still needs."""
        here, there = (index, microbatch), (index + 1, microbatch)
        before, behind = self.stages.get(index), self.stages.get(index + 1)
        if before is None or behind is None or not {here} & (self.halved | self.done):
            return
        self.live.drop(index, microbatch, "bare")
        for key, size in before.messages.items():
            is_own = (*here, "kept", *key) in self.live.sizes and here not in self.recomputed
            self.live.drop(*here, "handed", *key)
            if self._is_wanted(before, microbatch, key) and not is_own:
                self.live.hold((*here, "handed", *key), size)
        for home, (_, names) in behind.given_back(hold=there in self.split).items():
            relayed = any(before.relays(name) for name in names)
            retained = here in self.halved and any(map(before.retains, names))
            if not (relayed or retained or (there in self.halved and behind.lends(home))):
                self.live.drop(*there, "returned", home)

    def _finish(self, stage: _Stage, microbatch: int) -> None:
        """The microbatch is done: only what went to another rank stays until the step ends."""
        for node in stage.nodes if stage.index not in self.summed else []:
            if not node.parameters:
                self.live.hold((stage.index, "gradient", node.name), node.parameter_bytes)
        assert not any(
            self.frames.pop(key)
            for key in list(self.frames)
            if key[:2] == (stage.index, microbatch)
        )
        for name in stage.trained() if stage.index not in self.summed else ():
            if any(name in self.stages[other].trained() for other in self.summed - {stage.index}):
                self.live.drop(
                    stage.index, "gradient", name
                )  # it was added to what others of the rank have
        self.summed.add(stage.index)
        self.live.drop(stage.index, microbatch, "kept")
        self.live.drop(stage.index, microbatch, "early")
        self.live.drop(stage.index, microbatch, "bare")
        self.live.drop(stage.index, microbatch, "stage's copies")
        for key, size in stage.messages.items() if stage.index + 1 not in self.stages else ():
            self.live.hold((stage.index, microbatch, "sent", *key), size)

    def perform(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        assert microbatch is not None
        match action.kind:
            case Kind.FORWARD:
                if (action.stage, microbatch) in self.recomputed:
                    everything = stage.written(node.name for node in stage.nodes)
                    self.live.hold((stage.index, microbatch, "stage's copies"), everything)
                self.forward(stage, microbatch, "kept")
                if (action.stage, microbatch) in self.recomputed:
                    self.forget(stage, microbatch)
            case Kind.RECOMPUTE:
                self.forward(stage, microbatch, "kept")
            case _:
                self.backward(stage, microbatch, action.kind)
        self.live.need(0)


def highest(
    graph: CostGraph,
    cut: Sequence[Sequence[str]],
    row: Sequence[Action],
    microbatches: int,
    regions: Mapping[int, Sequence[Sequence[str]]] = NONE,
    saving: Mapping[int, Sequence[Saving]] = NO_SAVING,
) -> int:
    """The most bytes that the rank of `row` holds; without an optimizer. `regions` and `saving` are by stage."""
    row = [action for action in row if action.kind in COMPUTE]
    stages = {
        index: _Stage(graph, cut, index, regions.get(index, ()), saving.get(index, ()))
        for index in sorted({action.stage for action in row})
    }
    again = {
        (a.stage, a.microbatch)
        for a in row
        if a.kind is Kind.RECOMPUTE and a.microbatch is not None
    }
    rank = _Rank(stages, again)
    for stage in stages.values():
        _settle(rank.live, stage, set(stages), microbatches)
    for action in row:
        rank.perform(action)
    return rank.live.highest


def _settle(live: _Live, stage: _Stage, rank: set[int], microbatches: int) -> None:
    """What is there all the time: parameters, the minibatch, and buffers for what comes from other ranks.

    A parameter is one for all stages of the rank that read it.
    """
    graph, index = stage.graph, stage.index
    for name in {name for node in stage.nodes for name in node.parameters}:
        live.sizes["parameter", name] = stage.size(name)
    for node in stage.nodes:
        if not node.parameters:
            live.hold(("anonymous", index, node.name), node.parameter_bytes)
        live.hold(("input", index, node.name), node.input_bytes * microbatches)
    for tensor in graph.tensors:
        if index - 1 not in rank and stage.arrives(tensor.producer, tensor.consumers):
            live.hold(("received", index, tensor.producer), tensor.bytes * microbatches)
        if index + 1 not in rank and stage.leaves(tensor.producer, tensor.consumers):
            live.hold(
                ("received gradient", index, tensor.producer), tensor.gradient_bytes * microbatches
            )
