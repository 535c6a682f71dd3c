"""What does it cost to fit into less memory, by every policy, and are the predicted peaks right?

    python -m benchmarks.recompute

First a sweep: the cap falls from the peak without recompute to 15 % of it, with 1, 4 and 8
microbatches in flight. The stages are four blocks of a GPT (2048 channels, 16 heads, one sequence
of 2048, bfloat16, fused attention) in the middle of more, ResNet-50 (32 images of 224 × 224) and a
U-Net (8 images of 256 × 256). Costs are those of an H100's roofline; nothing is allocated. Prints
the extra compute of every policy in % of a forward, beside a lower bound for all regions that fit,
and whether the targets for the GPT blocks are met.

Then regions chosen for smaller models run in this process: prints the peak of torch's CPU allocator
beside the predicted one. Writes results/recompute.json.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import recompute_peaks
from benchmarks.command_line import no_arguments
from benchmarks.recompute_stages import COSTS, STAGES, CostedStage, held_bytes

RESULT = Path(__file__).parent / "results" / "recompute.json"
IN_FLIGHT = (1, 4, 8)
CAPS = (100, 90, 80, 70, 60, 50, 40, 30, 20, 15)  # % of the peak without recompute


def main() -> None:
    """Print and write the tables."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    rows, targets = [], []
    for name, make in STAGES.items():
        stage = make()
        for in_flight in IN_FLIGHT:
            rows += list(_sweep(name, stage, in_flight))
        if name == "4 GPT blocks":
            targets = list(_targets(stage))
    peaks = [row for name in recompute_peaks.MODELS for row in recompute_peaks.peaks(name)]
    result = {
        "torch": torch.__version__,
        "costs": COSTS,
        "sweep": rows,
        "targets": targets,
        "peaks": peaks,
    }
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


def _sweep(name: str, stage: CostedStage, in_flight: int) -> Iterator[dict[str, Any]]:
    """Print and yield a row for each cap."""
    policies = stage.without_cap(in_flight)
    everything, _ = policies["none"]
    print(f"\n{name}, {len(stage.nodes)} nodes, {in_flight} in flight:", end=" ")
    print(f"the peak without recompute is {everything / 2**20:,.0f} MiB;", end=" ")
    print(f"extra compute in % of a forward ({stage.forward_ns / 1e6:.2f} ms)")
    header = "".join(f"{policy:>13}" for policy in (*policies, "ours", "bound"))
    print(f"{'cap':>7} {'MiB':>8}{header}  regions")
    for percent in CAPS:
        available = everything * percent // 100
        began = time.perf_counter()
        choice, bound = stage.ours(in_flight, available)
        seconds = time.perf_counter() - began
        spent: dict[str, int | None] = {}
        for policy, (peak_bytes, ns) in policies.items():
            spent[policy] = ns if peak_bytes <= available else None
        spent |= {"ours": choice and choice.ns, "bound": bound}
        extra = {policy: _percent_of_forward(stage, ns) for policy, ns in spent.items()}
        regions = "" if choice is None else len(choice.regions)
        cells = "".join(map(_cell, extra.values()))
        print(f"{percent:6} % {available / 2**20:8,.0f}{cells}  {regions}", flush=True)
        yield {
            "stage": name,
            "in_flight": in_flight,
            "cap_percent": percent,
            "cap_bytes": available,
            "extra_percent": extra,
            "seconds": round(seconds, 3),
        }


def _percent_of_forward(stage: CostedStage, ns: int | None) -> float | None:
    return None if ns is None else round(100 * ns / stage.forward_ns, 2)


def _cell(extra_percent: float | None) -> str:
    return f"{'does not fit':>13}" if extra_percent is None else f"{extra_percent:11.1f} %"


def _targets(stage: CostedStage) -> Iterator[dict[str, Any]]:
    """Print and yield whether the targets for the GPT blocks are met.

    The first three give as much memory as recomputing whole stages takes and limit the extra
    compute in % of theirs. The others give a share of what the stage holds without recompute, once
    of its activations and once of its peak, and limit the extra compute in % of a forward.
    """
    print("\nTargets for the GPT blocks:")
    whole_stage, nothing = stage.policies["whole stage"], stage.policies["none"]
    for in_flight, most in ((1, 5), (4, 65), (8, 85)):
        choice, bound = stage.ours(in_flight, held_bytes(whole_stage, in_flight))
        share, least = (
            None if ns is None else 100 * ns / whole_stage.ns
            for ns in (choice and choice.ns, bound)
        )
        text = f"{in_flight} in flight, whole-stage recompute's peak: % of its extra compute"
        yield _verdict(text, share, most, least)
    for percent, most in ((80, 6), (60, 20)):
        kept = 4 * nothing.kept * percent // 100
        caps = {
            "the activations that saving everything keeps": kept + nothing.peak - nothing.kept,
            "its peak, with gradients and workspace": held_bytes(nothing, 4) * percent // 100,
        }
        for what, available in caps.items():
            choice, bound = stage.ours(4, available)
            text = f"4 in flight, {percent} % of {what}: % of a forward"
            extra = _percent_of_forward(stage, choice and choice.ns)
            yield _verdict(text, extra, most, _percent_of_forward(stage, bound))


def _verdict(
    text: str, got: float | None, most: float, least: float | None = None
) -> dict[str, Any]:
    """Print and return whether `got` is at most `most`; `least` is a lower bound on it."""
    figure = "does not fit" if got is None else f"{got:.1f}"
    answer = "holds" if got is not None and got <= most else "DOES NOT HOLD"
    proof = "" if least is None else f" (no regions take less than {least:.1f})"
    print(f"  {text}: {figure}, at most {most}: {answer}{proof}")
    return {
        "what": text,
        "got": None if got is None else round(got, 2),
        "at_most": most,
        "bound": least,
    }


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
