"""The fit of a device to measured operators: rates under which the roofline predicts them best.

Called by profiling/calibration.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from pipecompile.cost_models.device import Device
from pipecompile.cost_models.kernels import Kernel
from pipecompile.cost_models.roofline import kernel_ns, peak_name

__all__ = ["CalibrationSample", "fit", "predicted_ns"]

ROUNDS = 30
BANDWIDTH, LAUNCH = "bandwidth", "launch"
Rates = dict[str, float]
"""Nanoseconds for a FLOP (by data type), for a byte ("bandwidth"), and for a launch ("launch")."""


@dataclass(frozen=True, slots=True)
class CalibrationSample:
    """The forward or backward of one operator: its kernels, and the time they took together."""

    name: str
    kernels: tuple[Kernel, ...]
    measured_ns: int


def fit(samples: Sequence[CalibrationSample], device: Device) -> Device:
    """Return `device` with the peaks, bandwidth and launch floor that `samples` show.

    The device lists the data types that get a peak. The rates come from rounds. In each round a
    sample counts for the rate that decides most of its time, and each rate is multiplied by the
    median of measured / predicted over its samples. At the end all medians are 1: half of the
    samples take longer than predicted, half less.

        bandwidth, 2 ns/byte    measured / predicted: 0.8, 1.1, 1.3    →    2.2 ns/byte
                                afterwards            0.73, 1.0, 1.18

    The figures of a device are peaks and the shares of them that are reached. The share is the
    fastest ratio (0.73 here), so that the peak is near the fastest sample. A rate that decides no
    sample stays that of the fastest sample.
    """
    # Rounds, since a rate that changes also changes which rate decides a sample.
    rates = _fastest(samples, device)
    for _ in range(ROUNDS):
        for rate, ratios in _ratios_by_rate(samples, rates, device).items():
            rates[rate] *= median(ratios)
    # Only types that decide a sample tell which share of their peak is reached.
    ratios_by_rate = _ratios_by_rate(samples, rates, device)
    types = [rate for rate in ratios_by_rate if rate in device.peak_flop_per_s]
    compute = _permille(min(ratios_by_rate[rate]) for rate in types)
    bandwidth = _permille([min(ratios_by_rate.get(BANDWIDTH, [1.0]))])
    return replace(
        device,
        peak_flop_per_s={
            name: round(1e12 / (rates[name] * compute)) for name in device.peak_flop_per_s
        },
        bandwidth_bytes_per_s=round(1e12 / (rates[BANDWIDTH] * bandwidth)),
        compute_permille=compute,
        bandwidth_permille=bandwidth,
        launch_ns=round(rates[LAUNCH]),
    )


def predicted_ns(sample: CalibrationSample, device: Device) -> int:
    """Return the time in ns that the roofline of `device` predicts for a sample."""
    return sum(kernel_ns(kernel, device) for kernel in sample.kernels)


def _permille(shares: Iterable[float]) -> int:
    """Return the median share in permille, between 1 and 1000."""
    return min(1000, max(1, round(1000 * median([*shares] or [1.0]))))


def _fastest(samples: Sequence[CalibrationSample], device: Device) -> Rates:
    """Return each rate as if the fastest sample did nothing else: an upper bound to start from."""
    totals = [(sample.measured_ns, _totals(sample.kernels, device)) for sample in samples]
    rates: Rates = {}
    for name in (*device.peak_flop_per_s, BANDWIDTH, LAUNCH):
        candidates = [ns / amounts[name] for ns, amounts in totals if amounts.get(name)]
        rates[name] = min(candidates, default=0.0)
    # A type without samples computes like float32.
    return {name: rate or rates["float32"] for name, rate in rates.items()}


def _totals(kernels: Iterable[Kernel], device: Device) -> Rates:
    """Return the FLOPs by type, the bytes and the launches of some kernels."""
    sums: Rates = {}
    for kernel in kernels:
        for name, amount in _amounts(kernel, device).items():
            sums[name] = sums.get(name, 0) + amount
    return sums


def _amounts(kernel: Kernel, device: Device) -> Mapping[str, int]:
    return {peak_name(kernel, device): kernel.flops, BANDWIDTH: kernel.bytes, LAUNCH: 1}


def _ratios_by_rate(
    samples: Sequence[CalibrationSample], rates: Rates, device: Device
) -> dict[str, list[float]]:
    """Return measured / predicted of samples, by the rate that decides most of each sample."""
    ratios: dict[str, list[float]] = {}
    for sample in samples:
        decided: Rates = {}  # ns of the kernels that each rate decides
        for kernel in sample.kernels:
            times = {
                name: amount * rates[name] for name, amount in _amounts(kernel, device).items()
            }
            # The roofline takes the longest, so only that rate explains the kernel.
            longest = max(times, key=times.__getitem__)
            decided[longest] = decided.get(longest, 0.0) + times[longest]
        if decided:
            rate = max(decided, key=decided.__getitem__)
            ratios.setdefault(rate, []).append(sample.measured_ns / sum(decided.values()))
    return ratios
