"""The observer of one training step on fake tensors: no real memory is touched.

It runs the graph forward node by node, then backward, under a storage tracker. Ticks 0 … n − 1 are
the forwards of the n nodes in order; ticks n … 2n − 1 are their backwards, the last node's first:

    node        a   b   c
    forward     0   1   2
    backward    5   4   3

Called by `profile`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import Node, saved_tensors_hooks

from pipecompile.cost_models.protocol import NodeCall
from pipecompile.errors import CaptureError
from pipecompile.graph.autograd_nodes import (
    GradientEdge,
    autograd_nodes_since,
    gradient_edge,
    known_uses,
)
from pipecompile.graph.layout import dense_order, is_dense, strides_with_gaps
from pipecompile.graph.model_state import named_state
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import size_bytes
from pipecompile.ir.encodings import ELEMENT_BYTES, Use
from pipecompile.ir.graph import Content, GradientStorage, SavesAt
from pipecompile.profiling.backward_hooks import backward_advice
from pipecompile.profiling.gradient_destinations import GradientDestinations, Sources
from pipecompile.profiling.kernel_workspace import Workspace
from pipecompile.profiling.node_caller import NodeCaller
from pipecompile.profiling.observation import NodeObservation, StepObservation
from pipecompile.profiling.storage_tracker import StorageLiveRange, StorageTracker
from pipecompile.profiling.workload import Workload

__all__ = ["observe"]

# AccumulateGrad nodes, which add a gradient to a parameter's, have a sequence number near 2**64.
_LARGEST_SEQUENCE = 2**32


def observe(workload: Workload, workspace: Workspace) -> StepObservation:
    """Run `workload`, whose tensors are fake, forward and backward once; return what was seen.

    `workspace` is the rule for kernels of the device that it stands for. Raise CaptureError if the
    backward cannot run on fake tensors.
    """
    observer = _Observer(workload, workspace)
    try:
        with torch.enable_grad():
            observer.interpret()
            observer.differentiate()
        return observer.observation()
    finally:
        observer.destinations.remove_hooks()


class _PackedTensor:
    """A saved tensor as the hook that saves it leaves it."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.shape = value, value.shape


class _Observer(NodeCaller):
    """Interprets a workload and collects an observation of each node, in order."""

    def __init__(self, workload: Workload, workspace: Workspace) -> None:
        super().__init__(workload)
        self.nodes: list[tuple[str, NodeObservation]] = []
        self.first_sequence: list[int] = []  # autograd's sequence number when each node begins
        self.state = [value for _, value in named_state(workload.module)]
        self.tracker = StorageTracker(self.state, workspace)
        self.roots: tuple[Tensor, ...] = ()
        # By node, for each tensor of its value, the first node whose value that is.
        self.first_nodes: dict[str, list[str | None]] = {}
        self.contents: dict[int, Content | None] = {}  # None: not plain elements
        self.destinations = GradientDestinations(self.tracker)

    def perform(self, call: NodeCall) -> Any:
        """Run a node forward under the tracker and observe it."""
        self.tracker.enter(len(self.nodes))
        self.first_sequence.append(torch._C._autograd._get_sequence_nr())
        # A write to an argument raises its version.
        versions = [argument._version for argument in call.arguments]
        # Before the node runs: one that works in place changes the autograd nodes of its arguments.
        sources, edges = self._sources(call.node), self._gradient_edges(call.node)
        value, uses, saves_at = self._run_and_note_saved(call)
        outputs = tensor_leaves(value)
        output_nodes = [output.grad_fn for output in outputs if output.grad_fn is not None]
        autograd_nodes = list(autograd_nodes_since(self.first_sequence[-1], output_nodes))
        self.destinations.follow(call.node.name, outputs, autograd_nodes, sources)
        differentiable = tuple(output for output in outputs if output.requires_grad)
        if call.node.op == "output":
            self.roots = differentiable
        single = outputs[0] if len(outputs) == 1 else None
        observation = NodeObservation(
            operator=call.operator,
            bytes=size_bytes(outputs),
            gradient_bytes=size_bytes(differentiable),
            storages=self.tracker.indices(outputs),
            is_permuted=single is not None and dense_order(single) != tuple(range(single.dim())),
            is_dense=single is None or is_dense(single),
            strided_copy_bytes=0 if single is None else _strided_copy_bytes(single),
            saved=tuple(uses),
            uses=tuple(uses.values()),
            saves_at=saves_at,
            parameters=tuple(self.workload.names[id(parameter)] for parameter in call.parameters),
            differentiable=call.differentiable,
            mutates=versions != [argument._version for argument in call.arguments],
            sums_with=self._note_first(call.node, value, edges),
        )
        self.nodes.append((call.node.name, observation))
        return value

    def _sources(self, node: fx.Node) -> Sources:
        """Return the nodes that `node` reads, by the autograd nodes behind their values."""
        sources: dict[Node | None, list[str]] = defaultdict(list)
        for source in node.all_input_nodes:
            for value in tensor_leaves(self.env[source]):
                if value.grad_fn is not None and source.op != "get_attr":
                    sources[value.grad_fn].append(source.name)
        return sources

    def _gradient_edges(self, node: fx.Node) -> dict[GradientEdge, str]:
        """Return where the gradients of each tensor that `node` reads are summed, with the first
        node whose value that tensor is.
        """
        edges: dict[GradientEdge, str] = {}
        for source in node.all_input_nodes:
            leaves = tensor_leaves(self.env[source])
            # `get_attr` nodes are not observed: each is the first that has its parameter.
            firsts = self.first_nodes.get(source.name) or [source.name] * len(leaves)
            for leaf, first in zip(leaves, firsts, strict=True):
                edge = gradient_edge(leaf)
                if edge is not None and first is not None:
                    edges[edge] = first
        return edges

    def _note_first(
        self, node: fx.Node, value: Any, edges: Mapping[GradientEdge, str]
    ) -> str | None:
        """Return the first node whose value is, to autograd, that of `node`; None without one.

        A collection that has such a value is no sum by itself: the node that takes it out is.
        """
        own = node.name if isinstance(value, Tensor) else None
        firsts: list[str | None] = []
        for leaf in tensor_leaves(value):
            edge = gradient_edge(leaf)
            firsts.append(own if edge is None else edges.get(edge, own))
        self.first_nodes[node.name] = firsts
        return None if own is None or firsts == [own] else firsts[0]

    def _run_and_note_saved(
        self, call: NodeCall
    ) -> tuple[Any, dict[int, tuple[Use, ...]], SavesAt]:
        """Run a node.

        Return its value, the storages that its backward keeps with what for, and when it saves:
        "before" if the last saving came before all of its kernels.
        """
        saved: dict[int, list[_PackedTensor]] = {}
        count_before = self.tracker.kernel_count
        counts: list[int] = []  # how many kernels had run at each saving

        def pack(value: Tensor) -> _PackedTensor:
            # An object for each saving: a tensor that is saved twice may be saved for two uses.
            packed = _PackedTensor(value)
            for index in self.tracker.indices([value]):
                saved.setdefault(index, []).append(packed)
            counts.append(self.tracker.kernel_count)
            return packed

        with saved_tensors_hooks(pack, attrgetter("value")), self.tracker:
            value = super().perform(call)
        saves_at: SavesAt = "never"
        if counts:
            saves_at = "before" if counts[-1] == count_before else "after"
        return value, self._uses(value, saved), saves_at

    def _uses(
        self, value: Any, saved: Mapping[int, Sequence[_PackedTensor]]
    ) -> dict[int, tuple[Use, ...]]:
        """Return what each storage is saved for, by saved tensor, and note its content."""
        saved_values = [packed.value for tensors in saved.values() for packed in tensors]
        tensors = [*tensor_leaves(value), *saved_values]
        roots = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        uses: dict[int, Use] = {}
        bounds: dict[int, int] = {}
        for node in autograd_nodes_since(self.first_sequence[-1], roots):
            for packed, use, bound in known_uses(node, _PackedTensor):
                uses[id(packed)] = use
                if bound:
                    bounds[id(packed)] = bound
        for index, packed_tensors in saved.items():
            for packed in packed_tensors:
                self._note_content(index, packed.value, bounds.get(id(packed)))
        return {
            index: tuple(uses.get(id(packed), "other") for packed in packed_tensors)
            for index, packed_tensors in saved.items()
        }

    def _note_content(self, index: int, value: Tensor, bound: int | None) -> None:
        """Note what the elements of a saved storage are, as far as all savings of it agree."""
        content = self._content(index, value, bound)
        before = self.contents.setdefault(index, content)
        if before is None or content is None or before.dtype != content.dtype:
            # Views of several types, or not plain elements: no encoding fits.
            self.contents[index] = None
        else:
            self.contents[index] = content if before.bound is None else before

    def _content(self, index: int, value: Tensor, bound: int | None) -> Content | None:
        dtype = str(value.dtype).removeprefix("torch.")
        if value.layout != torch.strided or not value.numel() or dtype not in ELEMENT_BYTES:
            return None
        is_mask = dtype == "bool" or index in self.tracker.masks
        return Content(dtype=dtype, is_mask=is_mask, bound=bound)

    def differentiate(self) -> None:
        """Run backward from the loss, or from all outputs if there is no loss."""
        # This object must not hold the outputs while their backward runs.
        roots, self.roots = self.roots, ()
        if not roots:
            return
        # The gradients of the outputs come from elsewhere, so they do not count as made here.
        seeds = [torch.ones_like(root) for root in roots]
        self.tracker.exclude(seeds)
        self.tracker.tick_of = self._tick_of
        self.tracker.shared_shapes = self._shared_shapes()
        self.tracker.enter(len(self.nodes))
        try:
            with self.tracker:
                torch.autograd.backward(roots, seeds)
        except Exception as error:
            tick = max(self.tracker.tick, len(self.nodes))
            raise CaptureError(
                f"the backward of {self._name_at(tick)} does not run on fake tensors: "
                f"{type(error).__name__}: {error}{backward_advice(error)}"
            ) from error

    def _shared_shapes(self) -> set[torch.Size]:
        """Return the shapes of parameters that several nodes read."""
        # Their gradients may be summed over stages: the tracker needs to know these sums.
        readers = Counter(name for _, node in self.nodes for name in node.parameters)
        return {value.shape for value in self.state if readers[self.workload.names[id(value)]] > 1}

    def _tick_of(self, sequence: int) -> int | None:
        """Return the tick of the backward that runs the autograd node with this sequence number."""
        if sequence > self.first_sequence[-1] + _LARGEST_SEQUENCE:
            return None
        # Nodes that began at 0, 3 and 3: number 2 is of the first one, 3 of
        # the last; the second one, which made no autograd node, has none.
        return self._backward_tick(bisect_right(self.first_sequence, sequence) - 1)

    def _backward_tick(self, position: int) -> int:
        return 2 * len(self.nodes) - 1 - position

    def _name_at(self, backward_tick: int) -> str:
        return self.nodes[2 * len(self.nodes) - 1 - backward_tick][0]

    def observation(self) -> StepObservation:
        """Return what was seen in the whole step."""
        # Before the gradients of parameters are dropped: what has not died by now is one of these.
        gradients = self._gradients()
        for value in self.state:
            value.grad = None
        users = {node.name: tuple(node.users) for node in self.workload.graph.nodes}
        nodes = {
            name: self._completed(position, name, node, users[name])
            for position, (name, node) in enumerate(self.nodes)
        }
        contents = {
            index: content for index, content in self.contents.items() if content is not None
        }
        readers = self.destinations.readers
        expanded_by = {
            name: reader
            for name, reader in self.destinations.expanded_edges
            if readers[name] == {reader}
        }
        storages = tuple(live_range.bytes for live_range in self.tracker.live_ranges)
        return StepObservation(nodes, storages, contents, gradients, expanded_by)

    def _completed(
        self, position: int, name: str, node: NodeObservation, users: Sequence[fx.Node]
    ) -> NodeObservation:
        """Return the observation of a node with what is known after the backward."""
        peaks, workspace = self.tracker.peaks, self.tracker.workspace
        destinations = self.destinations
        forward, backward = position, self._backward_tick(position)
        giving = destinations.readers[name]
        # If no reader gives a gradient, the value has none, and no reader is an exception.
        silent = tuple(user.name for user in users if user.name not in giving) if giving else ()
        return replace(
            node,
            # A placeholder's value is a part of the minibatch, which is in memory before.
            forward_peak=0 if node.operator == "placeholder" else peaks[forward],
            backward_peak=peaks.get(backward, 0),
            workspace=max(workspace.get(forward, 0), workspace.get(backward, 0)),
            view_gradients=self._parameter_names(destinations.view_gradients[name]),
            gradients_by_input_backward=self._parameter_names(
                destinations.gradients_by_input_backward[name]
            ),
            has_ordered_gradients=name in destinations.ordered,
            consumers_without_gradient=silent,
        )

    def _parameter_names(self, ids: Iterable[int]) -> tuple[str, ...]:
        """Return the names of those leaves that are parameters; the others are inputs."""
        names = self.workload.names
        return tuple(names[leaf] for leaf in dict.fromkeys(ids) if leaf in names)

    def _gradients(self) -> tuple[GradientStorage, ...]:
        """Return storages of the backward that outlive their first tick, or that are captured."""
        gradients: list[GradientStorage] = []
        # By live range the index of its gradient; of one that is left out, that of the gradient
        # that it continues.
        positions: dict[int | None, int | None] = {None: None}
        for index, live_range in enumerate(self.tracker.live_ranges):
            continues = positions.get(live_range.continues)
            gradient = self._gradient(index, live_range, continues)
            positions[index] = continues if gradient is None else len(gradients)
            if gradient is not None:
                gradients.append(gradient)
        return tuple(gradients)

    def _gradient(
        self, index: int, live_range: StorageLiveRange, continues: int | None
    ) -> GradientStorage | None:
        """Return storage `index` as a gradient; None if it is none, or is freed at once."""
        born, died = live_range.born, live_range.died
        if born < len(self.nodes) or died is None:
            return None  # made in the forward, or the gradient of a parameter
        captured_at = tuple(dict.fromkeys(self.destinations.captured_at[index]))
        if died == born and not captured_at:
            return None
        readers = [self._name_at(tick) for tick in sorted(live_range.read_in) if tick < died]
        return GradientStorage(
            producer=self._name_at(born),
            last=self._name_at(died),
            bytes=live_range.bytes,
            readers=tuple(readers),
            captured_at=captured_at,
            edges=tuple(dict.fromkeys(self.destinations.edges[index])),
            is_sum=live_range.is_sum,
            is_copy=index in self.tracker.copies,
            continues=continues,
        )


def _strided_copy_bytes(value: Tensor) -> int:
    """Return the bytes of a copy with the strides of `value`; 0 if that is dense.

    A view of shape (2, 3) with strides (8, 1) spans 1 · 8 + 2 · 1 + 1 = 11 elements.
    """
    strides = strides_with_gaps(value)
    if strides is None or not value.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(value.shape, strides, strict=True))
    return (last + 1) * value.element_size()
