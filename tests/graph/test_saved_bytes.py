"""Encoded saved tensors take the bytes that the memory model says, by the allocator's events."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from allocations import events
from saved_tensor_models import (
    MIXES,
    ConvolutionBlock,
    state_of,
)
from torch import Tensor, nn
from torch.profiler import record_function

from pipecompile.graph.saved_tensors import EncodedStorages, encode_saved_tensors
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.encodings import Encoding
from pipecompile.memory_model.encoding_costs import (
    EncodingCost,
    SavedStorage,
    cost_for_any_use,
    costs_by_use,
)

IMAGE, PLANE = 2 * 8 * 32 * 32 * 4, 32 * 32  # bytes of an image in the middle, elements of a plane


WIDE = 16 * 256 * 4


SAVED_BY_MODEL: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[SavedStorage, ...]]
] = {
    "block": (
        lambda: ConvolutionBlock(3, 8, inplace=False),
        (2, 3, 32, 32),
        (
            SavedStorage(IMAGE, "float32"),  # of the convolution, by batch normalisation
            *[SavedStorage(8 * 4, "float32")] * 2,
            SavedStorage(IMAGE, "float32", ("relu", "pool input")),
            SavedStorage(IMAGE // 2, "int64", ("pool indices",), bound=PLANE),
        ),
    ),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        ),
        (2, 3, 32, 32),
        (
            SavedStorage(IMAGE, "float32", ("relu", "other")),
            SavedStorage(IMAGE, "float32", ("relu",)),
        ),
    ),
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.2), nn.Linear(256, 4)),
        (16, 64),
        (
            SavedStorage(WIDE, "float32"),
            SavedStorage(WIDE, "float32", is_mask=True),
            SavedStorage(WIDE, "float32"),
        ),
    ),
    "masked": (
        lambda: nn.Sequential(
            nn.Linear(64, 256),
            nn.Flatten(0),
            Masked(),
            nn.Unflatten(0, (16, 256)),
            nn.Linear(256, 4),
        ),
        (16, 64),
        (SavedStorage(WIDE // 4, "bool"), SavedStorage(WIDE, "float32")),
    ),
}


TRIALS = 3  # on a busy machine the profiler loses events


class Masked(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value.masked_fill(value > 0.1, 0.5)


def test_saved_bytes_are_those_of_the_costs() -> None:
    mixes = [(), *MIXES, ("half",), ("mask", "half"), ("offload", "pool"), ("relu", "pool", "half")]
    cases = {f"{name} {'+'.join(mix)}": (name, mix) for name in SAVED_BY_MODEL for mix in mixes}
    predicted = {
        label: predicted_bytes(mix, SAVED_BY_MODEL[name][2]) for label, (name, mix) in cases.items()
    }
    for _ in range(TRIALS):
        with events() as found:
            for label, (name, mix) in cases.items():
                run_forward(label, name, mix)
        wrong = {
            label: (predicted[label], sum(found[label]))
            for label in cases
            if predicted[label] != sum(found[label])
        }
        if not wrong:
            break
    assert not wrong


def saving_cost(
    encodings: Sequence[Encoding], storage: SavedStorage, allocator: AllocatorName
) -> EncodingCost:
    """Return the bytes that `storage` takes in all."""
    by_use = costs_by_use(encodings, storage, allocator)
    if by_use is None:
        found = cost_for_any_use(encodings, storage, allocator)
        return EncodingCost(storage.bytes) if found is None else found[1]
    names = ("kept_bytes", "host_bytes", "packing_bytes", "unpacking_bytes")
    return EncodingCost(*(sum(getattr(cost, name) for cost in by_use) for name in names))


def predicted_bytes(encodings: Sequence[Encoding], storages: Sequence[SavedStorage]) -> int:
    """Return the bytes on a CPU, where the host's memory is the device's."""
    costs = [saving_cost(encodings, storage, "cpu") for storage in storages]
    return sum(cost.kept_bytes + cost.host_bytes for cost in costs)


def run_forward(label: str, name: str, encodings: Sequence[str]) -> None:
    """Run a model's forward and free its result before its graph."""
    make, size, _ = SAVED_BY_MODEL[name]
    torch.manual_seed(0)
    model, value = make(), torch.randn(size)
    with record_function(label):
        with encode_saved_tensors(
            *encodings, storages=EncodedStorages(), exempt=[value, *state_of(model)]
        ) as note_results:
            result = note_results(model(value))
        node = result.grad_fn
        del result
    del node


def test_costs_count_bytes() -> None:
    """For 80 elements, computed by hand."""
    wide, bits = SavedStorage(320, "float32"), 10
    relu = SavedStorage(320, "float32", ("relu", "pool input"))
    assert (
        saving_cost((), wide, "cuda")
        == saving_cost(("mask", "relu"), wide, "cuda")
        == EncodingCost(320)
    )
    assert saving_cost(("half",), wide, "cuda") == EncodingCost(160, 0, 480, 480)
    assert saving_cost(("offload", "half"), wide, "cuda") == EncodingCost(0, 320, 320, 320)
    assert saving_cost(("relu", "offload"), relu, "cuda") == saving_cost(("offload",), wide, "cuda")
    assert saving_cost(("relu", "pool"), relu, "cuda").kept_bytes == bits
    assert saving_cost(("mask",), SavedStorage(80, "bool"), "cuda").kept_bytes == bits
    mask_of_floats = SavedStorage(320, "float32", is_mask=True)
    assert saving_cost(("mask",), mask_of_floats, "cpu").kept_bytes == bits
    assert saving_cost(("mask",), mask_of_floats, "cuda") == EncodingCost(
        320
    )  # on a GPU it would have to wait
    for bound, width in ((2**8, 1), (2**15, 2), (2**15 + 1, 4), (2**31, 4), (2**31 + 1, 8)):
        indices = SavedStorage(640, "int64", ("pool indices",), bound=bound)
        assert saving_cost(("pool",), indices, "cuda").kept_bytes == 80 * width
