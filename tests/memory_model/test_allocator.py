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
        start = allocator.padded(0, 0, peers)
        for cap in range(start - 100, start + 400):
            size = allocator.most_persistent(cap, peers)
            assert allocator.padded(size, 0, peers) <= cap < allocator.padded(size + 1, 0, peers)


@pytest.mark.parametrize("name", ALLOCATORS)
def test_what_comes_and_goes_has_the_room_that_is_left(name: AllocatorName) -> None:
    allocator = ALLOCATORS[name]
    for peers in (0, 2):
        start = allocator.padded(100, 0, peers)
        for cap in range(start, start + 400):
            size = allocator.most_transient(cap, peers, 100)
            assert (
                allocator.padded(100, size, peers) <= cap < allocator.padded(100, size + 1, peers)
            )
        assert allocator.most_transient(start - 7, peers, 100) == -7


def test_gaps_are_left_by_what_comes_and_goes() -> None:
    gpu, cpu = ALLOCATORS["cuda"], ALLOCATORS["cpu"]
    assert gpu.padded(0, 9 << 20, 0) - gpu.padded(9 << 20, 0, 0) == 1 << 20
    assert cpu.padded(0, 9 << 20, 0) == cpu.padded(9 << 20, 0, 0)
