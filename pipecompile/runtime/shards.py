"""Tensors of which each process holds a part: DTensors, as FSDP2 and tensor parallelism make them.

A whole tensor, such as one from a file, becomes one of them by `divided_like`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = [
    "Shard",
    "divided_like",
    "gradient_parts",
    "local_part",
    "rows_of",
    "settle_gradient",
    "shard_of",
    "whole",
]

Shard = tuple[tuple[str, int], ...]
"""Which part a process holds: for each dimension of the mesh that divides it how, and where."""


def local_part(tensor: Tensor) -> Tensor:
    """Return the part of `tensor` on this process, in the same memory."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def rows_of(tensor: Tensor) -> int:
    """Return the size of dimension 0, 1 for a tensor without dimensions."""
    return tensor.shape[0] if tensor.dim() else 1


def gradient_parts(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return what this process has of gradients, without those of which it has no element."""
    # A parameter with fewer rows than ranks leaves some ranks without any.
    parts = [local_part(p.grad) for p in parameters if p.grad is not None]
    return [part for part in parts if part.numel()]


def shard_of(tensor: object) -> Shard:
    """Return which part of `tensor` is here; of one that is whole ()."""
    if not isinstance(tensor, DTensor):
        return ()
    coordinate = tensor.device_mesh.get_coordinate() or ()
    return tuple(
        (repr(placement), position)
        for placement, position in zip(tensor.placements, coordinate, strict=True)
        if not placement.is_replicate()
    )


def divided_like(value: Tensor, own: Tensor) -> Tensor:
    """Return the whole `value` divided as `own` is; each process gives the same value."""
    if not isinstance(own, DTensor) or isinstance(value, DTensor):
        return value
    here = value.to(own.device)
    return distribute_tensor(here, own.device_mesh, own.placements, src_data_rank=None)


def settle_gradient(parameter: Tensor) -> None:
    """Let the gradient of a parameter be divided as the parameter is; one of a tensor-parallel
    stage may be a summand on each process.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
        return
    # Of a bias in a tensor-parallel stage each process may have the gradient of its own part of
    # the work only. Their sum is the gradient, and this makes it.
    if gradient.placements != parameter.placements:
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def whole(value: Any) -> Any:
    """Return all of `value`; the processes that have its parts call this together."""
    with torch.no_grad():
        return value.full_tensor() if isinstance(value, DTensor) else value
