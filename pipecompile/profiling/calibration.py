"""Calibration: operators measured on this machine, and the roofline that predicts them best.

Called by `api/calibration.py`. Each operator is profiled twice, once to list its kernels and once
to measure it. cost_models/calibration.py fits the device to these samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, Literal

import torch
from torch import Tensor, fx, nn

from pipecompile.cost_models.calibration import CalibrationSample, fit, predicted_ns
from pipecompile.cost_models.device import FIGURES, Device
from pipecompile.cost_models.efficiency_fit import fit_efficiency
from pipecompile.cost_models.kernels import CallKernels, call_kernels
from pipecompile.cost_models.measured import Measured
from pipecompile.cost_models.protocol import FREE_CALL, CallCost, NodeCall
from pipecompile.cost_models.roofline import DeviceCostModel
from pipecompile.errors import InputError
from pipecompile.ir.graph import Node
from pipecompile.profiling.profile import profile

__all__ = ["Calibration", "calibrate", "calibration_text"]


class FunctionModule(nn.Module):
    """A module that calls a function of tensors."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return what the function returns."""
        return self.function(*inputs)


@dataclass(frozen=True)
class CalibrationOperator:
    """One operator to be measured.

    `shapes` are those of its floating-point inputs. If `rows` is not 0, its inputs are indices
    below `rows` instead.
    """

    name: str
    module: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype = torch.float32
    rows: int = 0

    def inputs(self, device: torch.device) -> list[Tensor]:
        """Return random inputs; those that can have a gradient require one."""
        if self.rows:
            return [torch.randint(self.rows, shape, device=device) for shape in self.shapes]
        return [torch.randn(s, device=device).to(self.dtype).requires_grad_() for s in self.shapes]


@dataclass(frozen=True)
class Calibration:
    """The device that was fitted, and the samples that it was fitted to."""

    device: Device
    samples: tuple[CalibrationSample, ...]

    @property
    def errors(self) -> list[float]:
        """Predicted / measured − 1 for each sample."""
        return [
            predicted_ns(sample, self.device) / sample.measured_ns - 1 for sample in self.samples
        ]

    @property
    def median_error(self) -> float:
        """The median of the absolute errors."""
        return median(map(abs, self.errors))


@dataclass(frozen=True)
class _KernelLister(DeviceCostModel):
    """A cost model that collects the kernels of each call, and gives no time."""

    calls: list[CallKernels]
    name: ClassVar[str] = "kernels"

    def cost(self, call: NodeCall) -> CallCost:
        """Collect the kernels of `call`."""
        self.calls.append(call_kernels(call))
        return FREE_CALL


def calibrate(kind: Literal["cpu", "cuda"]) -> Calibration:
    """Measure a few dozen operators forward and backward, and return the device fitted to them.

    This takes less than a minute. On a CPU they run with as many threads as PyTorch uses. Raise
    InputError if there is no such device.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "there is no CUDA device here; calibrate --device cpu, or run it where there is one"
        )
    unfitted, device = _unfitted_device(kind), torch.device(kind)
    samples: list[CalibrationSample] = []
    # Operators decided by FLOPs, by bytes and by launches, so that each rate has samples.
    for operator in _operators(kind):
        samples += _samples(operator, device, unfitted)
    return Calibration(fit_efficiency(samples, fit(samples, unfitted)), tuple(samples))


def _samples(
    operator: CalibrationOperator, device: torch.device, unfitted: Device
) -> Iterator[CalibrationSample]:
    """Yield the operator's forward and its whole backward.

    One that only makes views, or that is too short to be timed, is left out.
    """
    # Both profiles run the same graph on the same inputs, so kernels and times belong together.
    graph = _graph_of(operator, device)
    inputs, lister = operator.inputs(device), _KernelLister(unfitted, [])
    profile(graph, inputs, lister)
    node = _operator_node(profile(graph, inputs, Measured(device)).nodes)
    # There is one node that is called, and inputs and outputs ask no cost model.
    (kernels,) = lister.calls
    forward = CalibrationSample(operator.name, kernels.forward, node.forward_ns)
    backward = CalibrationSample(f"{operator.name} backward", kernels.backward, node.backward_ns)
    yield from (sample for sample in (forward, backward) if sample.kernels and sample.measured_ns)


def _graph_of(operator: CalibrationOperator, device: torch.device) -> fx.GraphModule:
    """Return a graph whose only computing node is the operator."""
    root = nn.Module()
    root.add_module("operator", operator.module().to(device=device, dtype=operator.dtype))
    graph = fx.Graph()
    inputs = tuple(graph.placeholder(f"input_{index}") for index in range(len(operator.shapes)))
    graph.output(graph.call_module("operator", inputs))
    return fx.GraphModule(root, graph)


def _operator_node(nodes: Sequence[Node]) -> Node:
    (node,) = (node for node in nodes if node.operator not in ("placeholder", "output"))
    return node


def _unfitted_device(kind: Literal["cpu", "cuda"]) -> Device:
    """Return this machine's device, of whose speed nothing is known yet.

    It lists the data types that are measured on it.
    """
    types = ["float32", "bfloat16"] if kind == "cpu" else ["float32", "float16", "bfloat16"]
    # TF32 exists from compute capability 8.0 on.
    if kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0):
        types.append("tf32")
    # On a H200 cuDNN's convolutions reached a sixth of what products did in the same type.
    types += [f"{name} convolution" for name in types if kind == "cuda" and "float16" in name]
    source = (
        f"measured by pipecompile calibrate with torch {torch.__version__}; {_description(kind)}"
    )
    return Device(
        name=kind,
        allocator=kind,
        memory_bytes=_memory_bytes(kind),
        # Ones stand for rates that nobody has used yet; the keys say which types get a peak.
        bandwidth_bytes_per_s=1,
        peak_flop_per_s=dict.fromkeys(types, 1),
        compute_permille=1000,
        bandwidth_permille=1000,
        launch_ns=0,
        fused_attention=Measured(torch.device(kind)).fused_attention,
        sources={
            **dict.fromkeys(FIGURES, source),
            "memory_bytes": "as the device reports it",
            "fused_attention": "as PyTorch's scaled_dot_product_attention chooses here "
            "(sdp_utils.cpp)",
        },
    )


def _description(kind: str) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def _memory_bytes(kind: str) -> int:
    if kind == "cuda":
        return int(torch.cuda.get_device_properties().total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _operators(kind: str) -> Iterator[CalibrationOperator]:
    """Yield all operators, in sizes that a CPU core computes in milliseconds.

    A GPU gets larger batches.
    """
    # On a H200 a batch of 32 took as long as the host launched it, and hid what the device can do.
    product_batch, move_batch = (1, 1) if kind == "cpu" else (256, 32)
    types = (
        (torch.float32, torch.bfloat16)
        if kind == "cpu"
        else (torch.float32, torch.float16, torch.bfloat16)
    )
    for dtype in types:
        yield from _products(product_batch, dtype)
    # A CPU without units for bfloat16 would take minutes for them.
    for dtype in types if kind == "cuda" else (torch.float32,):
        yield from _sizes(product_batch, dtype)
    yield from _moves(move_batch)
    yield from _small()


def _products(batch: int, dtype: torch.dtype) -> Iterator[CalibrationOperator]:
    """Yield operators whose time is decided by FLOPs."""
    name = str(dtype).removeprefix("torch.")
    for rows, inputs, outputs in [
        (256, 512, 512),
        (128, 768, 3072),
        (512, 1024, 1024),
        (1024, 256, 256),
    ]:
        yield CalibrationOperator(
            f"linear {batch * rows}×{inputs}×{outputs} {name}",
            # Defaults, since these are called after the loop: a closure would see its last sizes.
            lambda inputs=inputs, outputs=outputs: nn.Linear(inputs, outputs),  # type: ignore[misc]
            ((batch * rows, inputs),),
            dtype,
        )
    yield CalibrationOperator(
        f"batched product {name}",
        lambda: FunctionModule(torch.bmm),
        ((8 * batch, 256, 64), (8 * batch, 64, 256)),
        dtype,
    )
    heads = (batch, 8, 256, 64)
    attention = nn.functional.scaled_dot_product_attention
    yield CalibrationOperator(
        f"attention {name}", lambda: FunctionModule(attention), (heads, heads, heads), dtype
    )
    for width, kernel, size in [(64, 3, 32), (128, 3, 16), (256, 1, 16), (32, 5, 32)]:
        yield CalibrationOperator(
            f"convolution {kernel}×{kernel} of {width} {name}",
            lambda width=width, kernel=kernel: nn.Conv2d(width, width, kernel, padding=kernel // 2),  # type: ignore[misc]
            ((4 * batch, width, size, size),),
            dtype,
        )


def _sizes(batch: int, dtype: torch.dtype) -> Iterator[CalibrationOperator]:
    """Yield a product, an attention, a convolution and two moves in sizes of several microbatches,
    from which the efficiency curves are fitted.
    """
    attention = nn.functional.scaled_dot_product_attention
    name = str(dtype).removeprefix("torch.")
    # A curve is fitted to four samples or more, of which the largest has at least four times the
    # work of the smallest (cost_models/efficiency_fit.py). Below that it would follow their noise.
    for size in (1, 2, 4, 8, 16):
        tokens, images = 16 * size * batch, (batch * size, 64, 16, 16)
        heads = (batch, size, 128, 64)
        operators: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
            f"linear {tokens}×768×768": (lambda: nn.Linear(768, 768), ((tokens, 768),)),
            f"attention of {batch * size} heads": (
                lambda: FunctionModule(attention),
                (heads, heads, heads),
            ),
            f"convolution of {batch * size} images": (
                lambda: nn.Conv2d(64, 64, 3, padding=1),
                (images,),
            ),
            f"gelu of {tokens} rows": (nn.GELU, ((tokens, 1024),)),
            f"layer norm of {tokens} rows": (lambda: nn.LayerNorm(1024), ((tokens, 1024),)),
        }
        for what, (module, shapes) in operators.items():
            yield CalibrationOperator(f"{what} {name}", module, shapes, dtype)


def _moves(batch: int) -> Iterator[CalibrationOperator]:
    """Yield operators whose time is decided by the bytes that they move."""
    rows, image = (4096 * batch, 1024), (16 * batch, 64, 64, 64)
    on_rows: dict[str, Callable[[], nn.Module]] = {
        "relu": nn.ReLU,
        "gelu": nn.GELU,
        "silu": nn.SiLU,
        "dropout": nn.Dropout,
        "layer norm": lambda: nn.LayerNorm(1024),
        "softmax": lambda: nn.Softmax(-1),
        "log softmax": lambda: nn.LogSoftmax(-1),
        "transposed copy": lambda: FunctionModule(lambda value: value.t().contiguous()),
        "sum": lambda: FunctionModule(lambda value: value.sum(-1)),
    }
    for name, module in on_rows.items():
        yield CalibrationOperator(name, module, (rows,))
    yield CalibrationOperator("add", lambda: FunctionModule(torch.add), (rows, rows))
    yield CalibrationOperator("multiply", lambda: FunctionModule(torch.mul), (rows, rows))
    yield CalibrationOperator(
        "concatenate", lambda: FunctionModule(lambda *values: torch.cat(values, -1)), (rows, rows)
    )
    yield CalibrationOperator("batch norm", lambda: nn.BatchNorm2d(64), (image,))
    yield CalibrationOperator("group norm", lambda: nn.GroupNorm(8, 64), (image,))
    yield CalibrationOperator("max pool", lambda: nn.MaxPool2d(2), (image,))
    yield CalibrationOperator("average pool", lambda: nn.AvgPool2d(2), (image,))
    yield CalibrationOperator(
        "embedding", lambda: nn.Embedding(8192, 1024), ((2048 * batch,),), rows=8192
    )


def _small() -> Iterator[CalibrationOperator]:
    """Yield operators whose time is decided by the launch of their kernels."""
    operators: dict[str, Callable[[], nn.Module]] = {
        "small relu": nn.ReLU,
        "small gelu": nn.GELU,
        "small layer norm": lambda: nn.LayerNorm(32),
        "small softmax": lambda: nn.Softmax(-1),
        "small linear": lambda: nn.Linear(32, 32),
        "small sum": lambda: FunctionModule(lambda value: value.sum(-1)),
    }
    for name, module in operators.items():
        yield CalibrationOperator(name, module, ((8, 32),))
    yield CalibrationOperator("small add", lambda: FunctionModule(torch.add), ((8, 32), (8, 32)))


def calibration_text(calibration: Calibration) -> str:
    """Return a table of all samples in microseconds, and the figures that were fitted."""
    lines = [f"{'operator':46} {'predicted us':>12} {'measured us':>12} {'error':>7}"]
    for sample, error in zip(calibration.samples, calibration.errors, strict=True):
        predicted = predicted_ns(sample, calibration.device) / 1e3
        measured = sample.measured_ns / 1e3
        lines.append(f"{sample.name:46} {predicted:12.1f} {measured:12.1f} {error:+7.0%}")
    errors = zip(map(abs, calibration.errors), calibration.samples, strict=True)
    worst_error, worst_sample = max(errors, key=lambda pair: pair[0])
    device = calibration.device
    peaks = ", ".join(f"{name} {flops / 1e9:.0f}" for name, flops in device.peak_flop_per_s.items())
    return "\n".join(
        [
            *lines,
            f"median error {calibration.median_error:.0%}, worst {worst_error:.0%} "
            f"({worst_sample.name})",
            f"GFLOP/s: {peaks}, of which {device.compute_permille / 10:.0f} % are reached",
            f"GB/s: {device.bandwidth_bytes_per_s / 1e9:.1f}, of which "
            f"{device.bandwidth_permille / 10:.0f} %",
            f"launch: {device.launch_ns} ns",
            *(
                f"{name}: large ones reach {curve.permille / 10:.0f} %, half of that at "
                f"{curve.half_work / 1e6:.3f} {'MB' if name == 'move' else 'MFLOP'}"
                for name, curve in sorted(device.efficiency.items())
            ),
        ]
    )
