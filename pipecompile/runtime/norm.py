"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.runtime.watch import Deadline

__all__ = ["clip_to_norm", "total_norm"]


def total_norm(
    gradients: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    deadline: Deadline | None,
) -> Tensor:
    """Return the norm of the gradients of all processes, as one vector.

    `deadline` is until when to wait for the others; without it the norm is that of this process.
    Each gradient, or each part of it, must be given by one process only. It is computed like
    torch.nn.utils.get_total_norm: the norm of the norms, so the sum of their powers over ranks
    gives the same.
    """
    if not norm_type > 0:
        raise InputError(f"norm_type={norm_type}, but it is a number above 0, or inf")
    local = torch.nn.utils.get_total_norm(gradients, norm_type).to(device)
    if deadline is None:
        return local
    local = local.double()  # ranks with gradients of several types must send the same
    if norm_type == inf:
        deadline.all_reduce(local, None, dist.ReduceOp.MAX)
        return local
    powers = local**norm_type
    deadline.all_reduce(powers, None)
    return powers ** (1 / norm_type)


@torch.no_grad()
def clip_to_norm(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place as torch.nn.utils.clip_grads_with_norm_ does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
