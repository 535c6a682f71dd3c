"""Efficiency curves: what a kernel takes under one, and the fit that finds it from timings."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.cost_models.calibration import CalibrationSample, predicted_ns
from pipecompile.cost_models.device import (
    Device,
    EfficiencyCurve,
    OperatorClass,
    load_device,
    slowed,
)
from pipecompile.cost_models.efficiency_fit import CLASSES, fit_efficiency
from pipecompile.cost_models.kernels import Kernel
from pipecompile.cost_models.roofline import Roofline, kernel_ns
from pipecompile.ir.serialization import decode, encode

H100 = load_device("h100")
OPERATORS: dict[OperatorClass, str] = {
    "product": "mm",
    "convolution": "convolution_backward",
    "attention": "_scaled_dot_product_flash_attention",
    "move": "add",
}
SIZES = (1, 2, 4, 8, 16, 64)


def kernel(name: OperatorClass, size: int) -> Kernel:
    """Return a kernel of a class that takes longer than a launch, by its work alone."""
    if name == "move":
        return Kernel(OPERATORS[name], 0, size * 10**8, "float32")
    return Kernel(OPERATORS[name], size * 10**11, 10**3, "bfloat16")


def calibrated(curves: dict[OperatorClass, EfficiencyCurve]) -> Device:
    return replace(H100, efficiency=curves, sources={**H100.sources, "efficiency": "a test"})


def timed(device: Device, factors: list[float] | None = None) -> list[CalibrationSample]:
    kernels = [kernel(name, size) for name in CLASSES for size in SIZES]
    factors = factors or [1.0] * len(kernels)
    return [
        CalibrationSample(each.operator, (each,), round(kernel_ns(each, device) * factor))
        for each, factor in zip(kernels, factors, strict=True)
    ]


def squares(samples: list[CalibrationSample], device: Device) -> float:
    return sum((predicted_ns(each, device) / each.measured_ns - 1) ** 2 for each in samples)


def curves(largest_half: int = 10**11) -> st.SearchStrategy[EfficiencyCurve]:
    return st.builds(
        EfficiencyCurve,
        permille=st.integers(200, 1000),
        half_work=st.integers(0, largest_half),
    )


ALL_CURVES = st.fixed_dictionaries(
    {name: curves(10**8 if name == "move" else 10**11) for name in CLASSES}
)


@given(st.integers(1, 10**13), st.integers(1, 10**10), curves(10**12))
def test_a_kernel_takes_its_work_at_the_share_that_its_size_reaches(
    flops: int, size: int, curve: EfficiencyCurve
) -> None:
    device = calibrated({"product": curve})
    each = Kernel("mm", flops, size, "bfloat16")
    share = Fraction(curve.permille, 1000) * Fraction(flops, flops + curve.half_work)
    compute = Fraction(flops * 10**9) / (H100.peak_flop_per_s["bfloat16"] * share)
    memory = Fraction(size * 10**9 * 1000, H100.bandwidth_bytes_per_s * H100.bandwidth_permille)
    assert kernel_ns(each, device) == max(ceil(compute), ceil(memory), H100.launch_ns)


def test_half_of_the_share_is_reached_at_half_work() -> None:
    device = calibrated({"move": EfficiencyCurve(permille=1000, half_work=10**9)})
    at_half = kernel_ns(Kernel("add", 0, 10**9, "float32"), device)
    assert at_half == 2 * ceil(10**18 / H100.bandwidth_bytes_per_s) - 1
    # What computes moves its bytes at the device's own share.
    product = Kernel("mm", 1, 10**9, "bfloat16")
    assert kernel_ns(product, device) == kernel_ns(product, H100)


@settings(max_examples=40)
@given(ALL_CURVES)
def test_timings_of_a_device_give_its_curves_back(
    true: dict[OperatorClass, EfficiencyCurve],
) -> None:
    samples = timed(calibrated(true))
    fitted = fit_efficiency(samples, H100)
    predicted = [predicted_ns(each, fitted) for each in samples]
    assert predicted == pytest.approx([each.measured_ns for each in samples], rel=0.003)
    for name, curve in fitted.efficiency.items():
        assert curve.permille == pytest.approx(true[name].permille, rel=0.01)
    assert decode(encode(fitted), Device, origin="test") == fitted


@settings(max_examples=40)
@given(ALL_CURVES, ALL_CURVES, st.lists(st.floats(0.7, 1.5), min_size=24, max_size=24))
def test_no_other_curves_are_nearer_to_noisy_timings(
    true: dict[OperatorClass, EfficiencyCurve],
    other: dict[OperatorClass, EfficiencyCurve],
    factors: list[float],
) -> None:
    samples = timed(calibrated(true), factors)
    fitted = squares(samples, fit_efficiency(samples, H100))
    # Shares are rounded to permille, and times to nanoseconds.
    assert fitted <= squares(samples, calibrated(other)) + 1e-3
    assert fitted <= squares(samples, H100) + 1e-3


def test_one_size_or_few_samples_show_no_curve() -> None:
    true = calibrated(dict.fromkeys(CLASSES, EfficiencyCurve(permille=500, half_work=10**7)))
    samples = timed(true)
    same = [each for each in samples if each.kernels[0].flops == 10**11] * 4
    assert fit_efficiency(same, H100).efficiency == {}
    assert fit_efficiency(samples[:3], H100) == H100


def test_kernels_of_other_classes_in_a_sample_are_subtracted() -> None:
    true = calibrated({"product": EfficiencyCurve(permille=600, half_work=3 * 10**11)})
    extra = kernel("move", 1)
    samples = [
        CalibrationSample("both", (each, extra), kernel_ns(each, true) + kernel_ns(extra, true))
        for each in (kernel("product", size) for size in (2, 4, 8, 16, 32))
    ]
    assert fit_efficiency(samples, H100).efficiency["product"].permille in (599, 600, 601)


def test_a_slower_device_is_slower_by_the_same_factor_at_every_size() -> None:
    device = calibrated(dict.fromkeys(CLASSES, EfficiencyCurve(permille=700, half_work=10**8)))
    half = slowed(device, 2, "a test")
    for name in CLASSES:
        for size in SIZES:
            each = kernel(name, size)
            assert kernel_ns(each, half) == pytest.approx(2 * kernel_ns(each, device), rel=1e-3)


def test_a_plan_is_told_whether_sizes_count() -> None:
    assert Roofline(H100, "h").notes == ("one efficiency for all sizes (not calibrated)",)
    device = calibrated(
        dict.fromkeys(("product", "move"), EfficiencyCurve(permille=700, half_work=1))
    )
    assert Roofline(device, "h").notes == ("efficiency by size (calibrated): move, product",)


def test_curves_without_a_source_are_refused() -> None:
    with pytest.raises(ValueError, match="where its efficiency comes from"):
        replace(H100, efficiency={"move": EfficiencyCurve(permille=1, half_work=0)})
