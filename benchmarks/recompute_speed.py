"""How long does it take to choose what is recomputed?

    python -m benchmarks.recompute_speed

For the stages of `benchmarks.recompute`: the seconds for a first cap, which include the menus of
all unique blocks, and for other caps after it. Then the plan of a GPT-2 of 96 layers of width
2048 in eight stages, under a cap that most of them meet only with recompute. Cut and regions are
chosen together; the time counts from the costs on, without the capture.

Prints each figure with its limit; writes results/recompute_speed.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from benchmarks.command_line import no_arguments
from benchmarks.recompute_stages import STAGES, CostedStage, held_bytes
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.planner.draft import draft
from pipecompile.recompute.choice import cheapest

RESULT = Path(__file__).parent / "results" / "recompute_speed.json"
CAPS = range(95, 25, -5)  # % of the peak without recompute
LAYERS, RANKS, MICROBATCHES, MEMORY, COSTS = 96, 8, 16, "8GiB", "roofline:h100"
# Limits. The first one is meant for one block, but all blocks together keep it.
MENU_SECONDS, QUERY_SECONDS, PLAN_SECONDS = 2.0, 0.02, 60.0


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows = [row for name, make in STAGES.items() for row in _query_times(name, make())]
    rows.append(_plan_time())
    RESULT.write_text(
        json.dumps({"torch": torch.__version__, "rows": rows}, indent=1, ensure_ascii=False) + "\n"
    )


def _query_times(name: str, stage: CostedStage) -> Iterator[dict[str, Any]]:
    """Yield the seconds of the dynamic program over menus, with four microbatches in flight.

    CP-SAT, which refines the regions of a finished cut, has a limit of its own and is not measured.
    """
    blocks = len(set(stage.blocks))
    everything = held_bytes(stage.policies["none"], 4)
    seconds = []
    for percent in CAPS:
        began = time.perf_counter()
        cheapest(stage.problem, stage.blocks, 4, everything * percent // 100)
        seconds.append(time.perf_counter() - began)
    first, *others = seconds
    yield _verdict(
        f"{name}, {blocks} blocks: the first cap, with the menus of all blocks",
        first,
        MENU_SECONDS,
    )
    yield _verdict(
        f"{name}: a cap after that, median of {len(others)}",
        statistics.median(others),
        QUERY_SECONDS,
    )
    yield _verdict(f"{name}: a cap after that, longest", max(others), QUERY_SECONDS)


def _loss(output: Any, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(output["logits"].flatten(0, 1), tokens.flatten())


def _plan_time() -> dict[str, Any]:
    """Return the seconds from the costs to the plan, as `pipecompile plan` takes them."""
    config = transformers.GPT2Config(
        n_positions=1024, n_embd=2048, n_layer=LAYERS, n_head=16, use_cache=False
    )
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config).to(torch.bfloat16)
        tokens = torch.empty(MICROBATCHES, 1024, dtype=torch.int64)
    target = Target(model, arguments_of(model, {"input_ids": tokens}), _loss, tokens)
    options = options_for(
        target,
        k=RANKS,
        microbatches=MICROBATCHES,
        costs=COSTS,
        schedule="1f1b",
        recompute="auto",
        memory=MEMORY,
    )
    captured = capture_target(target, options, verify=False)
    graph = cost_graph(target, COSTS, MICROBATCHES, captured)
    shapes = [tuple(value.shape) for value in captured.capture.inputs.flatten(captured.sample)]
    began = time.perf_counter()
    plan = draft(
        graph,
        options,
        graph_digest=captured.digest,
        capture=captured.provenance,
        microbatch_shapes=shapes,
    )
    seconds = time.perf_counter() - began
    recomputing = sum(bool(stage.regions) for stage in plan.stages)
    text = f"GPT-2 of {LAYERS} layers, {len(graph.nodes)} nodes, k={RANKS}, {MEMORY}, "
    text += f"regions in {recomputing} stages"
    return _verdict(text, seconds, PLAN_SECONDS)


def _verdict(text: str, seconds: float, most: float) -> dict[str, Any]:
    answer = "holds" if seconds <= most else "DOES NOT HOLD"
    print(f"{text}: {seconds:.3f} s, at most {most}: {answer}", flush=True)
    return {"what": text, "seconds": round(seconds, 4), "at_most": most}


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
