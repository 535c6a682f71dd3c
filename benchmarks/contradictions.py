"""Is the answer to an open choice ever worse than one that is named? Llama-3-8B on 8 devices.

    python -m benchmarks.contradictions [SETTING …] [--thorough] [--graphs FOLDER]

A step of 64 × 4,096 tokens is cut for 8 H100 of 80 GiB with AdamW and master weights: over 1, 2 or
4 replicas, in microbatches of 1, 2, 4 or 8 sequences, which are eleven settings (`1x8x2` is one
replica of 8 ranks, two sequences a microbatch). Each is planned with every named order and with
`search`, with one stage a rank and with two, and under every policy and `auto`: by quick searches,
as those of a joint search are, or by thorough ones. The promises hold for both. Nothing runs: the
model lies on the meta device, and is captured once for each size of a microbatch. Cost graphs are
kept in FOLDER.

Prints the step and the CPU seconds of each, then each open choice that is worse than a named one,
and writes results/contradictions.json after each setting, in which settings that are not planned
again stay. Exits with status 1 if there is any.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command_line import parser_of
from pipecompile.api.choices import requested_options
from pipecompile.errors import PipecompileError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import RECOMPUTES, Plan, Provenance
from pipecompile.ir.serialization import encode, read, write
from pipecompile.partition.budget import QUICK, THOROUGH, CutEffort
from pipecompile.planner.draft import draft

RESULT = Path(__file__).parent / "results" / "contradictions.json"
GRAPHS = Path(__file__).parent / ".cache"
DEVICES, SEQUENCES, TOKENS = 8, 64, 4096
ONE_STAGE = ("gpipe", "1f1b", "zb-h1", "zb-h2", "search")
TWO_STAGES = ("zb-v", "v-half", "v-min", "interleaved-1f1b", "search")


class Order(NamedTuple):
    """A schedule, and the stages of each rank."""

    schedule: str
    stages_per_rank: int


ORDERS = [
    *(Order(schedule, 1) for schedule in ONE_STAGE),
    *(Order(schedule, 2) for schedule in TWO_STAGES),
]


class Setting(NamedTuple):
    """Replicas, the ranks of each, and the sequences of a microbatch."""

    replicas: int
    ranks: int
    sequences: int

    @staticmethod
    def of(text: str) -> Setting:
        """Return the setting that is written as 2x4x1."""
        return Setting(*map(int, text.split("x")))

    @property
    def microbatches(self) -> int:
        """The microbatches of each replica."""
        return SEQUENCES // self.replicas // self.sequences

    def __str__(self) -> str:
        return "x".join(map(str, self))


SETTINGS = [
    Setting(replicas, DEVICES // replicas, sequences)
    for replicas in (1, 2, 4)
    for sequences in (1, 2, 4, 8)
    if replicas * sequences < 32
]


def graph_of(sequences: int, folder: Path) -> CostGraph:
    """Return the cost graph of Llama-3-8B for a microbatch of so many sequences."""
    path = folder / f"llama-3-8b-{sequences}.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write(path, encode(_captured(sequences)))
    return read(path, CostGraph)


def _captured(sequences: int) -> CostGraph:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from pipecompile.api.costs import cost_graph
    from pipecompile.api.options import options_for
    from pipecompile.frontend.target import Target
    from pipecompile.frontend.target_capture import capture_target

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            rope_theta=500000.0,
            max_position_embeddings=8192,
            use_cache=False,
        )
        model, tokens = LlamaForCausalLM(config), torch.zeros(sequences, TOKENS, dtype=torch.int64)
    target = Target.of((model, {"input_ids": tokens, "labels": tokens}), "llama-3-8b")
    options = options_for(target, k=1, microbatches=1, costs="roofline:h100")
    captured = capture_target(target, options, verify=False)
    return cost_graph(target, options.costs, options.microbatches, captured)


def planned(
    graph: CostGraph, setting: Setting, order: Order, recompute: str, effort: CutEffort
) -> Plan | str:
    """Return the plan of a setting, or why there is none."""
    try:
        options = requested_options(
            k=setting.ranks * order.stages_per_rank,
            stages_per_rank=order.stages_per_rank,
            replicas=setting.replicas,
            microbatches=setting.microbatches,
            schedule=order.schedule,
            recompute=recompute,
            memory="80GiB",
            optimizer="adamw",
            master_weights=True,
            costs="roofline:h100",
        )
        return draft(
            graph,
            options,
            graph_digest="",
            capture=Provenance(verified=False),
            microbatch_shapes=[(setting.sequences, TOKENS)],
            effort=effort,
        )
    except PipecompileError as error:
        return str(error)


def rows_of(setting: Setting, folder: Path, effort: CutEffort) -> Iterator[dict[str, Any]]:
    """Yield a row for each order and policy of a setting."""
    graph = graph_of(setting.sequences, folder)
    for order in ORDERS:
        for recompute in RECOMPUTES:
            began = time.process_time()
            plan = planned(graph, setting, order, recompute, effort)
            row: dict[str, Any] = {
                "setting": str(setting),
                "schedule": order.schedule,
                "stages_per_rank": order.stages_per_rank,
                "recompute": recompute,
                "cpu_seconds": round(time.process_time() - began, 1),
            }
            if isinstance(plan, str):
                yield row | {"refused": plan}
            else:
                step_ms = plan.prediction.step_ns / 1e6
                yield row | {"step_ms": round(step_ms, 1), "order": plan.schedule.name}


def contradictions(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield each open choice of a setting that is worse than a named one."""
    for row in rows:
        for other in rows:
            if _is_named_by(row, other) and _step(row) > _step(other):
                yield f"{_text(row)}, but {_text(other)}"


def _is_named_by(row: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether the other row names what one leaves open, and is equal in the rest."""
    return all(
        row[key] in (value, other[key])
        for key, value in (
            ("setting", None),
            ("schedule", "search"),
            ("recompute", "auto"),
            ("stages_per_rank", None),
        )
    )


def _step(row: dict[str, Any]) -> float:
    return row.get("step_ms", inf)


def _text(row: dict[str, Any]) -> str:
    step = f"{row['step_ms']} ms" if "step_ms" in row else "no plan"
    return (
        f"{row['setting']} {row['schedule']} × {row['stages_per_rank']} {row['recompute']}: {step}"
    )


def main() -> int:
    """Plan the settings that the command line names, or all of them."""
    parser = parser_of(__doc__)
    parser.add_argument("settings", nargs="*", type=Setting.of, default=SETTINGS)
    parser.add_argument("--thorough", action="store_true")
    parser.add_argument("--graphs", type=Path, default=GRAPHS)
    arguments = parser.parse_args()
    effort = THOROUGH._replace(is_explained=False) if arguments.thorough else QUICK
    rows = known_rows(thorough=arguments.thorough)
    for setting in arguments.settings:
        planned_rows = []
        for row in rows_of(setting, arguments.graphs, effort):
            print(*row.values(), sep="  ", flush=True)
            planned_rows.append(row)
        rows = [row for row in rows if row["setting"] != str(setting)] + planned_rows
        print(*contradictions(planned_rows), sep="\n", flush=True)
        found = list(contradictions(rows))
        result = {"thorough": arguments.thorough, "rows": rows, "contradictions": found}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if any(contradictions(rows)) else 0


def known_rows(*, thorough: bool) -> list[dict[str, Any]]:
    """Return the rows that the file has, if its searches were as thorough."""
    known = json.loads(RESULT.read_text()) if RESULT.exists() else {"thorough": None}
    rows: list[dict[str, Any]] = known["rows"] if known["thorough"] == thorough else []
    return rows


if __name__ == "__main__":
    sys.exit(main())
