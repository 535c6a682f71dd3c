from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.runtime.microbatch import count_microbatches, merge, split


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


NAMES, SHAPES = ("ids", "mask", "scale"), ((2, 5), (2,), ())


def count(*tensors: Tensor) -> int:
    return count_microbatches(tensors, NAMES, SHAPES)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_minibatch_of_whole_microbatches(number: int) -> None:
    assert count(torch.zeros(2 * number, 5), torch.zeros(2 * number), torch.tensor(1.0)) == number


@pytest.mark.parametrize("shape", [(4, 6), (4,), (4, 5, 1), ()])
def test_another_shape_is_an_error_that_shows_both(shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError) as caught:
        count(torch.zeros(shape), torch.zeros(4), torch.tensor(1.0))
    assert str(caught.value).startswith(
        f"ids has shape {shape}, but the plan was made for microbatches of (2, 5)"
    )
    assert "pad the batch, or plan again" in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 3, 7])
def test_a_part_of_a_microbatch_is_an_error(size: int) -> None:
    with pytest.raises(
        InputError,
        match=rf"ids has {size} samples, which are not whole microbatches of 2; drop or pad",
    ):
        count(torch.zeros(size, 5), torch.zeros(4), torch.tensor(1.0))


def test_inputs_of_different_lengths_are_an_error() -> None:
    with pytest.raises(
        InputError, match=r"the inputs hold different numbers of microbatches: \[2, 3\]"
    ):
        count(torch.zeros(4, 5), torch.zeros(6), torch.tensor(1.0))
