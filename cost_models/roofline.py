"""The cost model `roofline:DEVICE`: a kernel takes the time of its FLOPs or of its bytes.

The longer of the two counts (Williams et al., "Roofline", CACM 2009).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from pipecompile.cost_models.device import Device, load_device
from pipecompile.cost_models.kernels import Kernel, call_kernels
from pipecompile.cost_models.protocol import CallCost, NodeCall
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.graph import FusedType, TimeUnit

__all__ = [
    "DeviceCostModel",
    "Roofline",
    "compute_ns",
    "kernel_ns",
    "memory_ns",
    "peak_name",
]


@dataclass(frozen=True)
class DeviceCostModel:
    """Base of cost models that take calls on fake tensors as if these were on `device`."""

    device: Device
    real: ClassVar[bool] = False
    time_unit: ClassVar[TimeUnit] = "ns"
    reproducible: ClassVar[bool] = True
    by_signature: ClassVar[bool] = True

    @property
    def allocator(self) -> AllocatorName:
        """The allocator of the device."""
        return self.device.allocator

    @property
    def fused_attention(self) -> tuple[FusedType, ...]:
        """The data types for which the device fuses attention."""
        return self.device.fused_attention


@dataclass(frozen=True)
class Roofline(DeviceCostModel):
    """Says what a call costs by its kernels on `device`, which run one after the other.

    A kernel takes, in whole nanoseconds rounded up,

        max(FLOPs / (peak · share reached), bytes / (bandwidth · share reached), launch floor)

    where the share depends on the size of the kernel if the device is calibrated for that. Views
    take no time. As by PyTorch's defaults, float32 products are computed in float32, and float32
    convolutions in TF32 if the device has it. If the device does not fuse attention, the scores are
    moved. Costs are the same on every machine.
    """

    name: str
    costs_by_signature: dict[Hashable, CallCost] = field(
        default_factory=dict, init=False, repr=False
    )

    @classmethod
    def of(cls, text: str) -> Roofline:
        """Return the model for a device by name or file, named as the user wrote it."""
        return cls(load_device(text), f"roofline:{text}")

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the times: whether they know that small kernels use a device worse."""
        if not self.device.efficiency:
            return ("one efficiency for all sizes (not calibrated)",)
        return (f"efficiency by size (calibrated): {', '.join(sorted(self.device.efficiency))}",)

    def cost(self, call: NodeCall) -> CallCost:
        """Return the cost of `call`, whose tensors are fake."""
        # A model of 80 equal layers asks 80 times for each of the same few calls.
        if call.signature not in self.costs_by_signature:
            self.costs_by_signature[call.signature] = self._cost(call)
        return self.costs_by_signature[call.signature]

    def _cost(self, call: NodeCall) -> CallCost:
        kernels = call_kernels(call)
        return CallCost(
            forward_ns=self._sum_ns(kernels.forward),
            backward_ns=self._sum_ns(kernels.backward),
            backward_input_ns=self._sum_ns(kernels.backward_input),
            backward_weight_ns=self._sum_ns(kernels.backward_weight),
        )

    def _sum_ns(self, kernels: Iterable[Kernel]) -> int:
        return sum(kernel_ns(kernel, self.device) for kernel in kernels)


def kernel_ns(kernel: Kernel, device: Device) -> int:
    """Return the time of one kernel, in integers: so no machine rounds differently.

    5 · 10⁹ FLOPs at 10¹³ FLOP/s, of which 800 permille are reached, take 625 000 ns.
    """
    # Launches are queued ahead, so a long kernel hides the launch of the next one.
    return max(compute_ns(kernel, device), memory_ns(kernel, device), device.launch_ns)


def compute_ns(kernel: Kernel, device: Device) -> int:
    """Return the time that the FLOPs of a kernel take."""
    if not kernel.flops:
        return 0
    peak = device.peak_flop_per_s[peak_name(kernel, device)]
    curve = device.efficiency.get(kernel.operator_class)
    if curve is None:
        return _ceil_ns(kernel.flops, peak, device.compute_permille)
    # work / (peak · work / (work + half)) is (work + half) / peak: the curve adds a fixed time.
    return _ceil_ns(kernel.flops + curve.half_work, peak, curve.permille)


def memory_ns(kernel: Kernel, device: Device) -> int:
    """Return the time that the bytes of a kernel take."""
    # What computes too moves its bytes meanwhile: the curve of moves is about moves alone.
    curve = None if kernel.flops else device.efficiency.get("move")
    if curve is None:
        return _ceil_ns(kernel.bytes, device.bandwidth_bytes_per_s, device.bandwidth_permille)
    moved = kernel.bytes + curve.half_work
    return _ceil_ns(moved, device.bandwidth_bytes_per_s, curve.permille)


def peak_name(kernel: Kernel, device: Device) -> str:
    """Return which peak of the device limits `kernel`: that of its type, of TF32 or of float32, or
    that of convolutions in its type.
    """
    peaks = device.peak_flop_per_s
    if kernel.is_convolution:
        of_type = "tf32" if kernel.dtype == "float32" else f"{kernel.dtype} convolution"
        if of_type in peaks:
            return of_type
    return kernel.dtype if kernel.dtype in peaks else "float32"


def _ceil_ns(amount: int, per_s: int, permille: int) -> int:
    # Rounded up: −(−a // b) is the ceiling of a / b.
    return -(-amount * 10**9 * 1000 // (per_s * permille))
