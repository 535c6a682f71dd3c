"""Does a pipeline train every model of the zoo as the unsplit model does?

    python -m benchmarks.verify_zoo [MODEL …]

Compares a step of three stages, planned by flops, with one of the unsplit model, as `pipecompile
verify` does: in train mode and, where that is random, in eval mode too. Prints a table; writes
results/verify_zoo.json. Models that are not named keep their figures.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.command_line import chosen_names
from pipecompile.api.verification import verify
from pipecompile.frontend.target import Target
from tests.zoo.models import MODELS

RESULT = Path(__file__).parent / "results" / "verify_zoo.json"
STAGES = 3
MICROBATCHES = 4

Row = dict[str, Any]


def main(names: list[str]) -> None:
    """Print and write the table of these models, or of all."""
    torch.set_num_threads(1)
    rows = json.loads(RESULT.read_text())["models"] if names and RESULT.exists() else {}
    print(f"{'model':18} {'nodes of the stages':20} {'seconds':>7} {'worst':>8}  answer")
    for name in names or MODELS:
        rows[name] = row = measure(name)
        stages = "+".join(map(str, row["nodes"]))
        print(
            f"{name:18} {stages:20} {row['seconds']:7.1f} {row['worst']!s:>8.8}  {_answer(row)}",
            flush=True,
        )
    models = {name: rows[name] for name in MODELS if name in rows}
    print(f"\npassed {sum(row['passed'] for row in models.values())}/{len(models)}")
    setting = {"torch": torch.__version__, "k": STAGES, "microbatches": MICROBATCHES}
    RESULT.write_text(json.dumps(setting | {"models": models}, indent=1) + "\n")


def _answer(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    if row["passed"]:
        return f"equal to {' and '.join(row['references'])}"
    return f"{row['differs']} differs"


def measure(name: str) -> Row:
    """Return the row of one model; an error is a result too."""
    began = time.perf_counter()
    try:
        row = _verified(Target.of(MODELS[name](), name))
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        row = {
            "passed": False,
            "error": f"{type(error).__name__}: {line}"[:300],
            "worst": None,
            "nodes": [],
        }
    return row | {"seconds": round(time.perf_counter() - began, 2)}


def _verified(target: Target) -> Row:
    target.model.train()
    plan, comparisons = verify(target, k=STAGES, microbatches=MICROBATCHES, costs="flops")
    counts = Counter(plan.assignment.values())
    differences = [comparison.worst for comparison in comparisons]
    worst = max(differences, key=lambda difference: difference.relative)
    return {
        "passed": all(comparison.passed for comparison in comparisons),
        # Infinite where a tensor exists on one side only, which JSON cannot say.
        "worst": worst.relative if math.isfinite(worst.relative) else None,
        "differs": f"{worst.kind} {worst.name}",
        "references": list(dict.fromkeys(comparison.reference for comparison in comparisons)),
        "nodes": [counts[stage] for stage in range(STAGES)],
    }


if __name__ == "__main__":
    main(chosen_names(__doc__, "model", MODELS))
