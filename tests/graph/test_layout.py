"""Layouts of tensors, compared with what torch says of permuted ones."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.layout import check_strides, dense_order, is_dense, strides_with_gaps


@given(
    shape=st.lists(st.integers(0, 3), max_size=4),
    data=st.data(),
    step=st.sampled_from([1, 1, 1, 2]),
    expanded=st.booleans(),
)
def test_a_tensor_is_dense_if_it_is_contiguous_in_some_order(
    shape: list[int], data: st.DataObject, step: int, expanded: bool
) -> None:
    order = data.draw(st.permutations(range(len(shape))))
    value = torch.zeros(shape).permute(order)
    if value.dim():
        value = value[..., ::step]
    if expanded:
        value = value.unsqueeze(0).expand(2, *value.shape)
    orders = list(permutations(range(value.dim())))
    found = any(value.permute(each).is_contiguous() for each in orders)
    assert is_dense(value) == found
    assert (strides_with_gaps(value) is None) == found
    assert not found or value.permute(dense_order(value)).is_contiguous()
    assert not value.is_contiguous() or dense_order(value) == tuple(range(value.dim()))


@pytest.mark.parametrize(
    ("value", "planned"),
    [
        (torch.zeros(2, 3), (6, 1)),
        (torch.zeros(2, 3), (3, 0)),
        (torch.zeros(3, 2).t(), (6, 1)),
        (torch.zeros(2, 1).expand(2, 3), (6, 1)),
        (torch.zeros(2, 3, dtype=torch.complex64), (6, 1)),
        (torch.zeros(2, 3, dtype=torch.long), (3, 0)),
    ],
)
def test_other_strides_are_refused(value: Tensor, planned: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"hidden has strides .* but had"):
        check_strides(value, "hidden", planned)


@pytest.mark.parametrize(
    ("value", "planned"),
    [
        (torch.zeros(2, 6)[:, :3], (6, 1)),
        (torch.zeros(1, 3), (7, 1)),
        (torch.zeros(2, 3, dtype=torch.long), (6, 1)),
        (torch.zeros(()), ()),
    ],
)
def test_strides_that_round_alike_are_none(value: Tensor, planned: tuple[int, ...]) -> None:
    check_strides(value, "hidden", planned)
