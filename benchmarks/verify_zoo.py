"""Does the pipeline train every model of the zoo? Three stages, costs in flops, as `pipecompile verify` compares.

    python -m benchmarks.verify_zoo [MODEL …]

A step of the pipeline beside the unsplit model's: in train mode and, where that is random, in eval mode, too. Prints a
table and writes benchmarks/results/verify_zoo.json; models that are not named keep their figures.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from pipecompile.api.target import Target
from pipecompile.api.verify import verify
from tests.zoo.models import MODELS

RESULT = Path(__file__).parent / "results" / "verify_zoo.json"
STAGES = 3
MICROBATCHES = 4

Row = dict[str, Any]


def main(names: list[str]) -> None:
    """Prints and writes the table of these models, or of all."""
    torch.set_num_threads(1)
    found = json.loads(RESULT.read_text())["models"] if names and RESULT.exists() else {}
    print(f"{'model':18} {'nodes of the stages':20} {'seconds':>7} {'worst':>8}  answer")
    for name in names or MODELS:
        found[name] = row = measure(name)
        stages = "+".join(map(str, row["nodes"]))
        print(
            f"{name:18} {stages:20} {row['seconds']:7.1f} {row['worst']!s:>8.8}  {_answer(row)}",
            flush=True,
        )
    models = {name: found[name] for name in MODELS if name in found}
    print(f"\npassed {sum(row['passed'] for row in models.values())}/{len(models)}")
    setting = {"torch": torch.__version__, "k": STAGES, "microbatches": MICROBATCHES}
    RESULT.write_text(json.dumps(setting | {"models": models}, indent=1) + "\n")


def _answer(row: Row) -> str:
    if "error" in row:
        return str(row["error"])
    return (
        f"equal to {' and '.join(row['references'])}"
        if row["passed"]
        else f"{row['differs']} differs"
    )


def measure(name: str) -> Row:
    """One model; an error is an answer, too."""
    began = time.perf_counter()
    try:
        found = _verified(Target.of(MODELS[name](), name))
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        found = {
            "passed": False,
            "error": f"{type(error).__name__}: {line}"[:300],
            "worst": None,
            "nodes": [],
        }
    return found | {"seconds": round(time.perf_counter() - began, 2)}


def _verified(target: Target) -> Row:
    target.model.train()
    plan, comparisons = verify(target, k=STAGES, microbatches=MICROBATCHES, costs="flops")
    counts = Counter(plan.assignment.values())
    worst = max(
        (comparison.worst for comparison in comparisons), key=lambda difference: difference.relative
    )
    return {
        "passed": all(comparison.passed for comparison in comparisons),
        "worst": worst.relative
        if math.isfinite(worst.relative)
        else None,  # None: there on one side alone
        "differs": f"{worst.kind} {worst.name}",
        "references": list(dict.fromkeys(comparison.reference for comparison in comparisons)),
        "nodes": [counts[stage] for stage in range(STAGES)],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
