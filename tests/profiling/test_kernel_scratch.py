"""Scratch of convolutions and norms against the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from allocations import allocations, highest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.memory_model.stage_values import BOUND_SCRATCH
from pipecompile.profiling.kernel_scratch import (
    first_half,
    hidden_bytes,
    own_instructions,
    scratch_on,
)

SCRATCH = scratch_on("cpu", own_instructions())
NEAR = 0.02
SMALL = 1024  # bytes, of biases
BUFFERS = 3 * 4096  # bytes, of oneDNN's own

# Images, channels in and out, their size, the kernel's size, stride.
SHAPES = [
    (2, 3, 64, 32, 3, 1), (2, 4, 64, 32, 3, 1), (2, 12, 64, 32, 3, 1), (2, 16, 64, 32, 3, 1), (2, 20, 64, 32, 3, 1),
    (2, 32, 8, 32, 3, 1), (2, 32, 20, 32, 5, 1), (2, 64, 64, 8, 3, 1), (2, 128, 256, 4, 3, 1),
]  # fmt: skip
# With strides the gradient of the input takes up to a sixth more or less.
STRIDED = [(2, 3, 256, 64, 8, 8), (2, 3, 64, 64, 7, 2), (2, 8, 64, 32, 3, 2), (2, 32, 64, 16, 3, 2)]
CASES = [(shape, wanted) for shape in SHAPES for wanted in (False, True)] + [
    (shape, False) for shape in STRIDED
]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="blocks were measured with AVX-512"
)
@pytest.mark.parametrize(("shape", "of_value"), CASES, ids=str)
def test_a_convolution_takes_the_scratch_that_is_said(
    shape: tuple[int, ...], of_value: bool
) -> None:
    images, inputs, outputs, size, kernel, stride = shape
    torch.manual_seed(0)
    value, weight = (
        torch.randn(images, inputs, size, size),
        torch.randn(outputs, inputs, kernel, kernel),
    )
    bias, scratch = torch.randn(outputs), SCRATCH
    arguments = (value, weight, bias, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    result = torch.convolution(*arguments)
    said = scratch(torch.ops.aten.convolution.default, arguments, result)
    assert said == pytest.approx(taken(lambda: torch.convolution(*arguments)), rel=NEAR, abs=SMALL)

    given = (
        torch.randn_like(result),
        value,
        weight,
        [outputs],
        *arguments[3:],
        [of_value, True, True],
    )
    backward = torch.ops.aten.convolution_backward.default
    said = scratch(backward, given, None)
    assert said == pytest.approx(taken(lambda: backward(*given)), rel=NEAR, abs=SMALL)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("inputs", "outputs", "size", "kernel", "stride", "groups"),
    [
        (32, 64, 16, 3, 1, 1), (64, 64, 16, 3, 2, 1), (64, 128, 16, 1, 2, 1), (32, 16, 32, 3, 1, 1),
        (256, 256, 8, 3, 1, 1), (64, 64, 16, 3, 1, 4), (64, 64, 16, 1, 1, 4), (96, 96, 16, 7, 1, 96),
        (64, 64, 16, 3, 2, 64), (32, 1, 32, 3, 1, 1), (96, 192, 16, 2, 2, 1)
    ],
)  # fmt: skip
def test_the_gradient_of_an_input_alone_takes_the_scratch_that_is_said(
    inputs: int, outputs: int, size: int, kernel: int, stride: int, groups: int, channels_last: bool
) -> None:
    """As in a first half of a backward."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    value = torch.randn(4, inputs, size, size).to(memory_format=layout)
    weight, rest = (
        torch.randn(outputs, inputs // groups, kernel, kernel),
        ([kernel // 2] * 2, [1, 1], False, [0, 0]),
    )
    gradient = torch.randn_like(torch.convolution(value, weight, None, [stride] * 2, *rest, groups))
    backward = torch.ops.aten.convolution_backward.default
    whole = (gradient, value, weight, [outputs], [stride] * 2, *rest, groups, [True, True, True])
    half, _ = first_half(backward, whole, backward(*whole))
    found = taken(lambda: backward(*half))
    assert 0 <= SCRATCH(backward, half, None) - found <= 0.02 * found + 90_112 * channels_last


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("dtype", "images", "channels", "size", "kernel", "stride"),
    [
        (torch.float64, 1, 32, 16, 3, 1), (torch.float64, 2, 32, 16, 3, 1), (torch.float64, 1, 64, 8, 5, 2),
        (torch.float32, 1, 64, 16, 3, 1), (torch.float32, 1, 64, 17, 3, 2), (torch.float32, 1, 512, 2, 3, 1),
        (torch.float32, 1, 64, 8, 1, 2),
    ],
)  # fmt: skip
def test_a_convolution_that_onednn_has_not_unfolds_its_input(
    dtype: torch.dtype,
    images: int,
    channels: int,
    size: int,
    kernel: int,
    stride: int,
    layout: torch.memory_format,
) -> None:
    """In float64, and of one small image."""
    value = torch.randn(images, channels, size, size, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(64, channels, kernel, kernel, dtype=dtype)
    arguments = (value, weight, None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
    result, backward = torch.convolution(*arguments), torch.ops.aten.convolution_backward.default
    assert scratch_of("convolution", arguments, result) == taken(
        lambda: torch.convolution(*arguments)
    )
    for wanted in ([True, True, False], [False, True, False], [True, False, False]):
        given = (torch.randn_like(result), value, weight, [0], *arguments[3:], wanted)
        assert scratch_of("convolution_backward", given) == taken(partial(backward, *given)), wanted


@pytest.mark.parametrize(
    ("channels", "size", "kernel", "groups"),
    [
        (128, (128,), 127, 16),
        (64, (64,), 15, 8),
        (64, (4, 4), 5, 8),
        (64, (16, 16), 3, 4),
        (48, (16, 16), 7, 4),
    ],
    ids=str,
)
def test_gradients_of_grouped_weights_take_no_more_than_is_said(
    channels: int, size: tuple[int, ...], kernel: int, groups: int
) -> None:
    """Of a few channels each, as in a convolution of positions."""
    value, weight = (
        torch.randn(2, channels, *size),
        torch.randn(channels, channels // groups, *[kernel] * len(size)),
    )
    ones, padding = [1] * len(size), [kernel // 2] * len(size)
    rest = [0], ones, padding, ones, False, [0] * len(size), groups, [True, True, False]
    given = (torch.randn_like(value), value, weight, *rest)
    found = taken(lambda: torch.ops.aten.convolution_backward.default(*given))
    assert found <= scratch_of("convolution_backward", given) * BOUND_SCRATCH <= 1.4 * found


@pytest.mark.parametrize("images", [1, 4])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_what_is_not_in_order_is_copied_first(
    images: int, kernel: int, channels_last: bool
) -> None:
    def given(value: Tensor, gradient: Tensor) -> tuple[Any, ...]:
        rest = [0], [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1
        return gradient, value, torch.randn(64, 64, kernel, kernel), *rest, [True, True, False]

    plain = torch.randn(images, 64, 16, 16)
    value = plain.to(memory_format=torch.channels_last) if channels_last else plain
    last, apart = (
        torch.randn_like(plain).to(memory_format=torch.channels_last),
        torch.randn(images, 64, 16, 32)[..., ::2],
    )
    gradients = [plain, last, apart, torch.randn(1, 1, 1, 1).expand(plain.shape)]
    cases = [given(value, gradient) for gradient in gradients] + [given(apart, plain)]
    for case in cases:
        found = taken(partial(torch.ops.aten.convolution_backward.default, *case))
        assert scratch_of("convolution_backward", case) == found


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "dilation", "transposed"),
    [
        ((64,), (5,), 1, 1, False), ((64,), (1,), 1, 1, False), ((8, 8), (3, 3), 1, 2, False),
        ((4, 8, 8), (3, 3, 3), 1, 1, False), ((8, 8), (3, 3), 2, 1, True), ((64,), (4,), 2, 1, True),
    ],
)  # fmt: skip
def test_other_convolutions_take_the_scratch_that_is_said(
    images: int,
    size: tuple[int, ...],
    kernel: tuple[int, ...],
    stride: int,
    dilation: int,
    transposed: bool,
) -> None:
    """Of one, two and three dimensions; one image by PyTorch itself, two by oneDNN, transposed ones with a margin."""
    value, weight = torch.randn(images, 32, *size), torch.randn(32, 32, *kernel)
    steps, padding = [stride] * len(size), [dilation * (each // 2) for each in kernel]
    arguments = (
        value,
        weight,
        None,
        steps,
        padding,
        [dilation] * len(size),
        transposed,
        [0] * len(size),
        1,
    )
    result, backward = torch.convolution(*arguments), torch.ops.aten.convolution_backward.default
    said, found = (
        scratch_of("convolution", arguments, result),
        taken(lambda: torch.convolution(*arguments)),
    )
    assert said * BOUND_SCRATCH >= found if transposed and images > 1 else said == found
    for wanted in ([True, True, False], [False, True, False], [True, False, False]):
        given = (torch.randn_like(result), value, weight, [0], *arguments[3:], wanted)
        said, found = scratch_of("convolution_backward", given), taken(partial(backward, *given))
        assert said == pytest.approx(found, rel=0.001), wanted


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(
    ("dtype", "images", "channels", "kernel", "stride", "groups"),
    [
        (torch.float64, 2, 32, 3, 1, 4), (torch.float16, 2, 64, 3, 1, 1),
        (torch.bfloat16, 2, 64, 1, 1, 1), (torch.bfloat16, 1, 64, 3, 1, 1),
        (torch.bfloat16, 4, 128, 3, 2, 1), (torch.bfloat16, 2, 96, 7, 1, 96), (torch.bfloat16, 2, 64, 3, 1, 4),
    ],
)  # fmt: skip
def test_other_types_and_groups_take_no_more_than_their_margin(
    dtype: torch.dtype,
    images: int,
    channels: int,
    kernel: int,
    stride: int,
    groups: int,
    layout: torch.memory_format,
) -> None:
    value = torch.randn(images, channels, 16, 16, dtype=dtype).to(memory_format=layout)
    weight = torch.randn(channels, channels // groups, kernel, kernel, dtype=dtype)
    arguments = (
        value,
        weight,
        None,
        [stride] * 2,
        [kernel // 2] * 2,
        [1, 1],
        False,
        [0, 0],
        groups,
    )
    result, backward = torch.convolution(*arguments), torch.ops.aten.convolution_backward.default
    said = scratch_of("convolution", arguments, result) * BOUND_SCRATCH
    assert said >= taken(lambda: torch.convolution(*arguments)) - BUFFERS
    for wanted in ([True, True, False], [True, False, False]):
        given = (torch.randn_like(result), value, weight, [0], *arguments[3:], wanted)
        assert (
            scratch_of("convolution_backward", given) * BOUND_SCRATCH
            >= taken(partial(backward, *given)) - BUFFERS
        )


@pytest.mark.parametrize(
    ("size", "kernel"), [((2, 2), 3), ((2, 5), 3), ((4, 4), 5), ((1, 4), 3)], ids=str
)
def test_images_less_high_than_the_kernel_take_what_is_said(
    size: tuple[int, int], kernel: int
) -> None:
    """With AVX2 more sums beside each other than with AVX-512."""
    value, weight = torch.randn(2, 64, *size), torch.randn(128, 64, kernel, kernel)
    given = (
        torch.randn(2, 128, *size),
        value,
        weight,
        [0],
        [1, 1],
        [kernel // 2] * 2,
        [1, 1],
        False,
        [0, 0],
        1,
    )
    given = (*given, [True, True, False])
    found = taken(lambda: torch.ops.aten.convolution_backward.default(*given))
    assert scratch_of("convolution_backward", given) == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize(
    ("channels", "size", "kernel"),
    [(40, 16, 7), (80, 8, 7), (64, 32, 5), (64, 32, 3), (160, 4, 7), (320, 2, 7)],
    ids=str,
)
def test_a_depthwise_convolution_takes_the_scratch_that_is_said(
    channels: int, size: int, kernel: int
) -> None:
    """With channels last; on images lower than the kernel with one thread."""
    value, weight = torch.randn(2, channels, size, size), torch.randn(channels, 1, kernel, kernel)
    value, gradient = (
        each.to(memory_format=torch.channels_last) for each in (value, torch.randn_like(value))
    )
    rest = [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], channels
    given = (gradient, value, weight, [channels], *rest, [True, True, True])
    found = taken(lambda: torch.ops.aten.convolution_backward.default(*given))
    if size > kernel or torch.get_num_threads() == 1:
        assert scratch_of("convolution_backward", given) == pytest.approx(
            found, rel=0.03, abs=SMALL
        )


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_transposed_convolution_takes_no_more_than_its_margin(kernel: int) -> None:
    value, weight = torch.randn(2, 64, 16, 16), torch.randn(64, 32, kernel, kernel)
    arguments = (value, weight, None, [2, 2], [kernel // 2] * 2, [1, 1], True, [1, 1], 1)
    result = torch.convolution(*arguments)
    assert scratch_of("convolution", arguments, result) >= taken(
        lambda: torch.convolution(*arguments)
    )


def test_nothing_takes_nothing() -> None:
    value, weight = torch.randn(2, 0, 8, 8), torch.randn(4, 0, 3, 3)
    assert (
        scratch_of(
            "convolution", (value, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1), None
        )
        == 0
    )


@pytest.mark.parametrize(
    ("steps", "images", "inputs", "hidden"),
    [
        (1, 1, 16, 16),
        (24, 16, 32, 32),
        (24, 16, 64, 32),
        (24, 16, 32, 64),
        (10, 8, 100, 100),
        (24, 16, 32, 40),
    ],
)
def test_the_workspace_of_an_lstm_is_what_it_keeps(
    steps: int, images: int, inputs: int, hidden: int
) -> None:
    layer = nn.LSTM(inputs, hidden)
    with Workspaces() as found:
        layer(torch.randn(steps, images, inputs))
    ((said, taken),) = found.sizes
    assert said == pytest.approx(taken, rel=0.04)


class Workspaces(TorchDispatchMode):
    """What is said of the workspaces of an LSTM, and what they take."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if found := hidden_bytes(func, args, result):
            self.sizes.append((found[1], found[0].untyped_storage().nbytes()))
        return result


@pytest.mark.parametrize(
    "layouts", [(False, False), (True, True), (False, True), (True, False)], ids=str
)
def test_the_backward_of_a_batch_norm_takes_the_scratch_that_is_said(
    layouts: tuple[bool, bool],
) -> None:
    torch.manual_seed(0)
    value, gradient = (
        torch.randn(4, 64, 16, 16).to(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )
        for last in layouts
    )
    state = [torch.rand(64) + 0.5 for _ in range(5)]
    given = (gradient, value, *state, True, 1e-5, [True, True, True])
    backward = torch.ops.aten.native_batch_norm_backward.default
    said = SCRATCH(backward, given, None)
    assert said == pytest.approx(taken(lambda: backward(*given)), rel=NEAR, abs=SMALL)


@pytest.mark.parametrize("in_order", [False, True])
def test_the_backward_of_an_upsampling_copies_a_gradient_that_is_not_in_order(
    in_order: bool,
) -> None:
    gradient = torch.randn(2, 32, 32, 32) if in_order else torch.randn(2, 48, 32, 32)[:, :32]
    nearest = torch.ops.aten.upsample_nearest2d_backward.default
    given = (gradient, [32, 32], [2, 32, 16, 16], None, None)
    assert SCRATCH(nearest, given, None) == taken(lambda: nearest(*given))
    bilinear = torch.ops.aten.upsample_bilinear2d_backward.default
    given = (gradient, [32, 32], [2, 32, 16, 16], False, None, None)
    assert SCRATCH(bilinear, given, None) == taken(lambda: bilinear(*given))


def scratch_of(name: str, arguments: Sequence[Any], result: Tensor | None = None) -> int:
    return SCRATCH(getattr(torch.ops.aten, name).default, arguments, result)


def taken(function: Callable[[], Any]) -> int:
    """The most that the allocator gives beyond what `function` returns."""
    found = function()
    most = highest(allocations(function))
    returned = (
        [found] if isinstance(found, Tensor) else [value for value in found if value is not None]
    )
    return most - sum(value.nbytes for value in returned)
