"""The margin for workspace of kernels, and how it lies to what the allocator gives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from allocations import allocations, highest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.memory_model.stage_values import BOUND_WORKSPACE
from pipecompile.profiling.kernel_workspace import hidden_bytes, workspace_on

aten = torch.ops.aten
WORKSPACE = workspace_on("cpu")
BUFFERS = 1 << 16  # bytes of oneDNN's own, which a bound has for each rank
PLAIN, LAST = torch.contiguous_format, torch.channels_last


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Run kernels as a rank does, in one thread: more threads take patches for each of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Convolution:
    """One of square images and kernels, and its backward."""

    def __init__(
        self,
        channels: tuple[int, int],
        size: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        *,
        images: int = 2,
        dtype: torch.dtype = torch.float32,
        dilation: int = 1,
        is_transposed: bool = False,
    ) -> None:
        inputs, outputs = reversed(channels) if is_transposed else channels
        self.value = torch.randn(images, channels[0], size, size, dtype=dtype)
        self.weight = torch.randn(outputs, inputs // groups, kernel, kernel, dtype=dtype)
        self.rest = [stride] * 2, [kernel // 2] * 2, [dilation] * 2, is_transposed, [0, 0], groups

    def laid_out(self, layout: torch.memory_format) -> Convolution:
        """The same with images and weights in this order of dimensions."""
        self.value = self.value.to(memory_format=layout)
        self.weight = self.weight.to(memory_format=layout)
        return self

    @property
    def forward(self) -> tuple[Any, ...]:
        """Its arguments."""
        return self.value, self.weight, None, *self.rest

    @property
    def result(self) -> Tensor:
        """What it returns."""
        return torch.convolution(*self.forward)

    @property
    def backward(self) -> tuple[Any, ...]:
        """The arguments of its backward."""
        wanted = [True, True, False]
        return torch.randn_like(self.result), self.value, self.weight, [0], *self.rest, wanted


# Channels in and out, size, kernel, stride, groups: as in residual networks, U-Nets and ConvNeXts.
CONVOLUTIONS = [
    ((32, 64), 16, 3, 1, 1), ((64, 64), 32, 3, 2, 1), ((64, 32), 16, 5, 1, 1),
    ((64, 64), 32, 1, 1, 1), ((64, 64), 16, 1, 2, 1), ((96, 96), 16, 7, 1, 96),
]  # fmt: skip
LAYOUTS = pytest.mark.parametrize("layout", [PLAIN, LAST], ids=str)


@pytest.mark.one_case_in(3)
@LAYOUTS
@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
def test_a_convolution_takes_no_more_than_its_margin(
    shape: Any, layout: torch.memory_format
) -> None:
    check_margin(Convolution(*shape).laid_out(layout))


RARE = {
    "images lower than the kernel": Convolution((64, 64), 2, 5, images=8),
    "one small image": Convolution((16, 16), 32, 3, images=1),
    "one colour": Convolution((1, 1), 48, 4, images=4),
    "from one colour": Convolution((1, 4), 48, 4, images=4),
    "to three colours": Convolution((4, 3), 48, 4, images=4),
    "1 × 1, sixteen images": Convolution((8, 24), 32, 1, images=16),
    "1 × 1 in groups": Convolution((8, 40), 42, 1, 1, 4, images=6),
    "few colours with a stride": Convolution((2, 88), 40, 3, 2, images=4),
    "dilated": Convolution((88, 19), 6, 5, images=4, dilation=2),
    "dilated, larger": Convolution((72, 24), 45, 3, images=7, dilation=2),
    "depthwise on one position": Convolution((18, 18), 1, 5, 1, 18, images=5),
    "float64": Convolution((32, 64), 32, 3, dtype=torch.float64),
    "bfloat16": Convolution((32, 64), 32, 3, images=4, dtype=torch.bfloat16),
    "bfloat16, depthwise": Convolution((64, 64), 24, 7, 2, 64, images=3, dtype=torch.bfloat16),
    "float16 in groups": Convolution((48, 48), 32, 3, 1, 4, images=4, dtype=torch.float16),
    "odd groups": Convolution((40, 40), 32, 5, 1, 2, images=2),
    "odd groups of one image": Convolution((36, 6), 48, 4, 1, 3, images=1),
    "odd groups with a stride": Convolution((80, 8), 8, 7, 2, 4, images=2),
    "transposed": Convolution((64, 64), 16, 3, 2, images=4, is_transposed=True),
    "transposed, one image": Convolution((3, 16), 64, 3, images=1, is_transposed=True),
    "transposed, depthwise": Convolution((12, 12), 48, 3, 2, 12, images=8, is_transposed=True),
    "transposed, float64": Convolution(
        (32, 64), 16, 3, 2, images=4, dtype=torch.float64, is_transposed=True
    ),
}


@pytest.mark.one_case_in(5)
@LAYOUTS
@pytest.mark.parametrize("convolution", RARE.values(), ids=list(RARE))
def test_a_rare_convolution_takes_no_more_than_its_margin(
    convolution: Convolution, layout: torch.memory_format
) -> None:
    check_margin(convolution.laid_out(layout))


def check_margin(convolution: Convolution) -> None:
    """Compare the workspace of both directions with what the allocator gives."""
    backward = aten.convolution_backward.default
    taken_bytes = max(
        taken(partial(torch.convolution, *convolution.forward)),
        taken(partial(backward, *convolution.backward)),
    )
    predicted = max(
        workspace_of("convolution", convolution.forward, convolution.result),
        workspace_of("convolution_backward", convolution.backward),
    )
    assert predicted * BOUND_WORKSPACE + BUFFERS >= taken_bytes


def test_a_usual_one_with_channels_first_copies_its_images_or_its_weight() -> None:
    wide, deep = Convolution((3, 64), 16, 3), Convolution((64, 64), 4, 3)
    x, y = wide.value.nbytes, wide.result.nbytes
    copies = x * 16 // 3 + y  # colours fill a block
    assert workspace_of("convolution", wide.forward, wide.result) == copies
    assert workspace_of("convolution_backward", wide.backward) == copies
    copies = deep.value.nbytes + deep.weight.nbytes
    assert workspace_of("convolution_backward", deep.backward) == copies
    strided = Convolution((64, 64), 32, 3, stride=2)
    assert workspace_of("convolution_backward", strided.backward) == 2 * strided.value.nbytes


@pytest.mark.parametrize("channels", [(24, 8), (20, 20), (12, 12), (40, 40)], ids=str)
def test_channels_are_padded_to_blocks(channels: tuple[int, int]) -> None:
    case = Convolution(channels, 32, 3)
    case.value = torch.randn(8, channels[0], 32, 32)  # large beside what the kernel has of its own
    taken_bytes = taken(partial(aten.convolution_backward.default, *case.backward))
    assert workspace_of("convolution_backward", case.backward) * BOUND_WORKSPACE >= taken_bytes


def test_a_usual_one_with_channels_last_copies_its_weight() -> None:
    dense = Convolution((32, 64), 16, 3).laid_out(LAST)
    assert workspace_of("convolution", dense.forward, dense.result) == 3 * dense.weight.nbytes

    depthwise = Convolution((32, 32), 16, 7, groups=32).laid_out(LAST)
    blocks = (16 * 16 + 2) * depthwise.weight.nbytes
    assert workspace_of("convolution_backward", depthwise.backward) == blocks


def test_any_other_has_the_patches_of_all_images_besides() -> None:
    case = Convolution((16, 32), 16, 3, images=4, dilation=2)
    x, y, weight = case.value.nbytes, case.result.nbytes, case.weight.nbytes
    patches = 9 * case.result.nbytes // 2  # of 16 channels
    assert workspace_of("convolution", case.forward, case.result) == x + y + 4 * weight + patches


def test_backwards_of_batch_norms_and_upsampling_take_no_more_than_a_copy_of_the_gradient() -> None:
    value, gradient = torch.randn(4, 64, 16, 16), torch.randn(4, 64, 16, 16)
    state = [torch.rand(64) + 0.5 for _ in range(5)]
    norm = (gradient, value, *state, True, 1e-5, [True, True, True])
    part = torch.randn(4, 96, 16, 16)[:, :64]  # of a concatenation
    nearest = (part, [16, 16], [4, 64, 8, 8], None, None)
    bilinear = (part, [16, 16], [4, 64, 8, 8], False, None, None)
    cases = {
        "native_batch_norm_backward": norm,
        "upsample_nearest2d_backward": nearest,
        "upsample_bilinear2d_backward": bilinear,
    }
    for name, arguments in cases.items():
        taken_bytes = taken(partial(getattr(aten, name).default, *arguments))
        assert workspace_of(name, arguments) == pytest.approx(taken_bytes, abs=1024), name


@pytest.mark.parametrize(
    ("steps", "images", "inputs", "hidden"),
    [(1, 1, 16, 16), (24, 16, 32, 32), (24, 16, 64, 32), (24, 16, 32, 64), (24, 16, 32, 40)],
)
def test_the_workspace_of_an_lstm_is_what_it_keeps(
    steps: int, images: int, inputs: int, hidden: int
) -> None:
    layer = nn.LSTM(inputs, hidden)
    with Workspaces() as workspaces:
        layer(torch.randn(steps, images, inputs))
    ((predicted, actual),) = workspaces.sizes
    assert predicted == pytest.approx(actual, rel=0.04)


class Workspaces(TorchDispatchMode):
    """Collects the workspaces of LSTM layers: predicted and actual bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if hidden := hidden_bytes(func, args, result):
            self.sizes.append((hidden[1], hidden[0].untyped_storage().nbytes()))
        return result


COSTED = """
import torch
from torch import fx, nn
from pipecompile.planner.draft import costs_digest
from pipecompile.cost_models.flops import Flops
from pipecompile.profiling.profile import profile
layers = nn.Conv2d(8, 8, 5, padding=2, groups=8), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 7, padding=3)
graph = fx.symbolic_trace(nn.Sequential(*layers))
print(costs_digest(profile(graph, [torch.zeros(2, 8, 4, 4)], Flops())))
"""


@pytest.mark.sweep
def test_costs_by_flops_are_the_same_bytes_on_every_cpu() -> None:
    def digest(**instructions: str) -> str:
        command, surroundings = [sys.executable, "-c", COSTED], {**os.environ, **instructions}
        return subprocess.run(
            command, env=surroundings, check=True, capture_output=True, text=True
        ).stdout

    least = digest(ATEN_CPU_CAPABILITY="default", DNNL_MAX_CPU_ISA="SSE41")
    assert least and least == digest()


def workspace_of(name: str, arguments: Sequence[Any], result: Tensor | None = None) -> int:
    return WORKSPACE(getattr(aten, name).default, arguments, result)


def taken(function: Callable[[], Any]) -> int:
    """Return the most that the allocator gives, without what `function` returns."""
    result = function()
    most = highest(allocations(function))
    returned = [result] if isinstance(result, Tensor) else [v for v in result if v is not None]
    return most - sum(value.nbytes for value in returned)
