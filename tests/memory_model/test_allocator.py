"""What allocators are taken to need for what is asked for."""

from __future__ import annotations

import pytest

from pipecompile.ir.amount import AllocatorName
from pipecompile.memory_model.allocator import ALLOCATORS


@pytest.mark.parametrize("name", ALLOCATORS)
def test_a_bound_leaves_room_for_all_that_it_is_the_bound_of(name: AllocatorName) -> None:
    """To the byte: what just fits a cap is not refused."""
    allocator = ALLOCATORS[name]
    for peers in (0, 2):
        start = allocator.padded(0, peers)
        for cap in range(start - 100, start + 400):
            size = allocator.unpadded(cap, peers)
            assert allocator.padded(size, peers) <= cap < allocator.padded(size + 1, peers)
