"""Bytes as they are asked for, and as a device's allocator may take them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipecompile.ir.amount import AllocatorName, Amount

__all__ = ["ALLOCATORS", "Allocator"]


@dataclass(frozen=True)
class Allocator:
    """What an allocator takes for the bytes that are asked for.

    Each storage is rounded up to blocks of `block_bytes`. A bound adds one part in `share` of
    itself, for kernel workspace that nobody sees, and one part in `transient_share` of what comes
    and goes, for the gaps that this leaves; None for nothing. It also adds `fixed_bytes`,
    `library_bytes` that libraries of kernels keep, and `peer_bytes` for each rank that this one
    exchanges tensors with: the buffers of the communication library. `steps_over_lists` says that
    optimizers update all parameters at once, as `torch.optim` does on a GPU, and not one after
    another.
    """

    block_bytes: int
    share: int
    transient_share: int | None
    fixed_bytes: int
    library_bytes: int
    peer_bytes: int
    steps_over_lists: bool

    def rounded(self, size: int) -> int:
        """Return what one storage takes: with blocks of 64 bytes, 65 bytes take 128."""
        return -(-size // self.block_bytes) * self.block_bytes

    def amount(self, sizes: Iterable[int]) -> Amount:
        """Return the amount of storages of these sizes."""
        sizes = tuple(sizes)
        return Amount(expected=sum(sizes), bound=sum(map(self.rounded, sizes)))

    def padded(self, persistent: int, transient: int, peers: int) -> int:
        """Return the bound of a rank with so many `peers` whose storages take these bytes: those
        that stay, and those that come and go.
        """
        size = persistent + transient
        gaps = transient // self.transient_share if self.transient_share else 0
        return size + size // self.share + gaps + self._apart(peers)

    def _apart(self, peers: int) -> int:
        """Return what a rank takes beside its storages."""
        return self.fixed_bytes + self.library_bytes + peers * self.peer_bytes

    def most_persistent(self, cap: int, peers: int) -> int:
        """Return the most that storages may take under a cap if all of them stay; below 0 if not
        even an empty rank fits.
        """
        # x bytes are padded by ⌊x / share⌋: of each full span of `share` + 1 bytes, one is padding.
        # With share = 4, spans of 5: 9 bytes = 5 + 4 leave 4 + 3, as 8 would be padded by 2.
        whole, rest = divmod(cap - self._apart(peers), self.share + 1)
        return whole * self.share + min(rest, self.share - 1)

    def most_transient(self, cap: int, peers: int, persistent: int) -> int:
        """Return the most that may come and go under a cap beside what stays; below 0 by as much as
        that exceeds the cap.
        """
        left = cap - self.padded(persistent, 0, peers)
        if left < 0:
            return left
        fitting = range(left + 1)
        return bisect_right(fitting, cap, key=lambda t: self.padded(persistent, t, peers)) - 1


ALLOCATORS: Mapping[AllocatorName, Allocator] = {
    # c10/core/CPUAllocator: as asked for, aligned to 64 bytes (c10/core/alignment.h). Generator
    # states are 5 kB each.
    "cpu": Allocator(
        block_bytes=64,
        share=40,
        transient_share=None,
        fixed_bytes=1 << 16,
        library_bytes=0,
        peer_bytes=0,
        steps_over_lists=False,
    ),
    # c10/cuda/CUDACachingAllocator: kMinBlockSize 512, and in each pool one segment that is filled
    # only in part (kSmallBuffer 2 MiB, kLargeBuffer 20 MiB). cuBLAS keeps 32 MiB for each of two
    # threads, the one of the forward and the one of the backward: 65 MiB with cuDNN's were measured
    # on an H200, and older devices take less. NCCL_BUFFSIZE is 4 MiB for each channel and
    # direction; four channels are assumed, which is not proven. Of 84 ranks on an H200 all ran with
    # a ninth of what comes and goes, and ten did not with a twentieth of all.
    "cuda": Allocator(
        block_bytes=512,
        share=40,
        transient_share=9,
        fixed_bytes=22 << 20,
        library_bytes=65 << 20,
        peer_bytes=32 << 20,
        steps_over_lists=True,
    ),
}
