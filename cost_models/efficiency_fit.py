"""The fit of efficiency curves: how much worse a device is used by small kernels of each class.

Called by profiling/calibration.py, after `calibration.fit` has found the peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, get_args

import numpy as np
from msgspec.structs import replace

from pipecompile.cost_models.calibration import CalibrationSample, predicted_ns
from pipecompile.cost_models.device import Device, EfficiencyCurve, OperatorClass
from pipecompile.cost_models.kernels import Kernel
from pipecompile.cost_models.roofline import compute_ns, kernel_ns, memory_ns, peak_name

__all__ = ["fit_efficiency"]

CLASSES: tuple[OperatorClass, ...] = get_args(OperatorClass)
LEAST_SAMPLES = 4  # a line through fewer would follow their noise
LEAST_RANGE = 4  # that the largest kernel must have more work than the smallest one


class _Point(NamedTuple):
    """One sample for the line of its class.

    `work_ns` is what its kernels of the class take at peak, and `unit_ns` what one unit of work of
    each of them takes; `measured_ns` is without the predicted time of its other kernels.
    """

    work_ns: float
    unit_ns: float
    measured_ns: float
    whole_ns: int


def fit_efficiency(samples: Sequence[CalibrationSample], device: Device) -> Device:
    """Return `device` with an efficiency curve for each class of which samples have several sizes.

    A kernel of some work takes (work + half_work) / (peak · share): a line in its work, with the
    slope 1 / share. It is found by least squares of (predicted − measured) / measured, with a share
    of at most 1 and no negative half_work, over the samples that kernels of the class take most of.
    A class keeps the device's own share if that predicts its samples better.
    """
    curves = {name: _curve(name, samples, device) for name in CLASSES}
    return _with_curves(device, {name: curve for name, curve in curves.items() if curve})


def _curve(
    name: OperatorClass, samples: Sequence[CalibrationSample], device: Device
) -> EfficiencyCurve | None:
    """Return the curve of one class; None if the samples do not show one."""
    of_class = [sample for sample in samples if _is_of(name, sample, device)]
    points = [_point(name, sample, device) for sample in of_class]
    sizes = [point.work_ns / point.unit_ns for point in points]
    if len(points) < LEAST_SAMPLES or max(sizes) < LEAST_RANGE * min(sizes):
        return None
    slope, half = _line(points)
    curve = EfficiencyCurve(
        permille=min(1000, max(1, round(1000 / slope))), half_work=round(half / slope)
    )
    is_better = _squares(of_class, _with_curves(device, {name: curve})) < _squares(of_class, device)
    return curve if is_better else None


def _with_curves(device: Device, curves: dict[OperatorClass, EfficiencyCurve]) -> Device:
    # They are measured as the share for all sizes is.
    sources = {**device.sources, "efficiency": device.sources["compute_permille"]}
    return replace(device, efficiency=curves, sources=sources) if curves else device


def _is_of(name: OperatorClass, sample: CalibrationSample, device: Device) -> bool:
    """Return whether most of a sample's time is that of kernels that their class decides."""
    decided = sum(kernel_ns(k, device) for k in sample.kernels if _decides(name, k, device))
    return 2 * decided > predicted_ns(sample, device)


def _decides(name: OperatorClass, kernel: Kernel, device: Device) -> bool:
    """Return whether a kernel is of a class, and takes the time of its work."""
    if kernel.operator_class != name:
        return False
    time_ns = memory_ns(kernel, device) if name == "move" else compute_ns(kernel, device)
    return time_ns == kernel_ns(kernel, device) > device.launch_ns


def _point(name: OperatorClass, sample: CalibrationSample, device: Device) -> _Point:
    own = [kernel for kernel in sample.kernels if _decides(name, kernel, device)]
    others_ns = sum(
        kernel_ns(kernel, device) for kernel in sample.kernels if not _decides(name, kernel, device)
    )
    units = [(_work(name, kernel), 1e9 / _rate(name, kernel, device)) for kernel in own]
    return _Point(
        work_ns=sum(work * unit_ns for work, unit_ns in units),
        unit_ns=sum(unit_ns for _, unit_ns in units),
        measured_ns=sample.measured_ns - others_ns,
        whole_ns=sample.measured_ns,
    )


def _work(name: OperatorClass, kernel: Kernel) -> int:
    return kernel.bytes if name == "move" else kernel.flops


def _rate(name: OperatorClass, kernel: Kernel, device: Device) -> int:
    """Return the work per second that a kernel does at its peak."""
    if name == "move":
        return device.bandwidth_bytes_per_s
    return device.peak_flop_per_s[peak_name(kernel, device)]


def _line(points: Sequence[_Point]) -> tuple[float, float]:
    """Return slope a ≥ 1 and offset b ≥ 0 for which a · work_ns + b · unit_ns is nearest to what
    was measured, relative to it.
    """
    # Relative errors: a sample of 10 µs counts as much as one of 10 ms.
    whole = np.array([point.whole_ns for point in points])
    work = np.array([point.work_ns for point in points]) / whole
    unit = np.array([point.unit_ns for point in points]) / whole
    measured = np.array([point.measured_ns for point in points]) / whole
    lines = np.stack([work, unit], axis=1)
    # Work of 10, 20, 40 and 80 ns at peak, measured as twice that
    # and 30 ns more: slope 2 and offset 30, so half of the peak is
    # reached, and of that half again at 30 / 2 = 15 units of work.
    slope, offset = np.linalg.lstsq(lines, measured, rcond=None)[0]
    if slope >= 1 and offset >= 0:
        return float(slope), float(offset)
    # The sum of squares is convex, so the best allowed point lies on an edge of what is allowed.
    # A slope below 1 would be faster than the peak. For half the work
    # and 30 ns more the best allowed line is slope 1 and offset 17.
    edges = [
        (max(1.0, work @ measured / (work @ work)), 0.0),
        (1.0, max(0.0, unit @ (measured - work) / (unit @ unit))),
    ]
    slope, offset = min(edges, key=lambda edge: np.square(lines @ edge - measured).sum())
    return float(slope), float(offset)


def _squares(samples: Iterable[CalibrationSample], device: Device) -> float:
    """Return the sum of the squared relative errors of a device's predictions."""
    return sum((predicted_ns(sample, device) / sample.measured_ns - 1) ** 2 for sample in samples)
