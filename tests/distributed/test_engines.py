"""The loop over a rank's actions and torch's runtime: the same gradients, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile import InputError, pipecompile
from tests.distributed.workers import Workers

BATCHES = [torch.randn(8, 8, generator=torch.Generator().manual_seed(s)) for s in range(3)]


def trained(engine: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """The losses and the weights after three steps, of which the last has fewer samples."""
    torch.manual_seed(0)
    layers = [(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(8)]
    model = nn.Sequential(*(part for layer in layers for part in layer))
    pipeline = pipecompile(
        model,
        BATCHES[0],
        ranks=dist.get_world_size(),
        microbatches=4,
        costs="flops",
        self_check=False,
        loss_fn=lambda output, _: output.square().mean(),
        engine=engine,  # type: ignore[arg-type]
        **options,
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in (*BATCHES[:2], BATCHES[2][:5]):
        pipeline.zero_grad()
        losses.append(pipeline.step(batch, everywhere=True))
        optimizer.step()
    outputs = pipeline.evaluate(BATCHES[0])
    return [*losses, outputs], {name: p.detach() for name, p in pipeline.named_parameters()}


def same_by_both(options: dict[str, Any]) -> bool:
    """Whether both engines leave the same on this rank."""
    (own, weights), (other, others) = trained("own", options), trained("torch", options)
    same_results = all(
        (one is None) == (two is None) and (one is None or torch.equal(one, two))
        for one, two in zip(own, other, strict=True)
    )
    return same_results and all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {"recompute": "stage"}),
        ("gpipe", {"recompute": "except-last"}),
        ("interleaved-1f1b", {"stages_per_rank": 2}),
        ("zb-h1", {}),
        ("zb-v", {"stages_per_rank": 2}),
    ],
)
def test_both_engines_leave_the_same(
    workers: Workers, tmp_path: Path, schedule: str, options: dict[str, Any]
) -> None:
    results = workers.run(2, same_by_both, {"schedule": schedule, **options}, folder=str(tmp_path))
    assert results == [True, True]


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(InputError, match="engine"):
        pipecompile(nn.Linear(8, 8), BATCHES[0], k=1, engine="trch")  # type: ignore[arg-type]
