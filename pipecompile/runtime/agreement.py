"""Do all ranks begin the same step? What they say is compared before the first message."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from pipecompile.errors import InputError
from pipecompile.runtime.watch import Deadline

__all__ = ["check_agreement"]


def check_agreement(
    said: Mapping[str, object],
    group: dist.ProcessGroup | None,
    deadline: Deadline,
    member: str = "rank",
) -> None:
    """InputError, on every rank of `group`, if a value of `said` is not the same on all of them.

    A `member` of the group is a rank of a pipeline, or a replica.

    Ranks that differ would wait for messages that nobody sends, or take one tensor for another.
    """
    by_rank: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    # As text, since a rank must be able to print what another one has.
    own = {name: str(value) for name, value in said.items()}
    deadline.wait_for(group)
    dist.all_gather_object(by_rank, own, group=group)
    for name in own:
        values = [other[name] for other in by_rank]
        different = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if different is not None:
            raise InputError(
                f"{member}s of a pipeline must step alike, but {name} is {values[0]} on its "
                f"{member} 0 and {values[different]} on its {member} {different}; give every rank "
                "of a replica the same batch, plan, mode and step, and every replica as much"
            )
