"""Kernels and their times against figures worked out by hand."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, fx, nn
from torch.nn import functional

from pipecompile.cost_models.device import Device, load_device, named_devices
from pipecompile.cost_models.kernels import CallKernels, Kernel, call_kernels
from pipecompile.cost_models.protocol import FREE_CALL, CallCost, NodeCall
from pipecompile.cost_models.roofline import Roofline, kernel_ns
from pipecompile.cost_models.table import Function
from pipecompile.errors import FormatError, InputError
from pipecompile.ir.serialization import encode
from pipecompile.profiling.profile import profile

H100, P100, TPU = load_device("h100"), load_device("p100"), load_device("tpu-v2")
FLOAT = 4


class Lister:
    """A cost model that keeps what each call launches."""

    name = "lister"
    real = False
    time_unit, reproducible, by_signature = "ns", True, False

    def __init__(self, device: Device) -> None:
        self.device = device
        self.allocator, self.fused_attention = device.allocator, device.fused_attention
        self.recorded: dict[str, CallKernels] = {}

    def cost(self, call: NodeCall) -> CallCost:
        self.recorded[call.node.name] = call_kernels(call)
        return FREE_CALL


def launched(model: nn.Module, *inputs: Tensor, device: Device = H100) -> CallKernels:
    """The kernels of the last node that computes."""
    lister = Lister(device)
    profile(fx.symbolic_trace(model), inputs, lister)
    return list(lister.recorded.values())[-1]


def wanting(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def test_a_linear_is_a_product_and_its_backward_two_and_the_sum_of_the_bias() -> None:
    recorded = launched(nn.Sequential(nn.Linear(512, 1024)), wanting(128, 512))
    flops = 2 * 128 * 512 * 1024
    x, w, y = 128 * 512 * FLOAT, 512 * 1024 * FLOAT, 128 * 1024 * FLOAT
    assert recorded.forward == (Kernel("addmm", flops, x + w + y + 1024 * FLOAT, "float32"),)
    assert recorded.backward_input == (Kernel("mm", flops, y + w + x, "float32"),)
    assert sorted(kernel.operator for kernel in recorded.backward_weight) == ["mm", "sum"]
    assert sorted(kernel.operator for kernel in recorded.backward) == ["mm", "mm", "sum"]
    assert sum(kernel.flops for kernel in recorded.backward) == 2 * flops


def test_a_convolution_is_one_kernel_each_way() -> None:
    recorded = launched(
        nn.Sequential(nn.Conv2d(32, 64, 3, padding=1, bias=False)), wanting(4, 32, 16, 16)
    )
    flops = 2 * (4 * 64 * 16 * 16) * (32 * 9)
    x, w, y = 4 * 32 * 256 * FLOAT, 64 * 32 * 9 * FLOAT, 4 * 64 * 256 * FLOAT
    assert recorded.forward == (Kernel("convolution", flops, x + w + y, "float32"),)
    assert recorded.backward == (
        Kernel("convolution_backward", 2 * flops, (y + x + w) + (x + w), "float32"),
    )
    assert recorded.backward_input[0].flops == recorded.backward_weight[0].flops == flops


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0, causal: bool = False) -> None:
        super().__init__()
        self.dropout, self.causal = dropout, causal

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout, is_causal=self.causal
        )


HEADS = (2, 8, 256, 64)
ELEMENTS = 2 * 8 * 256 * 64
PRODUCT = 2 * (2 * 8) * 256 * 256 * 64


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_fused_attention_moves_no_scores(dropout: float) -> None:
    recorded = launched(Attention(dropout), *(wanting(*HEADS) for _ in range(3)))
    (forward,), (backward,) = recorded.forward, recorded.backward
    sums, seed = 2 * 8 * 256 * FLOAT, 2 * 8
    assert (forward.flops, forward.bytes) == (2 * PRODUCT, 4 * ELEMENTS * FLOAT + sums + seed)
    assert (backward.flops, backward.bytes) == (5 * PRODUCT, 8 * ELEMENTS * FLOAT + sums + seed)


def test_causal_attention_computes_half() -> None:
    recorded = launched(Attention(causal=True), *(wanting(*HEADS) for _ in range(3)))
    assert [kernel.flops for kernel in recorded.forward] == [PRODUCT]


def test_attention_that_is_not_fused_moves_its_scores() -> None:
    recorded = launched(Attention(), *(wanting(*HEADS) for _ in range(3)), device=TPU)
    scores = 2 * 8 * 256 * 256 * FLOAT
    products = [kernel for kernel in recorded.forward if kernel.flops]
    assert [kernel.flops for kernel in products] == [PRODUCT, PRODUCT]
    assert [kernel.bytes for kernel in products] == [scores + 2 * ELEMENTS * FLOAT] * 2
    assert [kernel.bytes for kernel in recorded.forward if "softmax" in kernel.operator] == [
        2 * scores
    ]
    assert sum(kernel.flops for kernel in recorded.backward) == 4 * PRODUCT


def test_layer_norm_is_one_kernel_that_moves_its_tensors() -> None:
    recorded = launched(nn.Sequential(nn.LayerNorm(1024)), wanting(64, 1024))
    size, weights, statistics = 64 * 1024 * FLOAT, 2 * 1024 * FLOAT, 2 * 64 * FLOAT
    assert recorded.forward == (
        Kernel("native_layer_norm", 0, 2 * size + weights + statistics, "float32"),
    )
    assert recorded.backward == (
        Kernel("native_layer_norm_backward", 0, 3 * size + 2 * weights + statistics, "float32"),
    )


def test_half_the_bytes_in_bfloat16_and_its_own_peak() -> None:
    wide, narrow = (
        launched(
            nn.Sequential(nn.Linear(4096, 4096, bias=False).to(dtype)),
            wanting(4096, 4096, dtype=dtype),
        ).forward[0]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert narrow == Kernel("mm", wide.flops, wide.bytes // 2, "bfloat16")
    assert kernel_ns(wide, H100) == ceil(Fraction(2 * 4096**3 * 10**9 * 4, 67 * 10**12 * 3))
    assert kernel_ns(narrow, H100) == ceil(Fraction(2 * 4096**3 * 10**10 * 4, 9894 * 10**12 * 3))


class Views(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        left, _ = image.flatten(1).chunk(2, dim=1)
        return left.transpose(0, 1)


def test_views_are_free() -> None:
    graph = profile(fx.symbolic_trace(Views()), [wanting(4, 8, 8)], Roofline.of("h100"))
    assert all(node.forward_ns == 0 for node in graph.nodes)


def test_dropout_is_one_kernel_on_a_gpu_only() -> None:
    model, value = nn.Sequential(nn.Dropout(0.1)), wanting(1000)
    assert [kernel.bytes for kernel in launched(model, value).forward] == [2 * 1000 * FLOAT + 1000]
    assert len(launched(model, value, device=load_device("cpu")).forward) == 3


def test_an_embedding_reads_the_rows_it_returns() -> None:
    recorded = launched(
        nn.Sequential(nn.Embedding(50_000, 64)), torch.zeros(4, 128, dtype=torch.long)
    )
    indices, rows, table = 4 * 128 * 8, 4 * 128 * 64 * FLOAT, 50_000 * 64 * FLOAT
    assert [kernel.bytes for kernel in recorded.forward] == [2 * rows + indices]
    assert sum(kernel.bytes for kernel in recorded.backward) == rows + indices + table


def test_float32_convolutions_use_tf32_and_products_do_not() -> None:
    convolution, product = (Kernel(name, 10**12, 0, "float32") for name in ("convolution", "mm"))
    assert kernel_ns(convolution, H100) == ceil(Fraction(10**12 * 10**10 * 4, 4947 * 10**12 * 3))
    assert kernel_ns(product, H100) == ceil(Fraction(10**12 * 10**9 * 4, 67 * 10**12 * 3))
    assert kernel_ns(convolution, P100) == kernel_ns(product, P100)


def test_convolutions_may_have_a_peak_of_their_own() -> None:
    device = load_device("h100")
    peaks = {**device.peak_flop_per_s, "bfloat16 convolution": 10**14}
    slower = replace(device, peak_flop_per_s=peaks)
    kernels = [Kernel(name, 10**12, 1, "bfloat16") for name in ("convolution_backward", "mm")]
    before, after = ([kernel_ns(each, of) for each in kernels] for of in (device, slower))
    assert after[0] == ceil(Fraction(10**12 * 10**9 * 1000, 10**14 * device.compute_permille))
    assert after[0] > before[0]
    assert after[1] == before[1]


def test_a_type_without_a_peak_computes_like_float32() -> None:
    assert kernel_ns(Kernel("mm", 10**12, 0, "bfloat16"), P100) == kernel_ns(
        Kernel("mm", 10**12, 0, "float32"), P100
    )


amounts = st.integers(0, 10**16)


@given(amounts, amounts, st.sampled_from(sorted(named_devices())))
def test_a_kernel_takes_the_longest_of_compute_memory_and_launch(
    flops: int, size: int, name: str
) -> None:
    device = named_devices()[name]
    compute = Fraction(flops * 10**9, device.peak_flop_per_s["float32"]) / Fraction(
        device.compute_permille, 1000
    )
    memory = Fraction(size * 10**9, device.bandwidth_bytes_per_s) / Fraction(
        device.bandwidth_permille, 1000
    )
    assert kernel_ns(Kernel("mm", flops, size, "float32"), device) == max(
        ceil(compute), ceil(memory), device.launch_ns
    )


def given(node: fx.Node, call: NodeCall) -> int:
    return 1


@pytest.mark.parametrize(
    "costs", [Roofline.of("h100"), Function(given)], ids=["roofline", "function"]
)
def test_convolutions_take_workspace_on_a_gpu_whatever_the_costs(
    costs: Roofline | Function,
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU())
    graph = profile(fx.symbolic_trace(model), [wanting(1, 3, 8, 8)], costs)
    x, w, y = 3 * 64 * FLOAT, 8 * 27 * FLOAT, 8 * 36 * FLOAT
    assert {node.name: node.workspace_bytes for node in graph.nodes if node.workspace_bytes} == {
        "_0": y + x + w  # either direction
    }


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [(65, 100, 65 * 100 * 8), (64, 100, 0), (1 << 17, 1000, 140 << 20)],
)
def test_the_gradient_of_a_bias_takes_workspace_on_a_gpu(
    rows: int, width: int, expected: int
) -> None:
    model = nn.Sequential(nn.Linear(4, width)).to("meta")
    graph = profile(fx.symbolic_trace(model), [wanting(rows, 4).to("meta")], Roofline.of("h100"))
    assert graph.by_name["_0"].workspace_bytes == expected


def test_without_gradients_only_the_forward_takes_workspace() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False)).requires_grad_(False)
    graph = profile(fx.symbolic_trace(model), [torch.zeros(1, 3, 8, 8)], Roofline.of("h100"))
    assert graph.by_name["_0"].workspace_bytes == (3 * 64 + 8 * 27 + 8 * 36) * FLOAT


def test_workspace_that_was_measured_replaces_the_margin() -> None:
    graph = profile(
        fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 8, 3))),
        [wanting(1, 3, 8, 8)],
        Function(lambda node, call: CallCost(1, 1, 1, 1, workspace_bytes=7)),
    )
    assert graph.by_name["_0"].workspace_bytes == 7


def test_every_device_is_complete_and_says_where_its_figures_come_from() -> None:
    expected = {"v100", "a100", "h100", "h200", "l4", "rtx4090", "p100", "tpu-v2", "tpu-v3", "cpu"}
    assert set(named_devices()) == expected
    for device in named_devices().values():
        assert all(len(source) > 10 for source in device.sources.values())
        for assumed in ("compute_permille", "bandwidth_permille", "launch_ns"):
            assert device.sources[assumed].startswith("assumption: ")


def test_a_device_without_sources_is_refused() -> None:
    with pytest.raises(ValueError, match="launch_ns"):
        Device(
            name="x",
            allocator="cpu",
            memory_bytes=1,
            bandwidth_bytes_per_s=1,
            peak_flop_per_s={"float32": 1},
            compute_permille=1000,
            bandwidth_permille=1000,
            launch_ns=0,
            fused_attention=(),
            sources={name: "known" for name in H100.sources if name != "launch_ns"},
        )


def test_a_device_file_is_a_device(tmp_path: object) -> None:
    path = f"{tmp_path}/mine.json"
    with open(path, "wb") as file:
        file.write(encode(H100))
    assert Roofline.of(path).device == H100
    assert Roofline.of(path).name == f"roofline:{path}"
    with open(path, "w") as file:
        file.write("{}")
    with pytest.raises(FormatError, match=r"mine\.json"):
        load_device(path)


def test_an_unknown_device_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'h1000' .* v100, a100, h100"):
        load_device("h1000")
