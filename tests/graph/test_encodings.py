"""Encodings restore what they encode: bits, masks, signs, indices, and half precision."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from saved_tensor_models import (
    bytes_of,
    saved_and_restored,
)
from torch import nn
from zoo import same

from pipecompile.graph.encodings import (
    encode_mask,
    encode_narrow,
    encode_sign,
    pack_bits,
    unpack_bits,
)
from pipecompile.graph.saved_tensors import EncodedStorages, encode_saved_tensors
from pipecompile.ir.encodings import CHUNK_ELEMENTS


@pytest.mark.parametrize(
    "value", [1 / 3, -1e30, 1e-44, torch.finfo(torch.float32).min, float("inf")]
)
def test_half_rounds_each_element(value: float) -> None:
    (got,) = saved_and_restored("half", torch.tensor([value]))
    assert got.item() == torch.tensor(value).bfloat16().item()  # of the lowest number −∞
    (exact,) = saved_and_restored("half", torch.tensor([value], dtype=torch.float64))
    assert exact.item() == value


@given(flags=st.lists(st.booleans(), max_size=70))
def test_eight_booleans_are_a_byte(flags: list[bool]) -> None:
    packed = pack_bits(torch.tensor(flags, dtype=torch.bool))
    assert packed.numel() == -(-len(flags) // 8)
    assert unpack_bits(packed, len(flags)).tolist() == flags


NUMBERS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, float("inf"), -float("inf"), float("nan"), 3.5]
)


@given(
    values=st.lists(NUMBERS, min_size=1, max_size=20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_relu_needs_only_the_sign(values: list[float], dtype: torch.dtype) -> None:
    gradients = []
    for encodings in ((), ("relu",)):
        value = torch.tensor(values, dtype=dtype, requires_grad=True)
        with encode_saved_tensors(*encodings, storages=EncodedStorages(), exempt=()):
            result = (value * 1).relu()
        result.backward(torch.arange(1, 1 + len(values), dtype=dtype))
        gradients.append(value.grad)
    assert same(*gradients)


@pytest.fixture
def _filled() -> Iterator[None]:
    """Fill new memory with NaN, so that a gradient shows whether it was read."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_filled")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [(5, 7), (16, 15), (20, 300)])  # of indices in 1, 1 and 2 bytes
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d((3, 2), (2, 3), padding=1, ceil_mode=True),
        nn.MaxPool2d(2, dilation=2, stride=1),
        nn.AvgPool2d(3, 2, padding=1, count_include_pad=False),
        nn.AdaptiveMaxPool2d((3, 4)),
        nn.AdaptiveAvgPool2d((3, 4)),
        nn.MaxPool1d(2),
        nn.MaxPool3d((1, 2, 2)),
        nn.AdaptiveMaxPool3d((1, 2, 3)),
        nn.AvgPool3d((1, 2, 2)),
    ],
    ids=str,
)
def test_pooling_reads_only_the_layout_of_its_input(
    pool: nn.Module, size: tuple[int, int], layout: Any
) -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, *size).to(memory_format=layout).round()  # with ties
    image = image[0] if isinstance(pool, nn.MaxPool1d) else image
    gradients = []
    for encodings in ((), ("pool",)):
        value = image.clone().requires_grad_()
        scaled = value * 2
        with encode_saved_tensors(
            *encodings, storages=EncodedStorages(), exempt=()
        ) as note_results:
            result = note_results(
                pool(scaled[:, None])[:, 0] if "3d" in str(pool) else pool(scaled)
            )
        result.square().sum().backward()
        gradients.append(value.grad)
    assert same(*gradients)


def test_a_mask_is_zero_or_one_constant() -> None:
    for values in ([0.0, 1.25], [0.0], [-2.0, 0.0], [7.5], [float("nan"), 0.0]):
        elements = torch.tensor(values * 50)
        encoded = encode_mask(elements)
        assert encoded is not None
        assert same(bytes_of(encoded.restore()), bytes_of(elements))
    for values in ([0.0, 1.0, 2.0], [0.0, -0.0, 1.0], [1.0, 2.0], [-0.0, 1.0]):
        assert encode_mask(torch.tensor(values * 50)) is None
    late = torch.zeros(1000)
    late[900:902] = torch.tensor([1.0, 2.0])
    assert encode_mask(late) is None


def test_a_mask_has_one_constant_in_all_chunks() -> None:
    chunk = CHUNK_ELEMENTS["cpu"]
    wide = torch.zeros(2 * chunk + 13)
    wide[chunk + 5 :: 3] = 2.5
    encoded = encode_mask(wide)
    assert encoded is not None and torch.equal(encoded.restore(), wide)
    assert torch.equal(encode_sign(wide).restore(), (wide > 0).float())
    wide[5] = 1.5
    assert encode_mask(wide) is None


def test_indices_take_the_smallest_integers() -> None:
    for bound, width in ((256, 1), (257, 2), (2**15, 2), (2**15 + 1, 4), (2**31, 4)):
        indices = torch.tensor([0, bound - 1])
        found: Any = encode_narrow(indices, bound=bound)
        assert found.elements.dtype.itemsize == width
        assert torch.equal(found.restore(), indices)
    assert encode_narrow(torch.tensor([0, 2**31]), bound=2**31 + 1) is None
