"""The cost graph: what a model's nodes cost, and the tensors between them. Needs no PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from typing import Literal

from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.encodings import ELEMENT_BYTES, Use
from pipecompile.ir.serialization import NonNegative, Value

__all__ = [
    "FUSED_ATTENTION",
    "Content",
    "CostGraph",
    "FusedType",
    "GradientStorage",
    "Node",
    "Parameter",
    "SavesAt",
    "Tensor",
    "TimeUnit",
]

FusedType = Literal["bfloat16", "float16", "float32"]
SavesAt = Literal["never", "before", "after"]
TimeUnit = Literal["ns", "relative"]
"""What times are in: nanoseconds of a device, or units that only compare nodes with one another."""
FUSED_ATTENTION: tuple[FusedType, ...] = ("bfloat16", "float16", "float32")
"""The types for which PyTorch fuses attention on GPUs of compute capability 8.0 and above."""


class Node(Value, frozen=True, kw_only=True):
    """One operation for one microbatch; sizes are in bytes.

    `saved` are the storages (indices into `CostGraph.storages`) that its backward keeps, and
    `uses` what for, by saved tensor, where that is known. `parameters` are the canonical names
    that the node reads; the gradients of `view_gradients` are views, so that a sum with others
    needs new memory; those of `gradients_by_input_backward` are made by an input backward if that
    leads through the node. One that `has_ordered_gradients` gives several for a tensor (`h * h`),
    or one that lies in memory otherwise than the tensor, as their sum then does: it keeps its place
    in that. The halves of the backward are None where they were not measured.

    `forward_peak_bytes` and `backward_peak_bytes` are the most that lives while it runs, above
    what lived when it began; `workspace_bytes` is the workspace of its kernels besides, in either
    direction. `input_bytes` is what it reads of the minibatch. Its forward hands tensors to its
    backward before its kernels run, after them, or never (`saves_at`). Only a node that
    `is_recomputable` may run twice for a microbatch; `buffer_copies` are the sizes of the buffers
    that are then copied before the forward, as nodes write to them (those of a group are with one
    of its nodes). `per_step_ns` is its share of what a step takes once: gradients are divided.
    `kv_token_bytes` is what its attention adds to a KV cache for each token, 0 if it is none. If
    it `is_copyable`, each stage that reads its value may run it.
    """

    name: str
    forward_ns: NonNegative
    backward_ns: NonNegative
    parameter_bytes: NonNegative
    # For `pipecompile partition`, whose graphs may come from elsewhere. The memory of a plan is
    # counted from `saved`, which says which storages nodes share.
    saved_bytes: NonNegative
    group: str | None
    backward_input_ns: NonNegative | None = None
    backward_weight_ns: NonNegative | None = None
    per_step_ns: NonNegative = 0
    forward_peak_bytes: NonNegative = 0
    backward_peak_bytes: NonNegative = 0
    workspace_bytes: NonNegative = 0
    saves_at: SavesAt = "after"
    is_recomputable: bool = True
    is_copyable: bool = False
    input_bytes: NonNegative = 0
    kv_token_bytes: NonNegative = 0
    saved: tuple[NonNegative, ...] = ()
    uses: tuple[tuple[Use, ...], ...] = ()
    buffer_copies: tuple[NonNegative, ...] = ()
    parameters: tuple[str, ...] = ()
    view_gradients: tuple[str, ...] = ()
    gradients_by_input_backward: tuple[str, ...] = ()
    has_ordered_gradients: bool = False
    module: str = ""
    operator: str = ""
    source: str = ""

    @property
    def runs_once(self) -> bool:
        """Whether it computes something, and may not do so twice for a microbatch."""
        return not self.is_recomputable and self.operator not in ("placeholder", "output")


class Content(Value, frozen=True, kw_only=True):
    """The elements of a storage that backwards keep; `dtype` is torch's name without `torch.`.

    `is_mask`: each element is zero or one constant, as those of booleans always are. Elements that
    are indices are below `bound`.
    """

    dtype: str
    is_mask: bool = False
    bound: NonNegative | None = None


# For x of shape (4, 6), contiguous and in float32:
#
#     x          travels as it lies                                              96 bytes
#     x.t()      is_permuted: it travels as x lies, and is seen through a view   96 bytes
#     x[:, ::2]  is not dense: 12 elements travel, and are laid out with their   48 bytes
#                strides (6, 2) where they are read: 3 · 6 + 2 · 2 + 1 = 23      92 bytes there
class Tensor(Value, frozen=True, kw_only=True):
    """The value of `producer`: one transfer, however many consumers there are.

    Its gradient flows back if that has any bytes; `consumers_without_gradient` give none. A
    tensor that `is_permuted` has its dimensions in another order in memory: it travels in that
    order and is seen through a view. One that is not dense (a view with gaps, or one that repeats
    elements) travels as a copy; a stage that reads it makes another copy with the original
    strides, of `strided_copy_bytes`. A gradient that repeats elements, since
    `gradient_expanded_by` is its only source, would lose that as a message, and sums over it
    would be rounded differently.

    A node that returns its argument as it is, as a dropout of 0 does, makes no other tensor: the
    gradients of all readers form one sum. Its tensor `sums_with` that of an earlier producer, or
    with a parameter, `sums_with_parameter`.
    """

    producer: str
    consumers: tuple[str, ...]
    bytes: NonNegative
    gradient_bytes: NonNegative
    storage: NonNegative | None = None
    is_permuted: bool = False
    is_dense: bool = True
    strided_copy_bytes: NonNegative = 0
    gradient_expanded_by: str | None = None
    sums_with: str | None = None
    sums_with_parameter: str | None = None
    consumers_without_gradient: tuple[str, ...] = ()

    @property
    def consumers_with_gradient(self) -> tuple[str, ...]:
        """The consumers that give a gradient for it."""
        return (
            tuple(name for name in self.consumers if name not in self.consumers_without_gradient)
            if self.gradient_bytes
            else ()
        )


# A value h with readers a, b and c. Autograd begins with the last one, and adds in place:
#
#     backward of   c         b         a         h
#     storage 0     ├─────────┤                       the gradient that c gives
#     storage 1               ├─────────┤             is_sum, with that of b; continues 0
#     storage 2                         ├─────────┤   is_sum, with that of a; continues 1
class GradientStorage(Value, frozen=True, kw_only=True):
    """A storage of the backward that outlives the node it is made in.

    It lives from the backward of `producer` to that of `last`; `readers` are the nodes in between
    whose backwards read it. At the nodes `captured_at`, gradients of parameters branch off from
    it, or gradients of several inputs of which some may lead to parameters alone: a split
    backward holds it there until its weight backward. Each of `edges` is a node and a reader: the
    gradient that the reader's backward makes for the node lies in this storage.

    A storage that `is_sum` is the sum of the gradients of several readers, made when the last of
    them is done. Where others are added to a gradient in place, its life ends and that of the sum
    begins, which `continues` it (the index of an earlier one) in the same memory. One that
    `is_copy` has other strides than what it copies, as what comes from a later stage has.
    """

    producer: str
    last: str
    bytes: NonNegative
    readers: tuple[str, ...] = ()
    captured_at: tuple[str, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()
    is_sum: bool = False
    is_copy: bool = False
    continues: NonNegative | None = None


class Parameter(Value, frozen=True, kw_only=True):
    """A parameter or buffer by its first name; `aliases` are the other names of a tied one.

    Buffers are not `trainable`.
    """

    name: str
    bytes: NonNegative
    trainable: bool
    aliases: tuple[str, ...] = ()
    shape: tuple[NonNegative, ...] | None = None


# dict=True, because a cached_property needs a __dict__.
class CostGraph(Value, frozen=True, kw_only=True, dict=True):
    """The planner's whole input: nodes in the order of the forward, and the tensors between them.

    `fingerprint` is the SHA-256 of the captured graph, empty for a graph that comes from elsewhere.
    Times (`_ns`) are in `time_unit`, and `cost_notes` say what to know of how they were found.
    `storages` are sizes in bytes: several nodes may save views of one storage, which is then held
    once; `contents` are those of the same storages, None where they are not known. `allocator` says
    what holds them on the device, and `fused_attention` for which data types the device fuses
    attention. The nodes of each set in `recomputed_together` are recomputed together or not at all.
    No stage of a cut has the nodes `copied` for itself: each that reads their values runs them
    (copied_nodes.py).
    """

    schema: Literal["pipecompile/cost-graph/1"] = "pipecompile/cost-graph/1"
    fingerprint: str = ""
    time_unit: TimeUnit = "ns"
    allocator: AllocatorName = "cuda"
    fused_attention: tuple[FusedType, ...] = FUSED_ATTENTION
    nodes: tuple[Node, ...]
    tensors: tuple[Tensor, ...]
    storages: tuple[NonNegative, ...] = ()
    contents: tuple[Content | None, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    gradients: tuple[GradientStorage, ...] = ()
    recomputed_together: tuple[tuple[str, ...], ...] = ()
    cost_notes: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # First of all: `by_name` is a dict, and would hide a second node of the same name.
        _refuse_duplicates("node", (node.name for node in self.nodes))
        _refuse_duplicates("tensor of", (tensor.producer for tensor in self.tensors))
        _refuse_duplicates("parameter", (parameter.name for parameter in self.parameters))
        for tensor in self.tensors:
            self._check_tensor(tensor)
        for index, gradient in enumerate(self.gradients):
            self._check_gradient(index, gradient)
        self._check_contents()
        self._check_names("the copied nodes", self.copied)
        for node in self.nodes:
            self._check_node(node)

    def _check_tensor(self, tensor: Tensor) -> None:
        owner = f"tensor of {tensor.producer!r}"
        before = () if tensor.sums_with is None else (tensor.sums_with,)
        self._check_names(owner, (tensor.producer, *tensor.consumers, *before))
        if tensor.gradient_expanded_by not in (None, *tensor.consumers):
            raise ValueError(
                f"{owner} is expanded by {tensor.gradient_expanded_by!r}, not a consumer"
            )
        if tensor.storage is not None:
            self._check_storages(owner, (tensor.storage,))

    def _check_gradient(self, index: int, gradient: GradientStorage) -> None:
        between = (*gradient.readers, *gradient.captured_at, *chain(*gradient.edges))
        self._check_names("a gradient", (gradient.producer, gradient.last, *between))
        before = gradient.continues
        if before is None:
            return
        # Sums grow in place: each takes over the memory of the gradient that ends where it begins.
        if before >= index or self.gradients[before].last != gradient.producer:
            raise ValueError(
                f"gradient {index} continues {before}, which does not end where it begins"
            )

    def _check_contents(self) -> None:
        if self.contents and len(self.contents) != len(self.storages):
            raise ValueError(
                f"there are {len(self.storages)} storages, but contents of {len(self.contents)}"
            )
        for content in self.contents:
            if content is not None and content.dtype not in ELEMENT_BYTES:
                raise ValueError(
                    f"contents of {content.dtype!r} are not known; leave them out (null)"
                )

    def _check_node(self, node: Node) -> None:
        self._check_storages(f"node {node.name!r}", node.saved)
        if node.uses and len(node.uses) != len(node.saved):
            raise ValueError(
                f"node {node.name!r} saves {len(node.saved)} storages, "
                f"but has {len(node.uses)} uses"
            )
        for parameter in set(node.parameters) - self.parameter_by_name.keys():
            raise ValueError(
                f"node {node.name!r} reads {parameter!r}, which is not among the parameters"
            )
        for parameter in set(node.view_gradients) - set(node.parameters):
            raise ValueError(
                f"node {node.name!r} gives a gradient for {parameter!r}, which it does not read"
            )

    def _check_names(self, owner: str, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.by_name:
                raise ValueError(f"{owner} names {name!r}, which is not a node")

    def _check_storages(self, owner: str, storages: Iterable[int]) -> None:
        for storage in storages:
            if storage >= len(self.storages):
                raise ValueError(
                    f"{owner} names storage {storage}, but there are {len(self.storages)}"
                )

    def on_rank(self, rank: int) -> CostGraph:
        """Return the costs on a rank: these, as ranks are alike unless costs say otherwise."""
        # UnequalCosts has other costs on each rank; whoever asks need not know which of the two
        # it has.
        return self

    @cached_property
    def by_name(self) -> dict[str, Node]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    @cached_property
    def copied_set(self) -> frozenset[str]:
        """The names of the copied nodes."""
        return frozenset(self.copied)

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of each node: its index in the order of the forward."""
        return {node.name: place for place, node in enumerate(self.nodes)}

    @cached_property
    def parameter_by_name(self) -> dict[str, Parameter]:
        """Parameters and buffers by their canonical name."""
        return {parameter.name: parameter for parameter in self.parameters}


def _refuse_duplicates(what: str, names: Iterable[str]) -> None:
    for name, count in Counter(names).items():
        if count > 1:
            raise ValueError(f"{what} {name!r} appears {count} times")
