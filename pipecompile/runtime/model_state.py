"""The model's state over ranks: all of it on one rank, the same on all, and whether it is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile.runtime import world
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.place import device_of_this_rank
from pipecompile.runtime.shards import Shard, local_part, shard_of, whole

__all__ = ["different_copies", "full_state", "set_to_that_of"]


def full_state(model: nn.Module, share: LocalShare) -> dict[str, Any] | None:
    """Return the whole state of `model` on rank 0, on the CPU, and None on other ranks.

    Each rank has the model, but only the values of its own `share`. Tensors are sent one at a time,
    in the order of the state, so that a device holds no more than one beside its own. A tensor with
    several names is sent once, and is one tensor in the result. One that is divided is gathered by
    the processes that have its parts.
    """
    sent: dict[str, Any] = {}
    state = model.state_dict()
    # The plan knows the names, alike on all ranks. Whether two names are one object may differ:
    # buffers that move to a GPU become other objects.
    first_names = {name: share.first_names.get(name, name) for name in state}
    with world.calling_together("full_state_dict()"):
        for name, value in state.items():
            if first_names[name] not in sent:
                sent[first_names[name]] = _to_first(whole(value), share.saved_from(name))
    if world.rank() != 0:
        return None
    return {name: sent[first_names[name]] for name in state}


@torch.no_grad()
def _to_first(value: Any, owner: int) -> Any:
    """Return the value of rank `owner` on rank 0; it is called on all ranks."""
    own = world.rank()
    if own not in (0, owner):
        return None
    if owner == 0:
        return value.detach().cpu().clone() if isinstance(value, Tensor) else value
    if not isinstance(value, Tensor):  # a module's extra state
        return _object_to_first(value, owner)
    # NCCL sends what is on a GPU, and gloo what is not.
    device = device_of_this_rank() or torch.device("cpu")
    if own == owner:
        dist.send(value.detach().to(device).contiguous(), dst=0)
        return None
    arriving = torch.empty(value.shape, dtype=value.dtype, device=device)
    dist.recv(arriving, src=owner)
    return arriving.cpu()


def _object_to_first(value: Any, owner: int) -> Any:
    values = [value]
    if world.rank() == owner:
        dist.send_object_list(values, dst=0)
    else:
        dist.recv_object_list(values, src=owner)
    return values[0]


@torch.no_grad()
def set_to_that_of(source: int, value: Tensor, group: dist.ProcessGroup) -> None:
    """Set `value` on all ranks of `group` to what it is on the global rank `source`."""
    # Bytes in the order of elements, because gloo lacks some types, and sets nothing in a tensor
    # that has gaps.
    plain = value.detach().contiguous()
    dist.broadcast(plain.flatten().view(torch.uint8), src=source, group=group)
    # One that repeats elements cannot be written to, and needs it where ranks differ only.
    if plain.data_ptr() != value.data_ptr() and not torch.equal(plain, value.detach()):
        value.data.copy_(plain)


def different_copies(own: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return the names whose values are not the same bit for bit on all ranks that have them, or
    that have the same part; each with two ranks that differ. It is the same on every rank.
    """
    digests = world.gather(
        {(name, shard_of(value)): _digest(local_part(value)) for name, value in own.items()}
    )
    first: dict[tuple[str, Shard], tuple[int, bytes]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, by_part in enumerate(digests):
        for (name, shard), digest in by_part.items():
            earlier, expected = first.setdefault((name, shard), (rank, digest))
            if digest != expected:
                different.setdefault(name, (earlier, rank))
    return different


def _digest(value: Tensor) -> bytes:
    flat = value.detach().cpu().contiguous().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).digest()
