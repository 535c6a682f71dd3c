"""The README's picture: one model on four ranks, cut by hand and by pipecompile, both simulated.

    python docs/images/make_timelines.py

It plans with the command line, prints the figures of every plan, and writes
docs/images/timelines.svg. Nothing runs on a GPU: the model lies on the meta device, and times are
those of `roofline:h100`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

LAYERS, RANKS, MICROBATCHES = 16, 4, 8
PICTURE = Path(__file__).with_name("timelines.svg")
LINKS = {
    "schema": "pipecompile/links/1",
    "bandwidth_bytes_per_s": 25_000_000_000,
    "latency_ns": 10_000,
}

WIDTH, LEFT, RIGHT, ROW, BAR = 1000, 76, 24, 30, 24
INK, PALE = "#1f2328", "#59636e"
COLOURS = {"F": "#4f83cc", "B": "#d2741f", "I": "#d2741f", "W": "#6aa56b"}
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def llama() -> dict[str, Any]:
    """A Llama with the shapes of Llama 3.2 1B and an untied head, 8 × 2048 tokens, no values."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=LAYERS,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        use_cache=False,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(MICROBATCHES, 2048, dtype=torch.int64)
    batch = {"input_ids": tokens}
    return {
        "model": model,
        "sample_input": batch,
        "targets": tokens,
        "loss_fn": token_loss,
        "optimizer": "adamw",
    }


def token_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the logits."""
    return torch.nn.functional.cross_entropy(
        output["logits"].flatten(0, 1).float(), target.flatten()
    )


def by_hand() -> list[str]:
    """As many layers on each rank; the embedding with the first, the head with the last."""
    share = LAYERS // RANKS
    chosen: list[str] = []
    for rank in range(RANKS):
        modules = [f"model.layers.{rank * share + index}" for index in range(share)]
        chosen += ["--no-split", ",".join(modules + ["lm_head"] * (rank == RANKS - 1))]
    return chosen


def pipecompile(*arguments: str) -> str:
    """What the command prints on standard output."""
    command = [sys.executable, "-m", "pipecompile", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def planned(
    folder: Path, schedule: str, *choices: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A plan, and the events of its simulated step."""
    plan, links, trace = folder / "plan.json", folder / "links.json", folder / "trace.json"
    links.write_text(json.dumps(LINKS))
    shape = ("-k", str(RANKS), "--microbatches", str(MICROBATCHES), "--schedule", schedule)
    fixed = ("--costs", "roofline:h100", "--links", str(links), "-o", str(plan))
    pipecompile("plan", f"{__file__}:llama", *shape, *fixed, *choices)
    pipecompile("simulate", str(plan), "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return json.loads(plan.read_text()), [event for event in events if event["ph"] == "X"]


def figures(title: str, plan: dict[str, Any]) -> str:
    """One line for people."""
    predicted = plan["prediction"]
    step, idle = predicted["step_ns"] / 1e6, predicted["bubble"]
    memory = f"at most {peak_gib(plan):.1f} GiB on a rank"
    return f"{title}: step {step:.1f} ms, {idle:.0%} of the time idle, {memory}"


def peak_gib(plan: dict[str, Any]) -> float:
    """What the fullest rank is expected to hold."""
    return (
        max(
            sum(kind["expected"] for kind in rank.values()) for rank in plan["prediction"]["memory"]
        )
        / 2**30
    )


def timeline(
    top: int, title: str, plan: dict[str, Any], events: list[dict[str, Any]], span_us: float
) -> Iterator[str]:
    """One step: a heading, and a row for each rank."""
    scale = (WIDTH - LEFT - RIGHT) / span_us
    step = plan["prediction"]["step_ns"] / 1e3
    yield text(20, top, title, size=15, weight=600)
    yield text(WIDTH - RIGHT, top, f"{step / 1e3:.1f} ms", size=15, weight=600, anchor="end")
    for rank in range(RANKS):
        y = top + 14 + rank * ROW
        yield text(20, y + 17, f"rank {rank}", colour=PALE)
        size = f'width="{step * scale:.2f}" height="{BAR}"'
        yield f'<rect x="{LEFT}" y="{y}" {size} fill="{INK}" fill-opacity="0.06"/>'
    for event in events:
        x, width = LEFT + event["ts"] * scale, event["dur"] * scale
        y, kind = top + 14 + event["pid"] * ROW, event["name"].lstrip("0123456789")[0]
        size = f'width="{width - 0.8:.2f}" height="{BAR}"'
        yield f'<rect x="{x + 0.4:.2f}" y="{y}" {size} fill="{COLOURS[kind]}"/>'
        if width > 11:
            number = str(event["args"]["microbatch"])
            yield text(x + width / 2, y + 16, number, anchor="middle", colour="#ffffff", size=11)


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    weight: int = 400,
    colour: str = INK,
    anchor: str = "start",
) -> str:
    """One line of text."""
    place = f'x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="{size}" font-weight="{weight}" fill="{colour}">{words}</text>'


def legend(top: int, words: str) -> Iterator[str]:
    """What the colours are."""
    x = LEFT
    for name, kind in (
        ("forward", "F"),
        ("backward (of inputs, where split)", "B"),
        ("backward of weights", "W"),
    ):
        yield f'<rect x="{x}" y="{top - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield text(x + 18, top, name, colour=PALE)
        x += 44 + round(6.1 * len(name))
    yield text(WIDTH - RIGHT, top, words, colour=PALE, anchor="end")


def picture(before: tuple[Any, ...], after: tuple[Any, ...]) -> str:
    """Both steps, one below the other, on one scale of time."""
    span_us = max(plan["prediction"]["step_ns"] for _, plan, _ in (before, after)) / 1e3
    gap = 14 + RANKS * ROW + 34
    height = 36 + 2 * gap + 18
    body = [
        *timeline(36, *before, span_us),
        *timeline(36 + gap, *after, span_us),
        *legend(height - 22, "numbers: microbatches; grey: a rank waits"),
    ]
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {size}'
    backdrop = f'<rect width="{WIDTH}" height="{height}" rx="10" fill="#fbfbfa" stroke="#d9d9d6"/>'
    return "\n".join([f'{opening} font-family="{FONT}" role="img">', backdrop, *body, "</svg>\n"])


def main() -> None:
    """Plan, print, draw."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        gpipe, early = planned(folder, "gpipe", *by_hand())
        one_each, _ = planned(folder, "1f1b", *by_hand())
        balanced, _ = planned(folder, "1f1b")
        searched, late = planned(folder, "search")
    print(figures("4 layers on each rank, GPipe", gpipe))
    print(figures("4 layers on each rank, 1F1B", one_each))
    print(figures("pipecompile's cut, 1F1B", balanced))
    print(figures("pipecompile's cut, searched order", searched))
    before = ("Before: four layers on each rank, GPipe", gpipe, early)
    after = ("After: the cut and the order that pipecompile finds", searched, late)
    PICTURE.write_text(picture(before, after))


if __name__ == "__main__":
    main()
