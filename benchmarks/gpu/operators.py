"""Operators against the roofline of the named device, and against a calibration made here."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import Case
from benchmarks.gpu.rows import Row
from pipecompile.api.calibration import Calibration, calibrate
from pipecompile.cost_models.calibration import predicted_ns
from pipecompile.cost_models.device import Device, load_device
from pipecompile.ir.serialization import encode

__all__ = ["CALIBRATED", "calibrated_device", "operator_cases"]

CALIBRATED = "calibrated.json"
"""The device file that a calibration leaves in the bench's folder."""


def operator_cases(bench: Bench) -> Iterator[Case]:
    """Yield the one case: all operators of a calibration, forward and backward."""
    yield Case("calibration", lambda: _rows(bench))


def calibrated_device(bench: Bench) -> Calibration:
    """Calibrate the bench's device, and write it where other parts find it."""
    calibration = calibrate("cuda" if bench.is_cuda else "cpu")
    (bench.folder / CALIBRATED).write_bytes(encode(calibration.device))
    return calibration


def _rows(bench: Bench) -> Iterator[Row]:
    calibration = calibrated_device(bench)
    named = load_device(bench.costs.partition(":")[2])
    for device, prediction in ((named, f"roofline:{named.name}"), (calibration.device, "fitted")):
        for sample in calibration.samples:
            predicted = predicted_ns(sample, device)
            yield Row(sample.name, predicted, sample.measured_ns, "ns", prediction)
    yield from _figures(named, calibration.device)


def _figures(named: Device, fitted: Device) -> Iterator[Row]:
    """Yield what the named device is taken to reach, beside what the calibration found."""

    def row(what: str, of_named: float, of_fitted: float, unit: str) -> Row:
        return Row(what, of_named, of_fitted, unit, f"{named.name}'s figures")

    for name, peak in fitted.peak_flop_per_s.items():
        listed = named.peak_flop_per_s.get(name, named.peak_flop_per_s["float32"])
        reached = peak * fitted.compute_permille / 1e15
        yield row(f"{name} reached", listed * named.compute_permille / 1e15, reached, "TFLOP/s")
    yield row(
        "bandwidth reached",
        named.bandwidth_bytes_per_s * named.bandwidth_permille / 1e12,
        fitted.bandwidth_bytes_per_s * fitted.bandwidth_permille / 1e12,
        "GB/s",
    )
    yield row("launch", named.launch_ns / 1e3, fitted.launch_ns / 1e3, "µs")
