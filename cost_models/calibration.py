"""From measured operators to a device: the rates under which the roofline predicts them best."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from pipecompile.cost_models.device import Device
from pipecompile.cost_models.kernels import Kernel
from pipecompile.cost_models.roofline import kernel_ns, units

__all__ = ["CalibrationSample", "fit", "predicted_ns"]

ROUNDS = 30
BANDWIDTH, LAUNCH = "bandwidth", "launch"
Rates = dict[str, float]
"""Nanoseconds a FLOP by data type, a byte, and a launch."""


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """One operator's forward or backward: its kernels, and what they took together."""

    name: str
    kernels: tuple[Kernel, ...]
    measured_ns: int


def fit(samples: Sequence[CalibrationSample], device: Device) -> Device:
    """`device` with the peaks, the bandwidth and the launch floor that `samples` show, for the data types it lists.

    Each sample belongs to the rate that decides most of its time. A rate is scaled by the median of measured over
    predicted among its samples, in turns until all medians are 1: half of them take longer, half less. A share is the
    median rate over the fastest one seen, so that peaks are near the fastest. What no sample decides is what the
    fastest sample shows.
    """
    rates = _fastest(samples, device)
    for _ in range(ROUNDS):
        for rate, found in _ratios(samples, rates, device).items():
            rates[rate] *= median(found)
    ratios = _ratios(samples, rates, device)
    types = [rate for rate in ratios if rate in device.peak_flop_per_s]
    compute = _permille(min(ratios[rate]) for rate in types)
    moved = _permille([min(ratios.get(BANDWIDTH, [1.0]))])
    return replace(
        device,
        peak_flop_per_s={
            name: round(1e12 / (rates[name] * compute)) for name in device.peak_flop_per_s
        },
        bandwidth_bytes_per_s=round(1e12 / (rates[BANDWIDTH] * moved)),
        compute_permille=compute,
        bandwidth_permille=moved,
        launch_ns=round(rates[LAUNCH]),
    )


def predicted_ns(sample: CalibrationSample, device: Device) -> int:
    """What the roofline of `device` says of a sample."""
    return sum(kernel_ns(kernel, device) for kernel in sample.kernels)


def _permille(shares: Iterable[float]) -> int:
    """The median share, within what a device may have."""
    return min(1000, max(1, round(1000 * median([*shares] or [1.0]))))


def _fastest(samples: Sequence[CalibrationSample], device: Device) -> Rates:
    """Each rate as if its fastest sample did nothing else."""
    totals = [(sample.measured_ns, _totals(sample.kernels, device)) for sample in samples]
    rates = {
        name: min((ns / amounts[name] for ns, amounts in totals if amounts.get(name)), default=0.0)
        for name in (*device.peak_flop_per_s, BANDWIDTH, LAUNCH)
    }
    return {name: rate or rates["float32"] for name, rate in rates.items()}


def _totals(kernels: Iterable[Kernel], device: Device) -> Rates:
    sums: Rates = {}
    for kernel in kernels:
        for name, amount in _amounts(kernel, device).items():
            sums[name] = sums.get(name, 0) + amount
    return sums


def _amounts(kernel: Kernel, device: Device) -> Mapping[str, int]:
    return {units(kernel, device): kernel.flops, BANDWIDTH: kernel.bytes, LAUNCH: 1}


def _ratios(samples: Sequence[CalibrationSample], rates: Rates, device: Device) -> dict[str, list[float]]:
    """Measured over predicted, by the rate that decides most of each sample."""
    found: dict[str, list[float]] = {}
    for sample in samples:
        decided: Rates = {}
        for kernel in sample.kernels:
            times = {
                name: amount * rates[name] for name, amount in _amounts(kernel, device).items()
            }
            longest = max(times, key=times.__getitem__)
            decided[longest] = decided.get(longest, 0.0) + times[longest]
        if decided:
            rate = max(decided, key=decided.__getitem__)
            found.setdefault(rate, []).append(sample.measured_ns / sum(decided.values()))
    return found
