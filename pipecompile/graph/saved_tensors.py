"""What autograd saves in a run of nodes lies in another form between forward and backward.

    shelf = Shelf()                                                      # one for a stage
    with saving("mask", "relu", "pool", shelf=shelf, spared=parameters) as ends:
        value = ends(run(value))                                         # the forward; the backward is as ever

Policies by name. `relu` and `pool` are taken where they apply, then the first of the others that fits:

    mask       dropout's masks, and all else that is zero or one constant, as bits         exact
    relu       what ReLU keeps of its output, as bits, where no other node keeps it        exact
    pool       what pooling keeps of its input, as a size; its indices, as small integers  exact
    offload    everything in host memory                                                   exact
    half       float32 as bfloat16                                  a relative error of up to 2⁻⁸ in each element

Autograd calls a hook for each tensor that it saves, and another when the backward needs it. Between the two, `_Kept`
holds the tensor by reference, or its storage encoded. What is not as a policy expects stays by reference.

Without hooks autograd raises where a saved tensor was written to before the backward. With hooks it does not, so
`_Kept` does: an alias of the tensor, whose memory is let go, still shares its version counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipecompile.errors import InputError
from pipecompile.graph.encodings import Encoded, Encoder, half, mask, narrow, shape, sign
from pipecompile.graph.offload import Run, Traffic, move
from pipecompile.ir.encodings import POLICIES, POLICY_OF, Policy, Use

__all__ = ["Shelf", "known_uses", "made_since", "saving"]

T = TypeVar("T")

# Autograd's nodes of pooling, by how many dimensions they pool. Of the input their backwards read the layout alone.
_MAX_POOLS = {
    "MaxPool2DWithIndicesBackward0": 2,
    "MaxPool3DWithIndicesBackward0": 3,
    "AdaptiveMaxPool2DBackward0": 2,
    "AdaptiveMaxPool3DBackward0": 3,
}
_AVERAGE_POOLS = frozenset(
    {"AvgPool2DBackward0", "AvgPool3DBackward0", "AdaptiveAvgPool2DBackward0"}
)
_NOTHING = torch.empty(0)


class Shelf:
    """What the runs of one stage keep encoded: each storage once, whichever of them save views of it.

    `traffic` counts what was moved to the host and back. A write that no version counts, as through `.data`, between
    two savings of one storage is not seen; without a policy the first of them would be wrong for it.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        # By policy, storage, version and type. The key keeps a storage's address, not its memory, from being reused.
        self._shared: WeakValueDictionary[tuple[Policy, StorageWeakRef, int, torch.dtype], _Shared]
        self._shared = WeakValueDictionary()

    def encoded(self, value: Tensor, policy: Policy, encoder: Encoder) -> _Shared | None:
        """The storage of `value`, encoded now or before; None where it is not what `encoder` is for."""
        dtype = torch.uint8 if policy == "offload" else value.dtype
        key = policy, StorageWeakRef(value.untyped_storage()), value._version, dtype
        if (shared := self._shared.get(key)) is not None:
            shared.sharers += 1
        elif (encoded := encoder(_flat(value, dtype))) is not None:
            self._shared[key] = shared = _Shared(encoded)
        return shared


class _Shared:
    """An encoded storage, and how many saved tensors lie in it."""

    def __init__(self, encoded: Encoded) -> None:
        self._encoded = encoded
        self._restored: Tensor | None = None
        self.sharers = 1

    def restore(self) -> Tensor:
        """Its elements, which stay for the other sharers."""
        if self._restored is not None:
            return self._restored
        restored = self._encoded.restore()
        self._restored = restored if self.sharers > 1 else None
        return restored


class _Kept:
    """One saved tensor, from the hook of its saving to that of its use."""

    def __init__(self, value: Tensor) -> None:
        self.value = value.detach()  # the value itself would hold the node that holds this
        self._version = value._version
        self._shared: _Shared | None = None
        self.shape = value.shape

    def let_go(self, shared: _Shared) -> None:
        """Its elements are those of `shared` from now on."""
        value = self.value
        self._dtype, self._device = value.dtype, value.device
        self._place = value.storage_offset(), value.shape, value.stride()
        self._shared = shared
        value.data = _NOTHING

    def unpack(self) -> Tensor:
        """The tensor, laid out as it was."""
        if self.value._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} that the backward needs was written to in place after it was "
                f"saved: it is at version {self.value._version}, expected {self._version}; write to a copy instead"
            )
        if self._shared is None:
            return self.value
        storage = self._shared.restore().untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._place)


@contextmanager
def saving(*policies: Policy, shelf: Shelf, spared: Iterable[Tensor]) -> Iterator[Callable[[T], T]]:
    """What is saved in the block is kept by `policies`; `spared` tensors, and views of them, as they are.

    Spare what stays in memory anyway: the parameters and what the stage was given; and the buffers, because batch
    normalisation writes to its statistics without counting a version. Enter it around the forward of the nodes it is
    for; a block inside it takes its place there. With `relu` or `pool` all is encoded at the end of the block, where
    it is known who keeps what; otherwise when it is saved. What others keep too, outside the block, exists twice.

    It gives a function that hands on the block's results: through them pooling is found that nothing follows.

    In the backward a RuntimeError says that a saved tensor was written to. InputError if there is no such policy.
    """
    for name in policies:
        if name not in POLICIES:
            raise InputError(
                f"no policy {name!r} for saved tensors: expected one of {', '.join(POLICIES)}"
            )
    block = _Block(policies, shelf, {value.untyped_storage()._cdata for value in spared})
    try:
        with saved_tensors_hooks(block.pack, _Kept.unpack):
            yield block.ends
        block.settle()
    finally:
        block.forget()


class _Block:
    """What one run of nodes saves."""

    def __init__(self, policies: Sequence[Policy], shelf: Shelf, spared: set[int]) -> None:
        self._by_node = {policy for policy in policies if policy in ("relu", "pool")}
        self._roots: list[Node] = []
        offload = partial(move, traffic=shelf.traffic, run=Run())
        encoders: dict[str, Encoder] = {"mask": mask, "half": half, "offload": offload}
        self._encoders = [(policy, encoders[policy]) for policy in policies if policy in encoders]
        self._shelf, self._spared = shelf, spared
        self._since = torch._C._autograd._get_sequence_nr()
        self._waiting: list[_Kept] = []

    def ends(self, results: T) -> T:
        """`results` as they are: all nodes lead to them."""
        self._note(leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor))
        return results

    def _note(self, values: Iterable[Tensor]) -> None:
        if self._by_node:
            self._roots += [value.grad_fn for value in values if value.grad_fn is not None]

    def pack(self, value: Tensor) -> _Kept:
        """The hook of saving."""
        kept = _Kept(value)
        self._note([value])
        if _is_plain(value) and value.untyped_storage()._cdata not in self._spared:
            if self._by_node:
                self._waiting.append(kept)
            else:
                self._encode(kept)
        return kept

    def forget(self) -> None:
        """Lets go of the graph, which itself holds this: its hook."""
        self._waiting.clear()
        self._roots.clear()

    def settle(self) -> None:
        """Encodes what waits."""
        nodes = made_since(self._since, self._roots)
        uses = (found for node in nodes for found in known_uses(node, _Kept))
        found = {
            id(kept): _ENCODERS[use](bound)
            for kept, use, bound in uses
            if POLICY_OF[use] in self._by_node
        }
        held = {_address(kept) for kept in self._waiting if id(kept) not in found}
        for kept in self._waiting:
            encoder = None if _address(kept) in held else found.get(id(kept))
            encoded = None if encoder is None else encoder(_flat(kept.value, kept.value.dtype))
            if encoded is not None:
                kept.let_go(_Shared(encoded))
            else:
                self._encode(kept)

    def _encode(self, kept: _Kept) -> None:
        for policy, encoder in self._encoders:
            if (shared := self._shelf.encoded(kept.value, policy, encoder)) is not None:
                kept.let_go(shared)
                return


def made_since(number: int, roots: Iterable[Node]) -> Iterator[Node]:
    """Autograd's nodes of this sequence number and later ones that `roots` lead to."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen and node._sequence_nr() >= number:
            seen.add(node)
            yield node
            stack += [child for child, _ in node.next_functions if child is not None]


def known_uses(node: Any, form: type[Any]) -> Iterator[tuple[object, Use, int]]:
    """What hooks made of tensors that `node` saves for a known use: that, its use, and what indices are below.

    Hooks make a `form`, which has the `shape` of the tensor.
    """
    name = node.name()
    if name == "ReluBackward0":
        yield node._raw_saved_result.data, "relu", 0
    elif name in _AVERAGE_POOLS:
        yield node._raw_saved_self.data, "pool input", 0
    elif name in _MAX_POOLS and isinstance(image := node._raw_saved_self.data, form):
        yield image, "pool input", 0
        yield (
            node._raw_saved_result1.data,
            "pool indices",
            math.prod(image.shape[-_MAX_POOLS[name] :]),
        )


_ENCODERS: Mapping[Use, Callable[[int], Encoder]] = {
    "relu": lambda _: sign,
    "pool input": lambda _: shape,
    "pool indices": lambda bound: partial(narrow, bound=bound),
}


def _is_plain(value: Tensor) -> bool:
    """Whether it is its elements and nothing more."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and value.device.type in ("cpu", "cuda")
        and value.numel() > 0
        and not (value.is_conj() or value.is_neg())
    )


def _flat(value: Tensor, dtype: torch.dtype) -> Tensor:
    """All elements of the storage in which `value` lies."""
    storage = value.untyped_storage()
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=value.device).set_(storage, 0, (count,), (1,))


def _address(kept: _Kept) -> int:
    address: int = kept.value.untyped_storage()._cdata
    return address
