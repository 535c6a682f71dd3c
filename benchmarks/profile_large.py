"""What does it take to cost a model that fits on no machine at hand?

`pipecompile profile` on GPT-2 and on a 13B Llama with roofline:h100 and AdamW, each in a process of its own: seconds
from start to end, and the largest resident memory above that of a process that only imports what both need. Then the
measured profile of a narrow GPT of 96 layers. A model in memory is also proven, by two training steps. Prints a table
and writes benchmarks/results/profile_large.json.
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

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "profile_large.json"
IMPORTS = [
    "-c",
    "import torch, transformers; transformers.GPT2LMHeadModel, transformers.LlamaForCausalLM",
]
CASES = {
    "gpt2_small": ["examples/models.py:gpt2_small", "--costs", "roofline:h100"],
    "llama_13b": ["examples/models.py:llama_13b", "--costs", "roofline:h100"],
    "gpt_96_layers": ["examples/models.py:gpt_96_layers", "--costs", "measured"],
}


def main() -> None:
    """Prints and writes the table."""
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
    seconds, found = time.perf_counter() - started, json.loads(output)
    row = {
        "model": name,
        "costs": found["costs"],
        "nodes": found["total"]["nodes"],
        "distinct": found["distinct"],
        "parameter_bytes": found["total"]["parameter_bytes"],
        "optimizer_bytes": found["optimizer_bytes"],
        "seconds": round(seconds, 1),
        "extra_mib": round(peak - imports),
    }
    print(
        f"{name:14} {row['costs']:15} {row['nodes']:6} {row['distinct']:8} {row['seconds']:8} {row['extra_mib']:9}",
        flush=True,
    )
    return row


def _run(arguments: list[str]) -> tuple[str, float]:
    """Standard output of this Python on `arguments`, and the most memory that it held, in MiB."""
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
    main()
