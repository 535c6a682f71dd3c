"""Saved tensors that are encoded between the forward and the backward of a run of nodes.

    storages = EncodedStorages()                       # one for each stage
    encodings = "mask", "relu", "pool"
    with encode_saved_tensors(*encodings, storages=storages, exempt=parameters) as note_results:
        value = note_results(run(value))               # the forward; the backward is unchanged

Encodings by name. `relu` and `pool` are used where they apply, else the first other one that fits:

    mask       dropout's masks, and all else that is zero or one constant, as bits      exact
    relu       what ReLU saves of its output, as bits, if no other node saves it        exact
    pool       what pooling saves of its input, as a size; its indices, as small        exact
               integers
    offload    everything in host memory                                                exact
    half       float32 as bfloat16                   a relative error of up to 2⁻⁸ in each element

Autograd calls one hook for each tensor that it saves, and another when the backward needs it:

    forward    node saves t ──▶ pack(t)        ──▶ _SavedTensor    t itself, or its encoded storage
    backward   node needs t ◀── unpack(saved)  ◀──                 the storage restored, t as a view

A tensor that no encoding fits is kept by reference.

Without hooks autograd raises if a saved tensor was written to before the backward. With hooks it
does not, so `_SavedTensor` does: it keeps an alias of the tensor, which shares the tensor's version
counter even after its memory is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from pipecompile.errors import unknown
from pipecompile.graph.autograd_nodes import autograd_nodes_since, known_uses
from pipecompile.graph.encodings import (
    EncodedElements,
    Encoder,
    encode_half,
    encode_mask,
    encode_narrow,
    encode_shape,
    encode_sign,
)
from pipecompile.graph.offload import OffloadGroup, Traffic, offload_to_host
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import storage_key
from pipecompile.ir.encodings import ENCODING_OF, ENCODINGS, Encoding, Use

__all__ = ["EncodedStorages", "encode_saved_tensors"]

T = TypeVar("T")

_NO_MEMORY = torch.empty(0)


class EncodedStorages:
    """The encoded storages of one stage: each is encoded once, whichever runs save views of it.

    `traffic` counts the bytes that were moved to the host and back. A write that no version counts,
    as through `.data`, is not noticed between two savings of one storage: the second saving would
    then share the first one's encoding.
    """

    def __init__(self) -> None:
        self.traffic = Traffic()
        # By encoding, storage, version and type. The weak reference in the key keeps the address of
        # a storage from being reused, but does not keep its memory.
        self._shared: WeakValueDictionary[
            tuple[Encoding, StorageWeakRef, int, torch.dtype], _SharedStorage
        ]
        self._shared = WeakValueDictionary()

    def encode(self, value: Tensor, encoding: Encoding, encoder: Encoder) -> _SharedStorage | None:
        """Return the encoded storage of `value`, shared if it was encoded before.

        None if `encoder` cannot encode it.
        """
        # Offloading moves bytes, so views of several types share one copy.
        dtype = torch.uint8 if encoding == "offload" else value.dtype
        key = encoding, StorageWeakRef(value.untyped_storage()), value._version, dtype
        if (shared := self._shared.get(key)) is not None:
            # Each sharer that is restored gets a view of the same memory, as the views of a
            # storage had.
            shared.sharers += 1
        elif (encoded := encoder(_flat_elements(value, dtype))) is not None:
            self._shared[key] = shared = _SharedStorage(encoded)
        return shared


class _SharedStorage:
    """An encoded storage; `sharers` counts the saved tensors that are views of it."""

    def __init__(self, encoded: EncodedElements) -> None:
        self._encoded = encoded
        self._restored: Tensor | None = None
        self.sharers = 1

    def restore(self) -> Tensor:
        """Return the elements; they are kept for other sharers, if there are any."""
        if self._restored is not None:
            return self._restored
        restored = self._encoded.restore()
        self._restored = restored if self.sharers > 1 else None
        return restored


class _SavedTensor:
    """One saved tensor, from the hook of its saving to the hook of its use."""

    def __init__(self, value: Tensor) -> None:
        # The value itself would refer to the autograd node that refers to this: a cycle.
        self.value = value.detach()
        self._version = value._version
        self._shared: _SharedStorage | None = None
        self.shape = value.shape

    def release_to(self, shared: _SharedStorage) -> None:
        """Release the memory of the tensor; from now on its elements are those of `shared`."""
        value = self.value
        self._dtype, self._device = value.dtype, value.device
        self._view = value.storage_offset(), value.shape, value.stride()
        self._shared = shared
        # Assigning `data` keeps the version counter that the alias shares with the tensor.
        value.data = _NO_MEMORY

    def unpack(self) -> Tensor:
        """Return the tensor with its layout; RuntimeError if it was written to in between."""
        if self.value._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.shape)} that the backward needs was written to "
                f"in place after it was saved: it is at version {self.value._version}, expected "
                f"{self._version}; write to a copy instead"
            )
        if self._shared is None:
            return self.value
        storage = self._shared.restore().untyped_storage()
        return torch.empty(0, dtype=self._dtype, device=self._device).set_(storage, *self._view)


@contextmanager
def encode_saved_tensors(
    *encodings: Encoding, storages: EncodedStorages, exempt: Iterable[Tensor]
) -> Iterator[Callable[[T], T]]:
    """Encode by `encodings` what autograd saves in the block, except for views of `exempt` tensors.

    Exempt tensors are those that stay in memory anyway, that is parameters and the inputs of the
    stage, and buffers, because batch normalisation writes to its statistics without raising their
    version. The block is the forward of the nodes; a block within it replaces it there. With `relu`
    or `pool` all tensors are encoded at the end of the block, when it is known which nodes save
    what; otherwise when they are saved. A tensor that something outside the block refers to as well
    exists twice.

    The context yields a function that returns the block's results as they are and notes them. Only
    through them can a pooling be found whose result no later node saves.

    InputError if there is no such encoding. A backward raises RuntimeError if a saved tensor was
    written to.
    """
    for name in encodings:
        if name not in ENCODINGS:
            raise unknown("encoding", name, ENCODINGS)
    block = _SavingBlock(encodings, storages, {storage_key(value) for value in exempt})
    try:
        with saved_tensors_hooks(block.pack, _SavedTensor.unpack):
            yield block.note_results
        block.encode_pending()
    finally:
        block.clear()


class _SavingBlock:
    """What autograd saves while one run of nodes runs."""

    def __init__(
        self, encodings: Sequence[Encoding], storages: EncodedStorages, exempt: set[int]
    ) -> None:
        self._encodings_by_use = {
            encoding for encoding in encodings if encoding in ("relu", "pool")
        }
        offload = partial(offload_to_host, traffic=storages.traffic, group=OffloadGroup())
        encoders: dict[str, Encoder] = {
            "mask": encode_mask,
            "half": encode_half,
            "offload": offload,
        }
        self._encoders = [
            (encoding, encoders[encoding]) for encoding in encodings if encoding in encoders
        ]
        self._storages, self._exempt = storages, exempt
        # Nodes of the block are those with this number or a higher one: earlier ones are not
        # walked.
        self._first_number = torch._C._autograd._get_sequence_nr()
        self._roots: list[Node] = []
        self._pending: list[_SavedTensor] = []

    def note_results(self, results: T) -> T:
        """Return `results`, and note the autograd nodes that they lead to."""
        self._note_nodes(tensor_leaves(results))
        return results

    def _note_nodes(self, values: Iterable[Tensor]) -> None:
        if self._encodings_by_use:
            self._roots += [value.grad_fn for value in values if value.grad_fn is not None]

    def pack(self, value: Tensor) -> _SavedTensor:
        """Return what autograd saves instead of `value`: this is the hook of saving."""
        saved = _SavedTensor(value)
        self._note_nodes([value])
        # Pending tensors keep their memory until the end of the block.
        if _is_plain(value) and storage_key(value) not in self._exempt:
            if self._encodings_by_use:
                self._pending.append(saved)
            else:
                self._encode(saved)
        return saved

    def clear(self) -> None:
        """Drop the references to autograd's graph, which refers to this block's hook: a cycle."""
        self._pending.clear()
        self._roots.clear()

    def encode_pending(self) -> None:
        """Encode the pending tensors, each for its use if an encoding is for that."""
        encoders = self._encoders_by_use()
        # ReLU's sign is not enough if any other node saves the same storage for another use:
        #
        #     relu ─ saves y (use "relu") ──▶ sign bits
        #     matmul ─ saves y (no known use) ▶ needs the elements, so y stays for both
        shared = {storage_key(saved.value) for saved in self._pending if id(saved) not in encoders}
        for saved in self._pending:
            encoder = None if storage_key(saved.value) in shared else encoders.get(id(saved))
            value = saved.value
            encoded = None if encoder is None else encoder(_flat_elements(value, value.dtype))
            if encoded is not None:
                saved.release_to(_SharedStorage(encoded))
            else:
                self._encode(saved)

    def _encoders_by_use(self) -> dict[int, Encoder]:
        """Return the encoders for saved tensors, by id, whose node uses them in a known way."""
        encoders: dict[int, Encoder] = {}
        for node in autograd_nodes_since(self._first_number, self._roots):
            for saved, use, bound in known_uses(node, _SavedTensor):
                if ENCODING_OF[use] in self._encodings_by_use:
                    encoders[id(saved)] = _ENCODERS_BY_USE[use](bound)
        return encoders

    def _encode(self, saved: _SavedTensor) -> None:
        """Encode by the first of the other encodings that fits, if there is one."""
        for encoding, encoder in self._encoders:
            if (shared := self._storages.encode(saved.value, encoding, encoder)) is not None:
                saved.release_to(shared)
                return


_ENCODERS_BY_USE: Mapping[Use, Callable[[int], Encoder]] = {
    "relu": lambda _: encode_sign,
    "pool input": lambda _: encode_shape,
    "pool indices": lambda bound: partial(encode_narrow, bound=bound),
}


def _is_plain(value: Tensor) -> bool:
    """Return whether the elements of its storage are all that there is to a tensor."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and value.device.type in ("cpu", "cuda")
        and value.numel() > 0
        and not (value.is_conj() or value.is_neg())
    )


def _flat_elements(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return all elements of the storage that `value` is a view of, as a flat tensor."""
    storage = value.untyped_storage()
    count = storage.nbytes() // dtype.itemsize
    return torch.empty(0, dtype=dtype, device=value.device).set_(storage, 0, (count,), (1,))
