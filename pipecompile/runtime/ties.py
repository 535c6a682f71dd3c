"""Tied parameters over ranks: which ranks hold each, and the sums of their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.ir.stage_ranks import stage_ranks
from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.shards import local_part

__all__ = ["Ties", "sum_tied_gradients", "tie_groups"]

Ties = Sequence[tuple[Tensor, dist.ProcessGroup]]
"""Tied parameters of a rank, each with the ranks over which its gradient is summed."""


def tie_groups(
    stages_of: Mapping[str, Sequence[int]],
    placement: Sequence[int],
    pipelines: Sequence[Sequence[int]],
) -> dict[str, dist.ProcessGroup]:
    """Return for each tied parameter the process group of the ranks that hold it.

    `pipelines` are the global ranks of each replica's pipeline, in the order of `placement`'s
    ranks. Parameters of one stage have no group, also if that has several ranks. Every rank must
    call this with the same arguments, since ranks create process groups together.
    """
    own = dist.get_rank()
    ranks_of = {
        name: tuple(sorted({rank for stage in stages for rank in stage_ranks(placement)[stage]}))
        for name, stages in stages_of.items()
    }
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    # Sorted, and for all pipelines: every process makes every group, in the same order.
    for ranks in sorted(set(ranks_of.values())):
        for pipeline in pipelines if len(ranks) > 1 else ():
            group = dist.new_group([pipeline[rank] for rank in ranks])
            if own in pipeline:
                groups[ranks] = group
    return {name: groups[ranks] for name, ranks in ranks_of.items() if ranks in groups}


def sum_tied_gradients(ties: Ties, deadline: Deadline) -> None:
    """Sum the gradient of each tied parameter over the ranks that hold it, or the same part of it.

    Where no rank has one it stays None. All ranks list their `ties` in the same order. All sums
    begin before the first one is waited for.
    """
    begun = [_Sum.begun(parameter, group, deadline) for parameter, group in ties]
    for each in begun:
        each.finish(deadline)


class _Sum(NamedTuple):
    """The sum of a gradient on its way, and that of how many ranks have none."""

    parameter: Tensor
    group: dist.ProcessGroup
    was_missing: bool
    missing: Tensor
    works: list[dist.Work]

    @staticmethod
    def begun(parameter: Tensor, group: dist.ProcessGroup, deadline: Deadline) -> _Sum:
        """Begin to sum the gradient of a parameter."""
        was_missing = parameter.grad is None
        if was_missing:
            # The loss may need it on another rank, which waits in the sum all the same.
            parameter.grad = torch.zeros_like(parameter)
        assert parameter.grad is not None
        # Filled on the device: a copy would wait for it.
        missing = torch.full((), float(was_missing), dtype=torch.float32, device=parameter.device)
        summed = local_part(parameter.grad), missing
        works = [deadline.start_all_reduce(each, group) for each in summed]
        return _Sum(parameter, group, was_missing, missing, works)

    def finish(self, deadline: Deadline) -> None:
        """Wait for the sum; drop it if no rank had a gradient."""
        for work in self.works:
            deadline.wait(work)
        # Read only here, since a GPU must wait for it.
        if self.was_missing and self.missing.item() == dist.get_world_size(self.group):
            self.parameter.grad = None
