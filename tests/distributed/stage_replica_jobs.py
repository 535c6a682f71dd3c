"""What workers do in tests of stages on several ranks: each function runs on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile import InputError, pipecompile
from tests.distributed.training_jobs import Run, run_of


def replicated(replicas: tuple[int, ...], microbatches: int = 5, **options: Any) -> Run:
    """The mixture on so many ranks for each stage; 5 microbatches go around none evenly."""
    # The first and the last stage read the table, and the skip crosses all boundaries.
    options |= {"stage_replicas": replicas, "microbatches": microbatches}
    return run_of(sum(replicas), 1, **options)


def gradients_and_loss(
    replicas: tuple[int, ...], schedules: list[str]
) -> tuple[float, float, list[int]]:
    """How far gradients and loss of two steps are from those of the unsplit model under each
    schedule; and the stages here.
    """
    gradients, losses = 0.0, 0.0
    for schedule in schedules:
        run = replicated(replicas, schedule=schedule)
        for _ in range(2):
            run.pipeline.zero_grad()
            wanted = run.unsplit_step()
            loss = run.step(everywhere=True)
            gradients = max(gradients, run.distance())
            losses = max(losses, abs(loss.item() - wanted.item()))
    return gradients, losses, run.pipeline._share.stages


def last_batch(replicas: tuple[int, ...], samples: int) -> tuple[float, float, float]:
    """How far gradients, the loss of an evaluation and outputs are for a batch of fewer samples,
    which may leave a rank without any.
    """
    run = replicated(replicas)
    tokens, targets = (tensor[:samples] for tensor in (run.whole.call.args[0], run.whole.targets))
    model, loss_fn = run.reference.model, run.whole.loss_fn
    assert loss_fn is not None
    # Dropout draws by microbatch, which a plain forward of all samples does not.
    for module in (run.pipeline, model):
        module.eval()
    model.zero_grad()
    loss = loss_fn(model(tokens), targets)
    loss.backward()
    run.pipeline.step(tokens, targets)
    distance = run.distance()
    evaluated = run.pipeline.evaluate(tokens, targets)
    output = run.pipeline.evaluate(tokens)
    if evaluated is None:
        return distance, 0.0, 0.0
    return distance, (evaluated - loss).abs().item(), (output - model(tokens)).abs().max().item()


def accumulated_and_clipped(replicas: tuple[int, ...]) -> tuple[float, float]:
    """How far gradients of two steps, of which the first accumulates, are from those of the unsplit
    model, and their norm.
    """
    run = replicated(replicas)
    wanted: dict[str, torch.Tensor] = {}
    for step in range(2):
        run.pipeline.steps = step
        run.unsplit_step()
        for name, gradient in run.unsplit_gradients().items():
            wanted[name] = wanted.get(name, torch.zeros_like(gradient)) + gradient
    run.pipeline.steps = 0
    run.step(accumulate=True)
    run.step()
    norm = run.pipeline.clip_grad_norm_(1e9)
    exact = torch.nn.utils.get_total_norm(list(wanted.values()))
    return run.distance(wanted), abs(norm.item() / exact.item() - 1)


def resumed(replicas: tuple[int, ...], folder: str) -> tuple[bool, bool]:
    """Whether two steps of AdamW after a checkpoint are those of the run that was saved, on each
    replica, and whether the full state is that of the parameters here.
    """

    def run_with_optimizer() -> tuple[Run, torch.optim.Optimizer]:
        run = replicated(replicas)
        return run, torch.optim.AdamW(run.pipeline.parameters(), lr=0.05)

    def train(run: Run, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        for _ in range(2):
            run.pipeline.zero_grad()
            run.step()
            optimizer.step()
        return {name: p.detach().clone() for name, p in run.pipeline.named_parameters()}

    run, optimizer = run_with_optimizer()
    train(run, optimizer)
    run.pipeline.checkpoint(optimizer).save(f"{folder}/checkpoint")
    wanted = train(run, optimizer)
    other, fresh = run_with_optimizer()
    other.pipeline.checkpoint(fresh).load(f"{folder}/checkpoint")
    got = train(other, fresh)
    state = other.pipeline.full_state_dict()
    same = all(torch.equal(got[name], value) for name, value in wanted.items())
    return same, state is None or all(torch.equal(state[name], got[name]) for name in got)


def refused() -> None:
    """What stages on several ranks cannot have says why."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    options: Any = {"costs": "flops", "self_check": False, "loss_fn": nn.functional.mse_loss}
    with pytest.raises(InputError, match=r"stages on 2,1 ranks, but torch's runtime runs a stage"):
        pipecompile(model, torch.zeros(3, 8), stage_replicas=(2, 1), engine="torch", **options)
