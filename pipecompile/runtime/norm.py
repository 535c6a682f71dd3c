"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["total_norm"]


def total_norm(
    gradients: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    group: dist.ProcessGroup | None,
    *,
    over_ranks: bool,
) -> Tensor:
    """Return the norm of the gradients of all ranks of `group`, as one vector.

    Each gradient must be given by one rank only. It is computed like torch.nn.utils.get_total_norm:
    the norm of the norms, so the sum of their powers over ranks gives the same.
    """
    local = torch.nn.utils.get_total_norm(gradients, norm_type).to(device)
    if not over_ranks:
        return local
    local = local.double()  # ranks with gradients of several types must send the same
    if norm_type == inf:
        dist.all_reduce(local, dist.ReduceOp.MAX, group=group)
        return local
    powers = local**norm_type
    dist.all_reduce(powers, group=group)
    return powers ** (1 / norm_type)
