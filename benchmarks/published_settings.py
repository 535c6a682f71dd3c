"""What do joint searches choose beside the settings that GPipe's and Megatron's users published?

    python -m benchmarks.published_settings [CASE …]          (default: all of them)

Two models on the meta device, by roofline and the links of named devices, with their minibatches:

- GPipe's Transformer-48 (arXiv 1811.06965, table 2) on eight devices: GPipe, 32 microbatches,
  recompute on every device (by `auto`, which does so in the last stage too);
- the GPT of 1.5B parameters with which Zero Bubble was compared with Megatron's 1F1B and its
  interleaved order (arXiv 2401.10241, tables 4 and 5): eight ranks, 24 microbatches of 6 sequences,
  one and three stages on each rank. Its 22 layers of 2,304, 24 heads and 6 sequences are unchecked:
  they were written down without the paper at hand.

Ours is searched twice: for one pipeline over all devices, as theirs is, and with all open. Cuts
are ours everywhere: only the settings are theirs. Prints a table; writes
results/published_settings.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from benchmarks.auto import Case, Run
from benchmarks.command_line import chosen_names
from benchmarks.gpipe_models import FusedLayer, Transformer, TransformerLayer, token_loss
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Options, Plan
from pipecompile.planner.setting_space import SettingSpace

RESULT = Path(__file__).parent / "results" / "published_settings.json"
EFFORT = 8


@dataclass(frozen=True)
class PublishedCase:
    """A case with the settings that were published for it, by the names of their schedules."""

    case: Case
    settings: dict[str, dict[str, Any]]


def _transformer(
    layers: int, width: int, samples: int, layer: Callable[[int], nn.Module], optimizer: str
) -> Target:
    with torch.device("meta"):
        model = Transformer(layers, width, layer)
        tokens = torch.zeros(samples, 1024, dtype=torch.int64)
    fields = {"model": model, "sample_input": tokens, "targets": tokens, "loss_fn": token_loss}
    return Target.of({**fields, "optimizer": optimizer}, "benchmarks.published_settings")


def _gpt() -> Target:
    """Return the GPT with half-precision weights, as Megatron trains it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return _transformer(22, 2304, 144, lambda width: FusedLayer(width, 4 * width, 24), "adamw")
    finally:
        torch.set_default_dtype(before)


def _gpipe() -> Target:
    return _transformer(48, 2048, 32, TransformerLayer, "rmsprop")


CASES = {
    "gpipe-transformer-48": PublishedCase(
        Case(_gpipe, "8xtpu-v3", master_weights=False),
        # Other policies keep what the last stage saves, under GPipe that of all 32 microbatches.
        {"gpipe": {"schedule": "gpipe", "microbatches": 32, "recompute": "auto"}},
    ),
    "megatron-gpt-1.5b": PublishedCase(
        Case(_gpt, "8xa100"),
        {
            "1f1b": {"schedule": "1f1b", "microbatches": 24},
            "interleaved-1f1b": {
                "schedule": "interleaved-1f1b",
                "microbatches": 24,
                "stages_per_rank": 3,
            },
        },
    ),
}


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Yield the row of each published setting, and those of both searches."""
    published = CASES[name]
    run = Run.of(published.case)
    for label, fixed in published.settings.items():
        yield _row(name, f"published: {label}", run.planned(_options(run, fixed)))
    one = SettingSpace(run.space.devices, run.space.samples, run.base, {"replicas": 1})
    yield _row(name, "ours, one pipeline", replace(run, space=one).joint(EFFORT))
    yield _row(name, "ours", run.joint(EFFORT))


def _options(run: Run, fixed: dict[str, Any]) -> Options:
    stages = run.space.devices * fixed.get("stages_per_rank", 1)
    return msgspec.structs.replace(run.base, k=stages, **fixed)


def _row(name: str, answer: str, plan: Plan | None) -> dict[str, Any]:
    """Return the figures of a plan; None stands for one that was not found to fit."""
    row: dict[str, Any] = {"case": name, "answer": answer}
    if plan is None:
        return row | {"step_ms": None}
    held = max(rank.total.bound for rank in plan.prediction.memory)
    return row | {
        "step_ms": plan.prediction.step_ns / 1e6,
        "bubble": plan.prediction.bubble,
        "fullest_rank_bytes": held,
        "setting": str(plan.joint.best[0].setting) if plan.joint else None,
        "bound_ms": plan.joint.bound_ns / 1e6 if plan.joint else None,
    }


def main() -> None:
    """Print and write the rows of these cases; those of others stay in the file."""
    names = chosen_names(__doc__, "case", list(CASES)) or list(CASES)
    known = json.loads(RESULT.read_text()) if RESULT.exists() else []
    for name in names:
        new = []
        for row in rows(name):
            new.append(row)
            step = "does not fit" if row["step_ms"] is None else f"{row['step_ms']:,.1f} ms"
            print(name, row["answer"], step, row.get("setting") or "", sep="  ", flush=True)
        known = [row for row in known if row["case"] != name] + new
        RESULT.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
