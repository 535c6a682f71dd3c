from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import MicrobatchSizes, shape_of


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    places=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=4),
    data=st.data(),
)
def test_joining_undoes_cutting_along_any_dimension(
    sizes: list[int], places: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Each tensor has a number of dimensions, of which one is the batch."""
    cut = MicrobatchSizes(sizes[0], tuple(sizes))
    dims = [place % rank for rank, place in places]
    tensors = []
    for (rank, _), dim in zip(places, dims, strict=True):
        shape = data.draw(st.lists(st.integers(1, 3), min_size=rank, max_size=rank))
        shape[dim] = cut.samples
        tensors.append(torch.randn(shape))
    rows = cut.rows(tensors, dims)
    for index, (tensor, dim) in enumerate(zip(tensors, dims, strict=True)):
        parts = [row[index] for row in rows]
        assert [part.shape[dim] for part in parts] == sizes
        assert all(part.is_contiguous() for part in parts)
        assert torch.equal(cut.join(parts, dim), tensor)


def test_what_has_no_batch_is_given_whole() -> None:
    table, scale = torch.randn(3, 3), torch.tensor(2.0)
    rows = MicrobatchSizes(2, (2, 1)).rows([table, scale, torch.arange(3)], [None, None, 0])
    assert all(row[0] is table and row[1] is scale for row in rows)
    assert [row[2].tolist() for row in rows] == [[0, 1], [2]]


@given(st.integers(1, 13), st.integers(1, 5))
def test_parts_of_unequal_size_are_merged_by_their_samples(total: int, planned: int) -> None:
    x = torch.randn(total, 2).double()
    cut = MicrobatchSizes.of([x], ["x"], [(planned, 2)], [0])
    parts = [row[0] for row in cut.rows([x], [0])]
    assert [len(part) for part in parts] == list(cut.sizes)
    assert torch.equal(cut.join(parts), x)
    assert (cut.join([part.mean() for part in parts]) - x.mean()).abs() < 1e-14


@pytest.mark.parametrize("dim", [0, 1])
def test_an_input_of_another_size_is_an_error(dim: int) -> None:
    with pytest.raises(
        InputError,
        match=r"shape \(9, 9\) cannot be cut into microbatches of \[4, 3\] samples; dimension "
        f"{dim} must be 7",
    ):
        MicrobatchSizes(4, (4, 3)).rows([torch.zeros(9, 9)], [dim])


DIMS = (0, 0, None)
NAMES, SHAPES = ("ids", "mask", "scale"), ((2, 5), (2,), ())


def sizes_of(*tensors: Tensor) -> tuple[int, ...]:
    return MicrobatchSizes.of(tensors, NAMES, SHAPES, DIMS).sizes


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, (1,)), (2, (2,)), (4, (2, 2)), (7, (2, 2, 2, 1))]
)
def test_the_sizes_of_microbatches(samples: int, sizes: tuple[int, ...]) -> None:
    tensors = torch.zeros(samples, 5), torch.zeros(samples), torch.tensor(1.0)
    cut = MicrobatchSizes.of(tensors, NAMES, SHAPES, DIMS)
    assert cut.sizes == sizes
    assert cut.samples == samples
    assert cut.planned_microbatches == samples / 2
    assert cut.remainder == (1 if samples % 2 else None)
    assert sum(map(cut.weight, range(len(sizes)))) == samples / 2


OTHER = ((3, 7), (3,), ())


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_batch_along_dimension_1_has_the_declared_shape_too(samples: int) -> None:
    declared = [((5, 2), (2, 5)), ((7, 2), (2, 7))]
    for index, length in enumerate((5, 7)):
        tensors = torch.zeros(length, samples), torch.zeros(samples, length)
        assert shape_of(tensors, ["x", "mask"], declared, [1, 0]) == index
        sizes = MicrobatchSizes.of(tensors, ["x", "mask"], declared[index], [1, 0])
        assert (sizes.planned, sizes.samples) == (2, samples)


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_batch_has_the_declared_shape_that_differs_in_the_samples_alone(samples: int) -> None:
    for index, length in enumerate((5, 7)):
        tensors = torch.zeros(samples, length), torch.zeros(samples), torch.tensor(1.0)
        assert shape_of(tensors, NAMES, [SHAPES, OTHER], DIMS) == index


@pytest.mark.parametrize("shape", [(4, 6), (4,), (4, 5, 1), ()])
def test_another_shape_is_an_error_that_lists_the_declared_ones(shape: tuple[int, ...]) -> None:
    tensors = torch.zeros(shape), torch.zeros(4), torch.tensor(1.0)
    with pytest.raises(InputError) as caught:
        shape_of(tensors, NAMES, [SHAPES, OTHER], DIMS)
    assert str(caught.value) == (
        f"the batch has ids {shape}, mask (4,), scale (), but the pipeline runs microbatches of "
        "ids (2, 5), mask (2,), scale () or ids (3, 7), mask (3,), scale (): only the number of "
        "samples may differ; pad the batch, or declare its shape with shapes=[…]"
    )


def test_an_empty_batch_is_an_error() -> None:
    with pytest.raises(InputError, match="ids has no samples; leave an empty batch out"):
        sizes_of(torch.zeros(0, 5), torch.zeros(0), torch.tensor(1.0))


def test_inputs_of_different_lengths_are_an_error() -> None:
    with pytest.raises(
        InputError,
        match=r"the inputs hold different numbers of samples: \{'ids': 4, 'mask': 6\}",
    ):
        sizes_of(torch.zeros(4, 5), torch.zeros(6), torch.tensor(1.0))
