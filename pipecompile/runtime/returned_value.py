"""What the rank with the last stage returns from a step, on every rank."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map_only

from pipecompile.errors import InputError
from pipecompile.runtime.deadline import Deadline

__all__ = ["returned_everywhere"]


def returned_everywhere(
    value: Any,
    source: int,
    group: dist.ProcessGroup | None,
    device: torch.device,
    deadline: Deadline,
) -> Any:
    """Return on every rank of `group` the `value` of the global rank `source`, with tensors on the
    CPU.

    It goes through tensors on `device`, since torch's exchanges of objects have no deadline.
    InputError, on all ranks, if it cannot be pickled.
    """
    is_source = dist.get_rank() == source
    root = source if group is None else dist.get_group_rank(group, source)
    said, problem = _pickled(value) if is_source else (b"", False)
    # Its length, negative where it is what went wrong.
    length = torch.tensor(-len(said) if problem else len(said), device=device)
    deadline.broadcast(length, root, group)
    size = int(length.item())
    text = torch.empty(abs(size), dtype=torch.uint8, device=device)
    if is_source:
        text.copy_(torch.frombuffer(bytearray(said), dtype=torch.uint8))
    deadline.broadcast(text, root, group)
    received = text.cpu().numpy().tobytes()
    if size < 0:
        raise InputError(received.decode())
    return pickle.loads(received)


def _pickled(value: Any) -> tuple[bytes, bool]:
    """Return the value as bytes; or what went wrong, and True."""
    try:
        # A pickled tensor of a GPU is unpickled on the GPU of the same number, which belongs to
        # another process there.
        return pickle.dumps(tree_map_only(Tensor, Tensor.cpu, value)), False
    except Exception as error:
        # The others wait for a message, whatever it says.
        return f"what a step returns cannot be sent to all ranks: {error}".encode(), True
