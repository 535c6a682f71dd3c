"""What stages hold because there are replicas: copies of small gradients, and shards.

Replicas sum their gradients, large ones where they are and small ones together, in flat copies:

    gradients     20 KiB   4 KiB   30 MiB   4 KiB   8 KiB
    buckets       └── copied ──┘   in place └── copied ──┘

Copies live from the last backward of their stage to the end of the step.

FSDP2 divides the rows of each parameter. Between steps a replica has its part of parameters,
gradients and optimizer state; during a step it has its part of the parameters and all of them, and
all of the gradients (runtime/sharded_stages.py).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from msgspec.structs import replace

from pipecompile.ir.graph import Parameter

__all__ = ["BUCKET_BYTES", "buckets", "copied_bytes", "part_of"]

# Of one bucket of small gradients; a gradient that is larger has its own message. DDP's default.
BUCKET_BYTES = 25 << 20


def buckets(sizes: Sequence[int], types: Sequence[Hashable]) -> Iterator[range]:
    """Yield the gradients of these sizes, by index, in runs that are summed together.

    A run is of one type, and takes at most `BUCKET_BYTES` or is one gradient.
    """
    begin = total = 0
    for index, (size, kind) in enumerate(zip(sizes, types, strict=True)):
        total += size
        if index > begin and (total > BUCKET_BYTES or kind != types[begin]):
            yield range(begin, index)
            begin, total = index, size
    if begin < len(sizes):
        yield range(begin, len(sizes))


def copied_bytes(sizes: Sequence[int]) -> Iterator[int]:
    """Yield what the flat copies of gradients of one type take."""
    for run in buckets(sizes, [None] * len(sizes)):
        if len(run) > 1:
            yield sum(sizes[index] for index in run)


def part_of(parameter: Parameter, replicas: int) -> Parameter:
    """Return the largest part of `parameter` that one of `replicas` holds: an equal share of its
    rows, rounded up.

    Five rows on two replicas are parts of three and two.
    """
    # Without a shape it counts as a vector.
    shape = parameter.shape or (parameter.bytes,)
    rows = -(-shape[0] // replicas)
    share = parameter.bytes // max(shape[0], 1) * rows
    return replace(parameter, bytes=share, shape=parameter.shape and (rows, *shape[1:]))
