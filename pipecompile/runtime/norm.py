"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.runtime.watch import Deadline

__all__ = ["total_norm"]


def total_norm(
    gradients: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    over: tuple[dist.ProcessGroup | None, Deadline] | None,
) -> Tensor:
    """Return the norm of the gradients of all ranks of a group, as one vector.

    `over` is the group, and until when to wait for it; without it the norm is that of this process.
    Each gradient must be given by one rank only. It is computed like torch.nn.utils.get_total_norm:
    the norm of the norms, so the sum of their powers over ranks gives the same.
    """
    local = torch.nn.utils.get_total_norm(gradients, norm_type).to(device)
    if over is None:
        return local
    group, deadline = over
    local = local.double()  # ranks with gradients of several types must send the same
    if norm_type == inf:
        deadline.all_reduce(local, group, dist.ReduceOp.MAX)
        return local
    powers = local**norm_type
    deadline.all_reduce(powers, group)
    return powers ** (1 / norm_type)
