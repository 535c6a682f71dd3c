"""The loop over a rank's actions and torch's runtime: the same step, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile import InputError, pipecompile
from pipecompile.runtime.torch_engine import TorchEngine
from pipecompile.schedule.named_orders import ASYNCHRONOUS, NAMES, required_placement
from tests.device import DEVICE
from tests.distributed.workers import Workers
from tests.sweeps import sweep

MICROBATCH, FEATURES = 3, 8  # samples, and numbers of each


def batch_of(seed: int, samples: int) -> Tensor:
    values = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE)


def trained(engine: str, microbatches: int, options: dict[str, Any]) -> dict[str, Tensor | None]:
    """What three steps leave on this rank, the last of them with a smaller microbatch: the losses,
    the gradients of each, weights, buffers, and the outputs of an evaluation.
    """
    torch.manual_seed(0)
    width = FEATURES
    layers = [
        (nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Tanh())
        for _ in range(8)
    ]
    model = nn.Sequential(*(part for layer in layers for part in layer)).to(DEVICE)
    samples = MICROBATCH * microbatches
    batches = [batch_of(0, samples), batch_of(1, samples), batch_of(2, samples - 4)]
    pipeline = pipecompile(
        model,
        batches[0],
        ranks=dist.get_world_size(),
        microbatches=microbatches,
        costs="flops",
        self_check=False,
        loss_fn=lambda output, _: output.square().mean(),
        engine=engine,  # type: ignore[arg-type]
        **options,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    left: dict[str, Tensor | None] = {}
    for step, batch in enumerate(batches):
        pipeline.zero_grad()
        left[f"loss {step}"] = pipeline.step(batch, everywhere=True)
        for name, parameter in pipeline.named_parameters():
            left[f"gradient {step} of {name}"] = parameter.grad
        optimizer.step()
    left["outputs"] = pipeline.evaluate(batches[0])
    return {**left, **dict(pipeline.named_parameters()), **dict(pipeline.named_buffers())}


def unlike_by_both(microbatches: int, options: dict[str, Any]) -> tuple[int, list[str]]:
    """How many values both engines leave on this rank, and the names of those that differ."""
    with patch.object(
        TorchEngine, "perform", autospec=True, side_effect=TorchEngine.perform
    ) as walk:
        own = trained("own", microbatches, options)
        assert walk.call_count == 0
        other = trained("torch", microbatches, options)
        assert walk.call_count >= 3  # one for each step
    assert own.keys() == other.keys()
    return len(own), [name for name, value in own.items() if not _is_same(value, other[name])]


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


QUICK = [
    (2, "1f1b", "stage"),
    (2, "gpipe", "except-last"),
    (2, "interleaved-1f1b", "none"),
    (2, "zb-h1", "none"),
    (2, "zb-v", "none"),
]


def cases() -> Iterator[Any]:
    """All synchronous schedules on 2 ranks, with recompute too, and on 4."""
    yield from QUICK
    trained_ones = [name for name in NAMES if name not in ASYNCHRONOUS | {"forward-only"}]
    for ranks, recompute in ((2, "none"), (2, "stage"), (4, "none")):
        for schedule in (*trained_ones, "search"):
            if (case := (ranks, schedule, recompute)) not in QUICK:
                yield sweep(*case)


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize(("ranks", "schedule", "recompute"), list(cases()))
def test_both_engines_leave_the_same(
    workers: Workers, tmp_path: Path, ranks: int, schedule: str, recompute: str
) -> None:
    shape, number = ("any", 1) if schedule == "search" else required_placement(schedule)
    options = {"schedule": schedule, "recompute": recompute}
    options["stages_per_rank"] = number or (2 if shape == "loop" else 1)
    for count, unlike in workers.run(
        ranks, unlike_by_both, 2 * ranks, options, folder=str(tmp_path)
    ):
        assert count > 20  # three losses, and of each stage gradients, weights and averages
        assert unlike == []


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="engine"):
        pipecompile(nn.Linear(8, 8), batch_of(0, 8), k=1, engine="trch", microbatches=1)  # type: ignore[arg-type]
