"""How far are interpolated costs from measured ones, for a size of microbatches in between?

    python -m benchmarks.microbatch_sizes

A GPT-2 of the small one's widths, with 4 of its 12 layers (equal blocks are measured once), 128
tokens a sample, is measured at 1, 2, 4 and 8 samples a microbatch. Each size that lies between
others is then interpolated, by the line through two of them, and compared with what was measured.
So are two others: the rule that a time is in proportion to the samples, and the same size measured
again, since no prediction can be nearer than that. The machine may be busy with other work: what
counts are medians of ratios over the distinct times of nodes, all of one run, and sums.

Prints a table; writes results/microbatch_sizes.json.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers

from benchmarks.command_line import no_arguments
from examples.models import token_loss
from pipecompile.api.choices import requested_options
from pipecompile.api.model_costs import ModelCosts
from pipecompile.cost_models.interpolation import interpolated_costs
from pipecompile.frontend.target import Target
from pipecompile.ir.graph import CostGraph, Node

BATCH, TOKENS = 8, 128
SIZES = (1, 2, 4, 8)
CASES = ((2, (1, 4)), (2, (1, 8)), (4, (2, 8)), (4, (1, 8)))
"""Each a size, and the two measured sizes by which it is interpolated."""
RULES = ("interpolated", "in proportion", "measured again")
SHORTEST_NS = 20_000  # shorter calls take what Python takes, whatever their size
RESULT = Path(__file__).parent / "results" / "microbatch_sizes.json"


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    graphs = {size: _measured(size) for size in SIZES}
    again = {size: _measured(size) for size in {size for size, _ in CASES}}
    rows = [_row(graphs, again[size], size, known) for size, known in CASES]
    print(f"{'samples':>7} {'from':>7} {'times':>5}", *(f"{rule:>30}" for rule in RULES))
    for row in rows:
        texts = (f"{_text(row[rule]):>30}" for rule in RULES)
        print(f"{row['samples']:>7} {row['from']!s:>7} {row['times']:>5}", *texts)
    totals = {size: sum(_times(graph).values()) for size, graph in graphs.items()}
    result = {"torch": torch.__version__, "total_ns": totals, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _gpt2() -> dict[str, Any]:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=4, use_cache=False)
    tokens = torch.randint(0, config.vocab_size, (BATCH, TOKENS + 1))
    return {
        "model": transformers.GPT2LMHeadModel(config),
        "sample_input": {"input_ids": tokens[:, :-1].contiguous()},
        "targets": tokens[:, 1:].contiguous(),
        "loss_fn": token_loss,
    }


def _measured(size: int) -> CostGraph:
    """Return the cost graph of a size, measured anew."""
    costs = ModelCosts(Target.of(_gpt2(), "GPT-2"), "recorded")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PIPECOMPILE_CACHE"] = folder
        return costs.graph(requested_options(k=2, microbatches=BATCH // size, costs="measured"))


def _row(
    graphs: Mapping[int, CostGraph], again: CostGraph, size: int, known: tuple[int, int]
) -> dict[str, Any]:
    """Return how far times are off for one size, by each rule."""
    measured = _times(graphs[size])
    between = interpolated_costs({each: graphs[each] for each in known}, size)
    larger = graphs[known[1]].by_name
    times: dict[str, list[float]] = {rule: [] for rule in RULES}
    for name, field in measured:
        times["interpolated"].append(getattr(between[name], field))
        times["in proportion"].append(getattr(larger[name], field) * size / known[1])
        times["measured again"].append(getattr(again.by_name[name], field))
    errors = {rule: _errors(times[rule], list(measured.values())) for rule in RULES}
    return {"samples": size, "from": known, "times": len(measured), **errors}


def _errors(predicted: Sequence[float], measured: Sequence[int]) -> dict[str, float]:
    """Return the median of predicted over measured and of its distance from 1, and the ratio of
    the sums.
    """
    ratios = [one / other for one, other in zip(predicted, measured, strict=True)]
    return {
        "median_ratio": round(median(ratios), 3),
        "median_error": round(median(abs(each - 1) for each in ratios), 3),
        "ratio_of_sums": round(sum(predicted) / sum(measured), 3),
    }


def _times(graph: CostGraph) -> dict[tuple[str, str], int]:
    """Return the distinct times of nodes by name and field; equal blocks share theirs."""
    times: dict[tuple[str, str], int] = {}
    for node in graph.nodes:
        for field in _fields(node):
            time_ns = getattr(node, field)
            if time_ns >= SHORTEST_NS and time_ns not in times.values():
                times[node.name, field] = time_ns
    return times


def _fields(node: Node) -> Iterator[str]:
    yield "forward_ns"
    yield from (
        field
        for field in ("backward_ns", "backward_input_ns", "backward_weight_ns")
        if getattr(node, field)
    )


def _text(errors: Mapping[str, float]) -> str:
    return (
        f"{errors['median_ratio']:.2f}, error {errors['median_error']:.0%}, "
        f"sum {errors['ratio_of_sums']:.2f}"
    )


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
