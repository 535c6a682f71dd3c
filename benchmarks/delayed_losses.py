"""Does a small GPT-2 learn as much from gradients of older weights?

    python -m benchmarks.delayed_losses [SCHEDULE …]

Four gloo ranks train it on the project's own pages (examples/corpus.py) under 1F1B, PipeDream-2BW
and PipeDream: the same weights to begin with, the same minibatches, AdamW. They do so three times,
with other weights and other minibatches, and what is compared is the mean. PipeDream updates after
each of the four microbatches, by a quarter of the data: its rate is half, by the rule of the square
root. Losses are compared at equal data, and at equal time: minibatches are as long as
`python -m benchmarks.asynchronous` has measured them on four ranks, since four ranks that compute
on two cores would tell nothing about time.

Prints a table; writes results/delayed_losses.json, in which schedules that are not run again stay.
`python docs/images/make_losses.py` draws it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks import asynchronous
from benchmarks.command_line import chosen_names
from examples.corpus import corpus, minibatch
from examples.models import token_loss
from examples.pretrain import gpt2
from pipecompile import pipecompile
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "delayed_losses.json"
RANKS, MICROBATCHES, MINIBATCHES = 4, 4, 300
BATCH, LENGTH, WIDTH = 16, 32, 64
SEEDS = 3
AVERAGED = 20  # the last minibatches, over which a loss in the table is the mean


class Training(NamedTuple):
    """A schedule, and the rate of AdamW."""

    schedule: str
    rate: float


TRAININGS = {
    training.schedule: training
    for training in (
        Training("1f1b", 2e-3),
        Training("pipedream-2bw", 2e-3),
        Training("pipedream", 1e-3),
    )
}


def losses_of(training: Training, seed: int) -> list[float]:
    """Train on this rank; return the losses on that of the last stage, [] on others."""
    tokens, first = corpus(), seed * MINIBATCHES
    positions = range(first, first + MINIBATCHES)
    batches = [minibatch(tokens, n, size=BATCH, length=LENGTH) for n in positions]
    pipeline = pipecompile(
        gpt2(length=LENGTH, width=WIDTH, seed=seed),
        batches[0][0],
        ranks=dist.get_world_size(),
        microbatches=MICROBATCHES,
        schedule=training.schedule,  # type: ignore[arg-type]
        loss_fn=token_loss,
        sample_target=batches[0][1],
        costs="flops",
        self_check=False,
    )
    losses = pipeline.train(
        batches, lambda parameters: torch.optim.AdamW(parameters, lr=training.rate)
    )
    return [loss.item() for loss in losses if loss is not None]


def lengths() -> dict[str, float]:
    """How long a minibatch takes on four ranks, by schedule, where one of 1F1B takes 1."""
    measured = json.loads(asynchronous.RESULT.read_text())["rows"]
    rates = {
        row["schedule"]: row["minibatches_per_s"]["measured"]
        for row in measured
        if row["ranks"] == RANKS
    }
    return {schedule: rates["1f1b"] / rate for schedule, rate in rates.items()}


def main() -> None:
    """Train under all schedules, and write the result."""
    chosen = chosen_names(__doc__, "schedule", TRAININGS) or list(TRAININGS)
    torch.set_num_threads(1)
    found: dict[str, list[list[float]]] = {}  # of each schedule the losses by seed
    if RESULT.exists():
        found = json.loads(RESULT.read_text())["losses"]
    workers = Workers(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        for schedule in chosen:
            training = TRAININGS[schedule]
            found[schedule] = [
                workers.run(RANKS, losses_of, training, seed, folder=folder)[-1]
                for seed in range(SEEDS)
            ]
    workers.close()
    rows = [_row(training, found[name]) for name, training in TRAININGS.items() if name in found]
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    result = {"torch": torch.__version__, "minibatches": MINIBATCHES, "rows": rows, "losses": found}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _row(training: Training, losses: list[list[float]]) -> dict[str, Any]:
    """Return the losses at the end of all data, and at the end of the shortest training: the means
    over seeds, and what each seed came to.
    """
    length = lengths()
    shortest = min(length[schedule] for schedule in TRAININGS) * MINIBATCHES
    done = min(MINIBATCHES, int(shortest / length[training.schedule]))
    return {
        "schedule": training.schedule,
        "rate": training.rate,
        "minibatch": round(length[training.schedule], 3),
        "loss_at_equal_data": round(mean(map(_last, losses)), 3),
        "by_seed": [round(_last(each), 3) for each in losses],
        "minibatches_at_equal_time": done,
        "loss_at_equal_time": round(mean(_last(each[:done]) for each in losses), 3),
        "by_seed_at_equal_time": [round(_last(each[:done]), 3) for each in losses],
    }


def _last(losses: list[float]) -> float:
    return mean(losses[-AVERAGED:])


if __name__ == "__main__":
    main()
