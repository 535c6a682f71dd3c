"""What do copies of cheap nodes and transfers beside computing change for Llama-3-8B?

    python -m benchmarks.copied_nodes [K …]

Plans it for 8 and 16 stages (or for these K) on H100s by the roofline, with links of 50 GB/s and
10 µs and microbatches of one sequence of 4,096 tokens: with all values relayed, with cheap nodes
copied, and with transfers that loads do not pay for besides. Prints what stages relay for a
microbatch, imbalance and simulated step; writes results/copied_nodes.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.command_line import chosen_names
from pipecompile.api.choices import requested_options
from pipecompile.api.profile import costs_of
from pipecompile.frontend.target import Target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.imbalance import imbalance_of
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Plan, Provenance
from pipecompile.planner.draft import draft

RESULT = Path(__file__).parent / "results" / "copied_nodes.json"
STAGES = ("8", "16")
MICROBATCHES = 16
LINKS = Links.of(Link(bandwidth_bytes_per_s=50 * 10**9, latency_ns=10_000))
COSTS = "roofline:h100"


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    stages = chosen_names(__doc__, "k", STAGES) or STAGES
    graph = llama_costs()
    rows = []
    print(f"{'k':>2} {'values':8} {'comm':8} {'relayed':>10} {'imbalance':>9} {'step':>8}")
    for k in map(int, stages):
        for row in rows_of(graph, k):
            rows.append(row)
            print(
                f"{k:>2} {row['values']:8} {row['comm']:8} {row['relayed_bytes'] / 2**20:6.2f} MiB "
                f"{row['imbalance']:9.4f} {row['step_ns'] / 1e6:5.0f} ms",
                flush=True,
            )
    result = {"torch": torch.__version__, "costs": COSTS, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def llama_costs() -> CostGraph:
    """Return the costs of one sequence of Llama-3-8B in bfloat16, on the meta device."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128_256,
        intermediate_size=14_336,
        num_key_value_heads=8,
        rope_theta=500_000.0,
        max_position_embeddings=8192,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.zeros(1, 4096, dtype=torch.int64)
    target = Target.of((model, {"input_ids": tokens, "labels": tokens}), "Llama-3-8B")
    graph, _ = costs_of(target, requested_options(k=1, costs=COSTS), self_check=False)
    return graph


def rows_of(graph: CostGraph, k: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of the plans of k stages."""
    fixed = replace(graph, nodes=tuple(replace(node, is_copyable=False) for node in graph.nodes))
    for values, costs, comm in (
        ("relayed", fixed, "relay"),
        ("copied", graph, "relay"),
        ("copied", graph, "overlap"),
    ):
        begun = time.process_time()
        options = requested_options(k=k, microbatches=MICROBATCHES, costs=COSTS, comm=comm)
        plan = draft(
            costs,
            options,
            graph_digest="",
            capture=Provenance(verified=False),
            microbatch_shapes=[(1, 4096)],
            links=LINKS,
        )
        yield {
            "k": k,
            "values": values,
            "comm": comm,
            "relayed_bytes": relayed_bytes(plan),
            "copied": len(plan.copied),
            "imbalance": imbalance_of(plan.prediction.loads_ns),
            "max_load_with_transfers_ns": plan.search.values["max_load_ns"],
            "step_ns": plan.prediction.step_ns,
            "seconds": round(time.process_time() - begun, 1),
        }


def relayed_bytes(plan: Plan) -> int:
    """Return what stages relay for one microbatch, summed over the stages."""
    sizes = {tensor.name: tensor.bytes for stage in plan.stages for tensor in stage.outputs}
    return sum((len(route.stages) - 2) * sizes[route.name] for route in plan.routes)


if __name__ == "__main__":
    main()
