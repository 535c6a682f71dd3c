"""What workers do in tests of losses with parameters; each function runs on every rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile import Pipeline, pipecompile
from pipecompile.frontend.loss_reduction import LossReduction
from pipecompile.runtime.shards import whole
from pipecompile.training.checkpoint import Checkpoint
from tests.distributed.parallel_jobs import sharding
from tests.loss_modules import Head, Projected, data, layers, unsplit_step
from tests.unequal_batches import gradients_of, largest_difference

MICROBATCHES, SIZE = 3, 2


class Run:
    """A pipeline on this rank whose loss has parameters, and the unsplit model with that loss."""

    def __init__(
        self, ranks: int, replicas: int, reduction: LossReduction = "mean", **options: Any
    ) -> None:
        self.replicas, self.reduction = replicas, reduction
        self.replica = dist.get_rank() // (dist.get_world_size() // replicas)
        # Of other weights on each rank: those of the owner, in the first replica, hold.
        self.model, self.loss_fn = layers(), Head(reduction).double()
        for module in (self.model, self.loss_fn):
            module.requires_grad_(True)
        self.unsplit: Any = nn.Module()
        self.unsplit.model, self.unsplit.loss_fn = copy.deepcopy((self.model, self.loss_fn))
        self.pipeline: Pipeline = pipecompile(
            self.model,
            data(MICROBATCHES * SIZE)[0],
            ranks=ranks,
            microbatches=MICROBATCHES,
            costs="flops",
            self_check=False,
            loss_fn=self.loss_fn,
            loss_reduction=reduction,
            **options,
        )

    def step(self, samples: int) -> None:
        """A step of the pipeline on its replica's part, and of the unsplit model on all of them."""
        parts = [data(samples, seed) for seed in range(self.replicas)]
        self.pipeline.step(*parts[self.replica])
        batch, target = (torch.cat(each) for each in zip(*parts, strict=True))
        counts = {"mean": len(batch) / SIZE, "sum": 1.0, "weighted": float(len(batch))}
        # Replicas keep averages of their own data, as those of batch norms are.
        self.unsplit.eval(), self.pipeline.eval()
        unsplit_step(
            self.unsplit.model, self.unsplit.loss_fn, batch, target, SIZE, counts[self.reduction]
        )

    @property
    def distance(self) -> float:
        """The largest difference of a gradient of this rank."""
        wanted = gradients_of(self.unsplit.model)
        loss = gradients_of(self.unsplit.loss_fn)
        wanted |= {f"loss_fn.{name}": gradient for name, gradient in loss.items()}
        named = self.pipeline.named_parameters()
        return largest_difference({name: whole(p.grad) for name, p in named}, wanted)


def names(pipeline: Pipeline) -> list[str]:
    """The parameters of the loss that are here."""
    named = pipeline.named_parameters()
    return sorted(name for name, _ in named if name.startswith("loss_fn."))


def steps(
    ranks: int, replicas: int, reduction: LossReduction, options: dict[str, Any]
) -> tuple[list[str], float]:
    """What is here of the loss, and how far gradients are from those of the unsplit model."""
    run = Run(ranks, replicas, reduction, **options)
    run.pipeline.eval(), run.unsplit.eval()
    distances = []
    for samples in (6, 5):
        run.pipeline.zero_grad(), run.unsplit.zero_grad()
        run.step(samples)
        distances.append(run.distance)
    return names(run.pipeline), max(distances)


def sharded(ranks: int, replicas: int) -> tuple[list[str], float]:
    """The same, with each stage divided over replicas by FSDP2."""
    run = Run(ranks, replicas, **sharding(ranks, replicas))
    run.pipeline.eval(), run.unsplit.eval()
    run.step(6)
    return names(run.pipeline), run.distance


def saved(path: str) -> tuple[dict[str, Tensor] | None, list[float]]:
    """Save a run whose loss has moved; return the full state, and the norms that clipping finds
    on this rank and in the unsplit model.
    """
    run = Run(2, dist.get_world_size() // 2)
    run.pipeline.eval(), run.unsplit.eval()
    run.step(6)
    parameters = list(run.unsplit.parameters())
    norms = [nn.utils.clip_grad_norm_(parameters, 1e9).item()]
    norms.append(run.pipeline.clip_grad_norm_(1e9).item())
    optimizer = torch.optim.AdamW(run.pipeline.parameters(), lr=0.1)
    optimizer.step()
    run.pipeline.checkpoint(optimizer).save(path)
    return run.pipeline.full_state_dict(), norms


def loaded(path: str) -> dict[str, Tensor]:
    """The part of a checkpoint that is here on as many ranks as there are."""
    run = Run(dist.get_world_size(), 1)
    optimizer = torch.optim.AdamW(run.pipeline.parameters(), lr=0.1)
    run.pipeline.checkpoint(optimizer).load(path)
    return run.pipeline.state_dict()


def unsplit_from(path: str) -> dict[str, Tensor]:
    """The state of an unsplit model that has the loss as its module, from a checkpoint."""
    model = layers()
    model.loss_fn = Head().double()
    Checkpoint.of_model(model, torch.optim.AdamW(model.parameters())).load(path)
    return model.state_dict()


def on_meta() -> tuple[list[str], bool]:
    """What a rank holds of a loss that nobody had in memory, and whether the rest has none."""
    with torch.device("meta"):
        model, loss_fn = layers(), nn.Sequential(nn.Linear(8, 4)).double()
    loss = Projected(loss_fn)
    batch, target = data(MICROBATCHES * SIZE)
    pipeline = pipecompile(
        model,
        batch,
        ranks=dist.get_world_size(),
        microbatches=MICROBATCHES,
        costs="flops",
        loss_fn=loss,
        weights=None,
    )
    pipeline.step(batch, target)
    own = names(pipeline)
    return own, all(parameter.is_meta != bool(own) for parameter in loss.parameters())
