from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.frontend.microbatch import MicrobatchSizes, merge, shape_of, split


@given(st.integers(1, 5), st.integers(1, 4))
def test_merging_undoes_splitting(microbatches: int, size: int) -> None:
    x = torch.randn(microbatches * size, 3)
    tree: Any = {
        "x": x,
        "nested": (x * 2, [x[:, 0]]),
        "text": "same",
        "none": None,
        "scalar": torch.tensor(2.0),
    }
    rows = split(tree, microbatches)
    assert len(rows) == microbatches
    assert all(row["x"].shape == (size, 3) and row["text"] == "same" for row in rows)
    merged = merge(rows)
    assert torch.equal(merged["x"], x)
    assert torch.equal(merged["nested"][0], x * 2)
    assert torch.equal(merged["nested"][1][0], x[:, 0])
    assert (merged["text"], merged["none"], merged["scalar"].item()) == ("same", None, 2.0)


def test_rows_are_in_order() -> None:
    assert [row.tolist() for row in split(torch.arange(6), 3)] == [[0, 1], [2, 3], [4, 5]]


def test_scalars_are_averaged_and_the_rest_is_joined() -> None:
    merged = merge(
        [
            {"loss": torch.tensor(float(i)), "logits": torch.full((2, 1), float(i)), "n": 7}
            for i in (1, 2)
        ]
    )
    assert merged["loss"].item() == 1.5
    assert merged["logits"].flatten().tolist() == [1, 1, 2, 2]
    assert merged["n"] == 7


def test_nothing_is_split_into_nothing() -> None:
    assert split(None, 3) == [None, None, None]


def test_a_target_of_another_length_is_an_error() -> None:
    with pytest.raises(
        InputError,
        match=r"a tensor of shape \(7, 2\) cannot be cut into 3 microbatches; dimension 0",
    ):
        split({"labels": torch.zeros(7, 2)}, 3)


@given(st.integers(1, 13), st.integers(1, 5), st.integers(1, 3))
def test_parts_of_unequal_size_are_merged_by_their_samples(
    total: int, planned: int, rows_each: int
) -> None:
    tree = {"x": torch.randn(total, 2).double(), "rows": torch.randn(rows_each * total)}
    cut = MicrobatchSizes.of([tree["x"]], ["x"], [(planned, 2)])
    parts = [dict(zip(tree, row, strict=True)) for row in cut.rows([*tree.values()])]
    assert [len(part["x"]) for part in parts] == list(cut.sizes)
    assert [len(part["rows"]) for part in parts] == [rows_each * size for size in cut.sizes]
    merged = cut.merge([{**part, "mean": part["x"].mean()} for part in parts])
    assert torch.equal(merged["x"], tree["x"])
    assert torch.equal(merged["rows"], tree["rows"])
    assert (merged["mean"] - tree["x"].mean()).abs() < 1e-14


def test_a_target_that_does_not_fit_unequal_parts_is_an_error() -> None:
    with pytest.raises(
        InputError,
        match=r"shape \(9,\) cannot be cut into microbatches of \[4, 3\] samples; dimension 0 must "
        "be a multiple of 7",
    ):
        MicrobatchSizes(4, (4, 3)).rows([torch.zeros(9)])


NAMES, SHAPES = ("ids", "mask", "scale"), ((2, 5), (2,), ())


def sizes_of(*tensors: Tensor) -> tuple[int, ...]:
    return MicrobatchSizes.of(tensors, NAMES, SHAPES).sizes


@pytest.mark.parametrize(
    ("samples", "sizes"), [(1, (1,)), (2, (2,)), (4, (2, 2)), (7, (2, 2, 2, 1))]
)
def test_the_sizes_of_microbatches(samples: int, sizes: tuple[int, ...]) -> None:
    tensors = torch.zeros(samples, 5), torch.zeros(samples), torch.tensor(1.0)
    cut = MicrobatchSizes.of(tensors, NAMES, SHAPES)
    assert cut.sizes == sizes
    assert cut.samples == samples
    assert cut.planned_microbatches == samples / 2
    assert cut.remainder == (1 if samples % 2 else None)
    assert sum(map(cut.weight, range(len(sizes)))) == samples / 2


OTHER = ((3, 7), (3,), ())


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_a_batch_has_the_declared_shape_that_differs_in_the_samples_alone(samples: int) -> None:
    for index, length in enumerate((5, 7)):
        tensors = torch.zeros(samples, length), torch.zeros(samples), torch.tensor(1.0)
        assert shape_of(tensors, NAMES, [SHAPES, OTHER]) == index


@pytest.mark.parametrize("shape", [(4, 6), (4,), (4, 5, 1), ()])
def test_another_shape_is_an_error_that_lists_the_declared_ones(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as caught:
        shape_of((torch.zeros(shape), torch.zeros(4), torch.tensor(1.0)), NAMES, [SHAPES, OTHER])
    assert str(caught.value) == (
        f"the batch has ids {shape}, mask (4,), scale (), but the pipeline runs microbatches of "
        "ids (2, 5), mask (2,), scale () or ids (3, 7), mask (3,), scale (): only dimension 0 may "
        "differ; pad the batch, or declare its shape with shapes=[…]"
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
