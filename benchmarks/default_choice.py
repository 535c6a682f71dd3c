"""What `pipecompile(model, batch, k=4)` chooses, beside k microbatches under 1f1b.

    python -m benchmarks.default_choice [MODEL …]

The seven examples and the models of the memory benchmark, with the costs of an H100's roofline.
Both plans are made as the command makes them; the ratio of their steps is what the choice is worth.
Prints a table; writes results/default_choice.json. Models that are not named keep their figures.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.command_line import chosen_names
from benchmarks.models import MODELS
from pipecompile.api.open_setting import plan_of
from pipecompile.api.plan_request import plan_request
from pipecompile.frontend.target import Target
from pipecompile.ir.links import FREE
from tests.zoo import EXAMPLES, example

RESULT = Path(__file__).parent / "results" / "default_choice.json"
STAGES, COSTS = 4, "roofline:h100"
Row = dict[str, Any]


def _target(name: str) -> Target:
    return Target.of(MODELS[name](), name)


TARGETS: Mapping[str, Callable[[], Target]] = {
    **{f"example {name}": partial(example, name) for name in EXAMPLES},
    **{name: partial(_target, name) for name in MODELS},
}


def main(names: list[str]) -> None:
    """Print and write the table of these models, or of all."""
    logging.disable(logging.WARNING)
    rows = json.loads(RESULT.read_text())["models"] if names and RESULT.exists() else {}
    print(f"{'model':20} {'by hand':>9} {'bubble':>6}  {'chosen':>9} {'bubble':>6} ratio  setting")
    for name in names or TARGETS:
        rows[name] = row = measure(TARGETS[name]())
        print(
            f"{name:20} {row['by_hand_ns'] / 1e6:6.2f} ms {row['by_hand_bubble']:6.1%}  "
            f"{row['step_ns'] / 1e6:6.2f} ms {row['bubble']:6.1%} {row['ratio']:5.3f}  "
            f"{row['microbatches']} microbatches, {row['schedule']}; planned in "
            f"{row['seconds']:.0f} instead of {row['by_hand_seconds']:.0f} CPU s",
            flush=True,
        )
    kept = {name: rows[name] for name in TARGETS if name in rows}
    longer = [name for name, row in kept.items() if row["ratio"] > 1]
    print(f"\nlonger than by hand: {', '.join(longer) or 'none'} of {len(kept)}")
    RESULT.write_text(json.dumps({"k": STAGES, "costs": COSTS, "models": kept}, indent=1) + "\n")


def measure(target: Target) -> Row:
    """Return the row of one model."""
    row: Row = {}
    for prefix, options in (("by_hand_", {"microbatches": STAGES}), ("", {})):
        began = time.process_time()
        plan = plan_of(target, plan_request(k=STAGES, costs=COSTS, **options), FREE)
        row |= {
            f"{prefix}ns" if prefix else "step_ns": plan.prediction.step_ns,
            f"{prefix}bubble": plan.prediction.bubble,
            f"{prefix}seconds": round(time.process_time() - began, 1),
        }
    chosen = {"microbatches": plan.microbatches, "schedule": plan.schedule.name}
    return {**row, **chosen, "ratio": round(row["step_ns"] / row["by_hand_ns"], 4)}


if __name__ == "__main__":
    main(chosen_names(__doc__, "model", TARGETS))
