"""Digests of what ranks are given: other samples have other digests, also of large tensors."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipecompile.training.step_agreement import MOST_ELEMENTS, _digest_of

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(2, 9),
    width=st.sampled_from([1, 7, MOST_ELEMENTS // 4, MOST_ELEMENTS + 3]),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_another_row_is_another_digest(
    rows: int, width: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, rows - 1))
    values = torch.randint(0, 2, (rows, width), generator=torch.Generator().manual_seed(row))
    changed = values.clone()
    changed[row] = 1 - changed[row]
    assert _digest_of([values.to(dtype)]) == _digest_of([values.to(dtype).clone()])
    assert _digest_of([values.to(dtype)]) != _digest_of([changed.to(dtype)])


def test_the_layout_in_memory_does_not_count() -> None:
    values = torch.arange(12.0).view(3, 4)
    assert _digest_of([values.T.contiguous().T]) == _digest_of([values])


def test_nothing_given_has_no_digest() -> None:
    assert _digest_of(None) == "" and _digest_of([3, "words"]) == ""
    assert _digest_of([torch.empty(0, 4)]) != ""
