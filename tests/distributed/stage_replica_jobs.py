"""What workers do in tests of stages on several ranks: each function runs on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from pipecompile import InputError
from tests.distributed.training_jobs import MICROBATCH, Run, run_of


def replicated(replicas: tuple[int, ...], microbatches: int = 5, **options: Any) -> Run:
    """The mixture on so many ranks for each stage; 5 microbatches go around none evenly."""
    ranks = sum(replicas)
    # Each boundary is crossed by the skip, and the table is read on the first and the last stage.
    pins = {"pin": {"tanh": 1}} if len(replicas) == 3 else {}
    return run_of(
        ranks, 1, microbatches=microbatches, stage_replicas=replicas, **{**pins, **options}
    )


def gradients_and_loss(replicas: tuple[int, ...], **options: Any) -> tuple[float, float, set[int]]:
    """How far gradients and loss of two steps are from those of the unsplit model; and the
    stages here.
    """
    run, worst = replicated(replicas, **options), 0.0
    for _ in range(2):
        run.pipeline.zero_grad()
        wanted = run.unsplit_step()
        loss = run.step(everywhere=True)
        worst = max(worst, run.distance())
    return worst, abs(loss.item() - wanted.item()), set(run.pipeline._share.stages)
