"""The fit finds the device that made the timings."""

from __future__ import annotations

from dataclasses import replace as with_field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.cost_models.calibration import CalibrationSample, fit, predicted_ns
from pipecompile.cost_models.device import Device, load_device
from pipecompile.cost_models.kernels import Kernel
from pipecompile.cost_models.roofline import kernel_ns

TYPES = ("float32", "bfloat16")


def kernels() -> list[Kernel]:
    """Products, convolutions, streams and trifles, from tiny to large."""
    products = [
        Kernel("mm", 2 * n**3, 12 * n**2, dtype)
        for dtype in TYPES
        for n in (1024, 2048, 3000, 4096)
    ]
    convolutions = [Kernel("convolution", 10**n, 10 ** (n - 4), "float32") for n in (11, 12, 13)]
    streams = [Kernel("relu", 0, 10**8 * n, "float32") for n in range(1, 6)]
    trifles = [Kernel("add", 0, n, "float32") for n in (100, 1000, 2000)]
    return [*products, *convolutions, *streams, *trifles]


def timed(device: Device, noise: list[float]) -> list[CalibrationSample]:
    return [
        CalibrationSample(str(place), (kernel,), round(kernel_ns(kernel, device) * factor))
        for place, (kernel, factor) in enumerate(zip(kernels(), noise, strict=True))
    ]


def blank(device: Device) -> Device:
    peaks = dict.fromkeys(device.peak_flop_per_s, 1)
    return replace(device, peak_flop_per_s=peaks, bandwidth_bytes_per_s=1, launch_ns=0)


def reached(device: Device) -> dict[str, float]:
    """The rates that a device can be known by: a peak and its share show only together."""
    rates = {
        name: device.peak_flop_per_s[name] * device.compute_permille for name in (*TYPES, "tf32")
    }
    return {
        **rates,
        "bandwidth": device.bandwidth_bytes_per_s * device.bandwidth_permille,
        "launch": device.launch_ns,
    }


@pytest.mark.parametrize("name", ["h100", "a100", "l4", "rtx4090"])
def test_timings_of_a_device_give_it_back(name: str) -> None:
    device = load_device(name)
    samples = timed(device, [1.0] * len(kernels()))
    fitted = fit(samples, blank(device))
    assert reached(fitted) == pytest.approx(reached(device), rel=0.01)
    assert [predicted_ns(s, fitted) for s in samples] == pytest.approx(
        [s.measured_ns for s in samples], rel=0.01
    )


@settings(max_examples=30)
@given(st.lists(st.floats(0.9, 1.1), min_size=len(kernels()), max_size=len(kernels())))
def test_noise_moves_the_rates_no_further_than_itself(noise: list[float]) -> None:
    device = load_device("h100")
    fitted = fit(timed(device, noise), blank(device))
    assert reached(fitted) == pytest.approx(reached(device), rel=0.15)


def test_one_outlier_moves_nothing() -> None:
    device = load_device("h100")
    samples = timed(device, [1.0] * len(kernels()))
    slow = [with_field(samples[0], measured_ns=100 * samples[0].measured_ns), *samples[1:]]
    assert reached(fit(slow, blank(device))) == pytest.approx(reached(device), rel=0.01)


def test_kernels_of_one_sample_add_up() -> None:
    device = load_device("h100")
    pairs = [
        CalibrationSample(s.name, s.kernels * 2, 2 * s.measured_ns)
        for s in timed(device, [1.0] * len(kernels()))
    ]
    assert reached(fit(pairs, blank(device))) == pytest.approx(reached(device), rel=0.01)


def test_shares_are_the_median_over_the_fastest() -> None:
    device = load_device("h100")
    fitted = fit(
        timed(
            device,
            [
                0.5 if kernel.operator == "relu" and kernel.bytes == 10**8 else 1.0
                for kernel in kernels()
            ],
        ),
        blank(device),
    )
    assert (fitted.compute_permille, fitted.bandwidth_permille) == (1000, 500)
