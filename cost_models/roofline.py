"""Costs on a named device: each kernel takes the time of its FLOPs or of its bytes, whichever is longer."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pipecompile.cost_models.device import Device, load_device
from pipecompile.cost_models.kernels import Kernel, call_kernels
from pipecompile.cost_models.protocol import CallCost, NodeCall
from pipecompile.ir.graph import FusedType

__all__ = ["DeviceCostModel", "Roofline", "kernel_ns", "units"]


@dataclass(frozen=True)
class DeviceCostModel:
    """Base of cost models that price fake tensors as of `device`."""

    device: Device
    real: ClassVar[bool] = False

    @property
    def memory(self) -> Literal["cpu", "cuda"]:
        """As the device has it."""
        return self.device.memory

    @property
    def fused_attention(self) -> tuple[FusedType, ...]:
        """As the device has it."""
        return self.device.fused_attention


@dataclass(frozen=True)
class Roofline(DeviceCostModel):
    """Prices a call by its kernels on `device`, one after another; whole nanoseconds, the same on every machine.

    A kernel takes max(FLOPs / (peak · share reached), bytes / (bandwidth · share reached), launch floor), rounded up
    (Williams et al., "Roofline", CACM 2009); views take nothing. Float32 products are computed in float32 and float32
    convolutions in TF32 where the device has it, PyTorch's defaults. Where the device does not fuse attention, its
    scores are moved.
    """

    name: str
    costs_by_signature: dict[Hashable, CallCost] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, text: str) -> Roofline:
        """The model for a device by name or file, called as the user wrote it."""
        return cls(load_device(text), f"roofline:{text}")

    def cost(self, call: NodeCall) -> CallCost:
        """The cost of `call`, whose tensors are fake."""
        if call.signature not in self.costs_by_signature:
            self.costs_by_signature[call.signature] = self._cost(call)
        return self.costs_by_signature[call.signature]

    def _cost(self, call: NodeCall) -> CallCost:
        found = call_kernels(call)
        return CallCost(
            forward_ns=self._sum_ns(found.forward),
            backward_ns=self._sum_ns(found.backward),
            backward_input_ns=self._sum_ns(found.backward_input),
            backward_weight_ns=self._sum_ns(found.backward_weight),
        )

    def _sum_ns(self, kernels: Iterable[Kernel]) -> int:
        return sum(kernel_ns(kernel, self.device) for kernel in kernels)


def kernel_ns(kernel: Kernel, device: Device) -> int:
    """The time of one kernel; integers throughout, so that no machine rounds differently."""
    compute_ns = _ceil_ns(
        kernel.flops, device.peak_flop_per_s[units(kernel, device)], device.compute_permille
    )
    memory_ns = _ceil_ns(kernel.bytes, device.bandwidth_bytes_per_s, device.bandwidth_permille)
    return max(compute_ns, memory_ns, device.launch_ns)


def units(kernel: Kernel, device: Device) -> str:
    """Which of the device's peaks `kernel` has: its type's, TF32's, or float32's where its type has none."""
    peaks = device.peak_flop_per_s
    if kernel.is_convolution and kernel.dtype == "float32" and "tf32" in peaks:
        return "tf32"
    return kernel.dtype if kernel.dtype in peaks else "float32"


def _ceil_ns(amount: int, per_s: int, permille: int) -> int:
    return -(-amount * 10**9 * 1000 // (per_s * permille))
