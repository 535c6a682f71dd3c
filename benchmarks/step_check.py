"""What does it take, before each step, to find out that the model is as it was compiled?

    python -m benchmarks.step_check

Trains Llamas of 4 to 32 small layers in one process. The check is timed where it is, within a step,
which has put everything else into the caches, and many times in a row.

Prints a table; writes results/step_check.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from benchmarks.command_line import no_arguments
from pipecompile import Pipeline, pipecompile
from pipecompile.training.program import Program

RESULT = Path(__file__).parent / "results" / "step_check.json"
LAYERS = (4, 16, 32)
STEPS, IN_A_ROW = 40, 400


def main() -> None:
    """Measure all depths, and write the result."""
    no_arguments(__doc__)
    torch.set_num_threads(1)
    rows = []
    print(f"{'layers':>6} {'modules':>8} {'step':>10} {'check in it':>12} {'in a row':>10}")
    for layers in LAYERS:
        row = row_of(layers)
        rows.append(row)
        print(
            f"{layers:>6} {row['modules']:>8} {row['step_ms']:>7.1f} ms {row['check_ms']:>9.2f} ms "
            f"{row['check_in_a_row_ms']:>7.2f} ms",
            flush=True,
        )
    RESULT.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


def row_of(layers: int) -> dict[str, Any]:
    """Return the figures of a Llama of so many layers."""
    model, batch = llama(layers)
    pipeline = pipecompile(model, batch, k=2, microbatches=2, costs="flops", self_check=False)
    pipeline.step(batch)
    steps, checks, program = timed_checks(pipeline, batch)
    return {
        "layers": layers,
        "modules": len(list(model.modules())),
        "step_ms": 1e3 * median(steps),
        "check_ms": 1e3 * median(checks),
        "check_in_a_row_ms": 1e3 * median(seconds_of(program.check_unchanged, IN_A_ROW)),
    }


def llama(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A Llama with random weights, and its batch."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    tokens = torch.randint(0, 128, (4, 16))
    return LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def timed_checks(
    pipeline: Pipeline, batch: dict[str, Tensor]
) -> tuple[list[float], list[float], Program]:
    """Return the seconds of steps and of the checks in them, and the program that is checked."""
    checks: list[float] = []
    programs: list[Program] = []
    check = Program.check_unchanged

    def timed(program: Program) -> None:
        programs.append(program)
        checks.extend(seconds_of(lambda: check(program), 1))

    with patch.object(Program, "check_unchanged", timed):
        steps = seconds_of(lambda: pipeline.step(batch), STEPS)
    return steps, checks, programs[-1]


def seconds_of(call: Callable[[], object], times: int) -> list[float]:
    """Return how long each of so many calls takes."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return seconds


if __name__ == "__main__":
    main()
