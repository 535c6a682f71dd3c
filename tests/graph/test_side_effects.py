"""Fakes under a tracker have the strides of real results, by which boundaries are sent, and the
versions of real arguments, by which writes are seen.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.graph.side_effects import SideEffectTracker

NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((8, 6), (1, 0)),
        ((2, 8, 6), (0, 2, 1)),
        ((2, 8, 6, 5), (0, 2, 3, 1)),
        ((2, 8, 6, 5), (0, 3, 1, 2)),
        ((2, 8, 1, 1), (0, 1, 2, 3)),
        ((2, 8, 6, 5, 3), (0, 4, 1, 2, 3)),
        ((2, 8, 6, 5, 3), (0, 2, 1, 3, 4)),
    ],
)
def test_batch_norm(shape: tuple[int, ...], order: tuple[int, ...], train: bool) -> None:
    x = torch.randn(shape).permute(order)
    norm = NORMS[x.dim()](x.shape[1]).train(train)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, SideEffectTracker():
        fake = norm(mode.from_tensor(x))
    assert fake.stride() == norm(x).stride()


@torch.library.custom_op("pipecompile_tests::halve_all", mutates_args=("values",))
def halve_all(values: list[Tensor]) -> None:
    for value in values:
        value.mul_(0.5)


WRITES: dict[str, Callable[[list[Tensor]], object]] = {
    "by a number": lambda values: torch._foreach_mul_(values, 0.5),
    "by tensors": lambda values: torch._foreach_lerp_(values, [torch.zeros(3)] * 2, 0.5),
    "copied": lambda values: torch._foreach_copy_(values, [torch.zeros(3)] * 2),
    "of views": lambda values: torch._foreach_neg_([value[:2] for value in values]),
    "twice": lambda values: [torch._foreach_zero_(values) for _ in "ab"],
    "a custom operator": halve_all,
    "of one": lambda values: values[0].mul_(2),
    "not in place": lambda values: torch._foreach_mul(values, 0.5),
}


@pytest.mark.parametrize("name", WRITES)
def test_versions_are_those_of_real_tensors(name: str) -> None:
    real = [torch.ones(3), torch.ones(3)]
    WRITES[name](real)
    with FakeTensorMode(), SideEffectTracker():
        fakes = [torch.ones(3), torch.ones(3)]
        WRITES[name](fakes)
    # What a custom operator does inside itself raises real versions too on some releases of torch.
    count = bool if name == "a custom operator" else int
    assert [count(fake._version) for fake in fakes] == [count(tensor._version) for tensor in real]
