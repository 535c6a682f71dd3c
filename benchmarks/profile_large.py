"""What does it take to find the costs of a model that does not fit on this machine?

    python -m benchmarks.profile_large

Runs `pipecompile profile` with AdamW, each time in a process of its own: on GPT-2, on a Llama of
13B parameters and on one rank's part of Llama-3-70B with roofline:h100, then on a narrow GPT of 96
layers with measured costs. A model that is in memory is also checked by two training steps.

Prints the seconds from start to end and the largest resident memory beyond that of a process that
only imports what all of them need; writes results/profile_large.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.command_line import no_arguments

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "profile_large.json"
IMPORTS = [
    "-c",
    "import torch, transformers; transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM",
]
CASES = {
    "gpt2_small": ["examples/models.py:gpt2_small", "--costs", "roofline:h100"],
    "llama_13b": ["examples/models.py:llama_13b", "--costs", "roofline:h100"],
    "llama3_70b": ["benchmarks/published_models.py:llama3_70b_h100", "--costs", "roofline:h100"],
    "gpt_96_layers": ["examples/models.py:gpt_96_layers", "--costs", "measured"],
}


def main() -> None:
    """Print and write the table."""
    _, imports = _run(IMPORTS)
    print(f"{'model':14} {'costs':15} {'nodes':>6} {'distinct':>8} {'seconds':>8} {'extra MiB':>9}")
    rows = [_row(name, arguments, imports) for name, arguments in CASES.items()]
    result = {
        "torch": version("torch"),
        "device": "cpu",
        "imports_mib": round(imports),
        "rows": rows,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _row(name: str, arguments: list[str], imports: float) -> dict[str, Any]:
    started = time.perf_counter()
    output, peak = _run(
        ["-m", "pipecompile", "profile", *arguments, "--optimizer", "adamw", "--format", "json"]
    )
    seconds, profile = time.perf_counter() - started, json.loads(output)
    row = {
        "model": name,
        "costs": profile["costs"],
        "nodes": profile["total"]["nodes"],
        "distinct": profile["distinct"],
        "parameter_bytes": profile["total"]["parameter_bytes"],
        "optimizer_bytes": profile["optimizer_bytes"],
        "seconds": round(seconds, 1),
        "extra_mib": round(peak - imports),
    }
    print(
        f"{name:14} {row['costs']:15} {row['nodes']:6} {row['distinct']:8} {row['seconds']:8} "
        f"{row['extra_mib']:9}",
        flush=True,
    )
    return row


def _run(arguments: list[str]) -> tuple[str, float]:
    """Return the output of Python with `arguments`, and its peak resident memory in MiB."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"python {' '.join(arguments)} failed")
    return output, usage.ru_maxrss / 1024


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
