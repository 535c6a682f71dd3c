"""Costs between two measured sizes of microbatches."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.cost_models.interpolation import interpolated_costs
from pipecompile.cost_models.measured_sizes import nearest_sizes, sizes_to_measure
from pipecompile.ir.graph import CostGraph, Node

FIELDS = ("forward_ns", "backward_ns", "backward_input_ns", "backward_weight_ns", "workspace_bytes")
Lines = dict[str, tuple[int, int]]  # by field what is fixed, and what each sample adds
LINES = st.fixed_dictionaries(
    {field: st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)) for field in FIELDS}
)
SIZES = st.lists(st.integers(1, 64), min_size=2, max_size=4, unique=True)


def graph_of(nodes: list[dict[str, int]]) -> CostGraph:
    made = tuple(
        Node(name=f"n{i}", parameter_bytes=0, saved_bytes=0, group=None, **times)  # type: ignore[arg-type]
        for i, times in enumerate(nodes)
    )
    return CostGraph(nodes=made, tensors=())


def at(lines: list[Lines], size: int) -> list[dict[str, int]]:
    return [{field: fixed + size * each for field, (fixed, each) in line.items()} for line in lines]


@given(st.lists(LINES, min_size=1, max_size=3), SIZES, st.integers(1, 64))
def test_what_is_linear_in_the_samples_is_found_exactly(
    lines: list[Lines], sizes: list[int], size: int
) -> None:
    known = {each: graph_of(at(lines, each)) for each in nearest_sizes(sizes, size)}
    costs = interpolated_costs(known, size)
    for index, expected in enumerate(at(lines, size)):
        cost = costs[f"n{index}"]
        assert {field: getattr(cost, field) for field in FIELDS} == expected


def test_the_line_is_broken_at_a_size_that_was_measured() -> None:
    times = {1: 100, 4: 160, 8: 320}
    known = {size: graph_of([dict.fromkeys(FIELDS, time)]) for size, time in times.items()}

    def forward_ns(size: int) -> int:
        sizes = nearest_sizes(known, size)
        costs = interpolated_costs({each: known[each] for each in sizes}, size)
        return costs["n0"].forward_ns

    assert [forward_ns(size) for size in (1, 2, 3, 4, 6, 8)] == [100, 120, 140, 160, 240, 320]
    assert forward_ns(16) == 640  # beyond the measured sizes the last line goes on


def test_nothing_is_negative_beyond_the_measured_sizes() -> None:
    known = {size: graph_of([dict.fromkeys(FIELDS, 100 * size - 350)]) for size in (4, 8)}
    assert interpolated_costs(known, 1)["n0"].backward_ns == 0


def test_on_a_cpu_the_workspace_is_left_to_the_sizes_of_tensors() -> None:
    known = {size: graph_of([dict.fromkeys(FIELDS, size)]) for size in (1, 2)}
    on_cpu = {
        size: msgspec.structs.replace(graph, allocator="cpu") for size, graph in known.items()
    }
    assert interpolated_costs(on_cpu, 2)["n0"].workspace_bytes is None


@given(SIZES, st.integers(1, 100))
def test_the_nearest_sizes_are_neighbours_around_the_size(sizes: list[int], size: int) -> None:
    low, high = nearest_sizes(sizes, size)
    assert (low, high) in set(pairwise(sorted(sizes)))
    assert low <= size <= high or size < min(sizes) or size > max(sizes)


@pytest.mark.parametrize(
    ("sizes", "measured"),
    [
        ([4], (4,)),
        ([8, 1, 2], (1, 2, 8)),
        ([1, 2, 4, 8], (1, 2, 8)),
        ([1, 2, 4, 8, 16], (1, 4, 16)),
        ([1, 2, 3, 4, 6, 8, 12, 24], (1, 4, 24)),
        ([5, 6, 7, 8], (5, 6, 8)),
    ],
)
def test_the_ends_and_what_lies_between_them_are_measured(
    sizes: list[int], measured: tuple[int, ...]
) -> None:
    assert sizes_to_measure(sizes) == measured
