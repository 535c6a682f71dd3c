"""Devices by name: what each can do at best, and how much of that is reached. Needs no PyTorch."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.graph import FusedType
from pipecompile.ir.links import Link
from pipecompile.ir.serialization import NonNegative, Positive, Value, decode, read

__all__ = [
    "Device",
    "EfficiencyCurve",
    "OperatorClass",
    "devices_of",
    "load_device",
    "named_devices",
    "slowed",
]

Permille = Annotated[int, msgspec.Meta(ge=1, le=1000)]
DEVICES = Path(__file__).parent / "devices.json"
FIGURES = (
    "memory_bytes",
    "bandwidth_bytes_per_s",
    "peak_flop_per_s",
    "compute_permille",
    "bandwidth_permille",
    "launch_ns",
    "fused_attention",
)
LINKS = ("within_node", "between_nodes")


OperatorClass = Literal["attention", "convolution", "move", "product"]
"""What an efficiency belongs to: kernels with FLOPs of three kinds, and those that only move
bytes.
"""


class EfficiencyCurve(Value, frozen=True, kw_only=True):
    """The share of a peak that kernels reach, which grows with their work.

    A kernel of `work` FLOPs (or bytes, for a move) reaches permille / 1000 · work / (work +
    half_work): of the share that large ones reach it has half at `half_work`.
    """

    permille: Permille
    half_work: NonNegative


class Device(Value, frozen=True, kw_only=True):
    """One device, as an entry of devices.json or a file of `pipecompile calibrate`.

    `peak_flop_per_s` has by data type the peak of dense matrix products; "tf32" is for float32 that
    is rounded to TF32, "float16 convolution" for convolutions if these have a peak of their own,
    and a type that is not listed computes like float32. `compute_permille` and
    `bandwidth_permille` are the shares of peak and bandwidth that are reached. No kernel takes less
    than `launch_ns`. Kernels of a class that has an entry in `efficiency` reach what that says of
    their size instead; a device that was not calibrated has one share for all sizes. `allocator` is
    what gives out its memory, and `fused_attention` for which data types a GPU fuses attention (see
    `CostModel`). `within_node` joins two such devices of one node, and `between_nodes` those of
    two; None if that is not known. `sources` says of every figure where it comes from: a datasheet,
    a calibration or an assumption.
    """

    schema: Literal["pipecompile/device/1"] = "pipecompile/device/1"
    name: str
    allocator: AllocatorName
    memory_bytes: Positive
    bandwidth_bytes_per_s: Positive
    peak_flop_per_s: dict[str, Positive]
    compute_permille: Permille
    bandwidth_permille: Permille
    launch_ns: NonNegative
    efficiency: dict[OperatorClass, EfficiencyCurve] = {}
    fused_attention: tuple[FusedType, ...]
    within_node: Link | None = None
    between_nodes: Link | None = None
    sources: dict[str, str]

    def __post_init__(self) -> None:
        if "float32" not in self.peak_flop_per_s:
            raise ValueError(
                f"device {self.name!r} has no peak for float32, which other types fall back to"
            )
        # A figure without a source is a guess that looks like a fact.
        optional = [name for name in ("efficiency", *LINKS) if getattr(self, name)]
        for figure in (*FIGURES, *optional):
            if not self.sources.get(figure):
                raise ValueError(
                    f"device {self.name!r} does not say in sources where its {figure} comes from"
                )


@cache
def named_devices() -> dict[str, Device]:
    """Return the devices of devices.json by name."""
    devices = decode(DEVICES.read_bytes(), tuple[Device, ...], origin=DEVICES.name)
    return {device.name: device for device in devices}


def load_device(text: str) -> Device:
    """Return the device with the name `text`, or the one in the file at that path.

    Raise InputError with the names if there is neither.
    """
    if text in named_devices():
        return named_devices()[text]
    if Path(text).is_file():
        return read(text, Device)
    names = ", ".join(named_devices())
    raise InputError(
        f"{text!r} is neither a device nor a device file; choose one of {names}, or run "
        "calibrate -o FILE"
    )


def devices_of(text: str) -> tuple[str, ...]:
    """Return the names in a list of devices, one for each rank: `2xh100,a100` are three.

    One name without a number is that of all ranks. InputError if a device is not there.
    """
    if text in named_devices() or Path(text).is_file():
        return (text,)
    names: list[str] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(?:([1-9]\d*)x)?(\S+?)\s*", part)
        # An empty part, as behind a comma too many, is refused below as a device of that name.
        count, name = (1, part) if match is None else (int(match[1] or 1), match[2])
        # Only to refuse what is not there, before the whole list is used.
        load_device(name)
        names += [name] * count
    return tuple(names)


def slowed(device: Device, factor: float, reason: str) -> Device:
    """Return `device` with rates at which every kernel takes `factor` times as long.

    `reason` is added to the sources of the rates. A kernel of a GPU with 1 TB/s that took 2 µs
    takes 3 µs with 667 GB/s.
    """
    # The shares that are reached stay: peak × share is what counts, and one factor of it is enough.
    rates = ("peak_flop_per_s", "bandwidth_bytes_per_s", "launch_ns")
    return replace(
        device,
        peak_flop_per_s={
            name: max(1, round(peak / factor)) for name, peak in device.peak_flop_per_s.items()
        },
        bandwidth_bytes_per_s=max(1, round(device.bandwidth_bytes_per_s / factor)),
        launch_ns=round(device.launch_ns * factor),
        sources={
            **device.sources,
            **{name: f"{device.sources[name]}; {reason}" for name in rates},
        },
    )
