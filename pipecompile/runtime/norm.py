"""The norm of gradients that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.runtime.deadline import Deadline

__all__ = ["NormOnItsWay", "begin_norm", "clip_to_norm", "norm_type_of"]


@dataclass
class NormOnItsWay:
    """The norm of all gradients while ranks reduce it, and that of this process's part (`own`).

    Both come from the same arithmetic, so `own` is never above the whole norm. `powers` are reduced
    in place by `work`.
    """

    own: Tensor
    powers: Tensor
    norm_type: float
    work: dist.Work | None = None

    def wait(self, deadline: Deadline) -> Tensor:
        """Return the norm over all processes, for which to wait until the `deadline`."""
        if self.work is not None:
            deadline.wait(self.work)
            self.work = None
        return _root(self.powers, self.norm_type)


def norm_type_of(given: float | str) -> float:
    """Return the order of a norm; InputError if it is none."""
    try:
        order = float(given)
    except (TypeError, ValueError):
        order = 0.0
    if not order > 0:
        raise InputError(f"norm_type={given!r}, but it is a number above 0, or inf")
    return order


def begin_norm(
    gradients: Sequence[Tensor],
    norm_type: float,
    device: torch.device,
    deadline: Deadline | None,
) -> NormOnItsWay:
    """Begin to reduce the norm of the gradients of all processes, as one vector.

    `deadline` is until when ranks may reduce; without it the norm is that of this process. Each
    gradient, or each part of it, must be given by one process only. It is computed like
    torch.nn.utils.get_total_norm: the norm of the norms, so the sum of their powers over ranks
    gives the same.
    """
    local = torch.nn.utils.get_total_norm(gradients, norm_type).to(device)
    if deadline is None:
        return NormOnItsWay(local, local, inf)
    # Ranks with gradients of several types must send the same.
    powers = local.double() if norm_type == inf else local.double() ** norm_type
    own = _root(powers, norm_type)
    operation = dist.ReduceOp.MAX if norm_type == inf else dist.ReduceOp.SUM
    return NormOnItsWay(own, powers, norm_type, deadline.start_all_reduce(powers, None, operation))


def _root(powers: Tensor, norm_type: float) -> Tensor:
    """Return the norm of a vector, from the sum of the powers of its elements."""
    # A copy, since `powers` are reduced in place.
    return powers.clone() if norm_type == inf else powers ** (1 / norm_type)


@torch.no_grad()
def clip_to_norm(gradients: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients in place as torch.nn.utils.clip_grads_with_norm_ does."""
    # Gradients are multiplied by 1 where nothing is clipped: to ask whether that is so, the host
    # would have to wait for the device.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.to(gradient.device))
