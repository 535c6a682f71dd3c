"""Which models of the zoo are captured, and is the capture the model?

    python -m benchmarks.capture [MODEL …]

Ours beside torch.export, torch.fx and torch.distributed.pipelining, each in a process of its own with a time limit.
Captured in train mode with a batch of 4, each takes two seeded steps: at that batch, at another, and after `.eval()`;
outputs, all gradients and all buffers must equal the model's bit for bit. Ours is judged at four more batches, and
captured again for eval mode; how the others fare so is in the figures, too. Prints a table, writes
benchmarks/results/capture.json and the table in docs/design/capture.md; models that are not named keep their figures.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.capture_rivals import RIVALS, judged
from pipecompile.api.target import Target
from pipecompile.frontend.capture import capture
from pipecompile.frontend.self_check import check_capture
from tests.zoo import first
from tests.zoo.judge import BATCHES, by_pipecompile, verdict
from tests.zoo.models import MODELS

RESULT = Path(__file__).parent / "results" / "capture.json"
DOCS = Path(__file__).parents[1] / "docs" / "design" / "capture.md"
MARKS = ("<!-- zoo table: python -m benchmarks.capture -->", "<!-- end -->")
OURS = "pipecompile"
WAYS = (OURS, *RIVALS)
CHECKS = ("train", "batch", "eval")
ANOTHER = 2  # the other batch that rivals are judged at
SECONDS = 120.0  # for one way on one model
SIGNS = {"exact": "✓", "wrong": "✗", "refused": "–"}

Row = dict[str, Any]


def main(names: list[str]) -> None:
    """Prints and writes the figures of these models, or of all."""
    torch.set_num_threads(1)
    kept = json.loads(RESULT.read_text())["models"] if names and RESULT.exists() else {}
    print(
        f"{'model':18} {'nodes':>5} {'seconds':>7} {'checked':>7}  "
        + " ".join(f"{way:20}" for way in WAYS)
    )
    for name in names or MODELS:
        kept[name] = {way: attempt(way, name) for way in WAYS}
        print(_line(name, kept[name]), flush=True)
    models = {name: kept[name] for name in MODELS if name in kept}
    print("\n".join(["", *totals(models)]))
    result = {"torch": torch.__version__, "batches": BATCHES, "models": models}
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    before, rest = DOCS.read_text().split(MARKS[0])
    DOCS.write_text(f"{before}{MARKS[0]}\n{table(models)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


def _line(name: str, row: Row) -> str:
    ours = row[OURS]
    figures = f"{ours.get('nodes', '-'):>5} {ours.get('seconds', '-'):>7} {ours.get('seconds_with_check', '-'):>7}"
    return f"{name:18} {figures}  " + " ".join(f"{_cell(row[way]):20}" for way in WAYS)


def _cell(found: Row) -> str:
    if not found["captured"]:
        return "not captured"
    return " ".join(SIGNS[found["checks"][check].partition(":")[0]] for check in CHECKS)


def table(models: dict[str, Row]) -> str:
    """The totals and all models, in Markdown."""
    heads = ("model", "nodes", "s", "s with the self-check", *WAYS)
    rows = [_markdown(name, row) for name, row in models.items()]
    summary = (
        "way",
        "captured",
        "train",
        "another batch",
        "after `.eval()`",
        "captured for eval",
        "silently wrong",
    )
    return "\n".join(
        [
            *_head(summary),
            *(f"| {' | '.join((way, *map(str, _total(models, way).values())))} |" for way in WAYS),
            "",
            "Per model: in training with the batch it was captured at, with another batch, in eval mode. "
            "✓ bit for bit, ✗ wrong without an error, – refused with an error.",
            "",
            *_head(heads),
            *rows,
        ]
    )


def _head(names: tuple[str, ...]) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"


def _markdown(name: str, row: Row) -> str:
    figures = [str(row[OURS].get(key, "–")) for key in ("nodes", "seconds", "seconds_with_check")]
    return f"| {' | '.join((name, *figures, *(_cell(row[way]) for way in WAYS)))} |"


def totals(models: dict[str, Row]) -> Iterator[str]:
    """A line for each way."""
    for way in WAYS:
        yield f"{way:20} " + ", ".join(
            f"{key} {value}" for key, value in _total(models, way).items()
        )


def _total(models: dict[str, Row], way: str) -> dict[str, Any]:
    found = [row[way] for row in models.values()]
    checks = [one["checks"] for one in found if one["captured"]]
    exact = {
        check: sum(one.get(check) == "exact" for one in checks) for check in (*CHECKS, "eval anew")
    }
    wrong = sum(any(answer.startswith("wrong") for answer in one.values()) for one in checks)
    # Ours is captured for each mode; it is not switched afterwards.
    after, anew = ("–", exact["eval"]) if way == OURS else (exact["eval"], exact["eval anew"])
    return {
        "captured": f"{len(checks)}/{len(found)}",
        "train": exact["train"],
        "another batch": exact["batch"],
        "after .eval()": after,
        "captured for eval": anew,
        "silently wrong": wrong,
    }


def attempt(way: str, name: str) -> Row:
    """One way on one model in a child, which may take too long or crash."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, way, name))
    child.start()
    sender.close()
    try:
        found = (
            receiver.recv()
            if receiver.poll(SECONDS)
            else _failed(f"no answer within {SECONDS:.0f} s")
        )
    except EOFError:
        child.join()
        found = _failed(f"the process ended with code {child.exitcode}")
    child.kill()
    child.join()
    return found


def _failed(error: str) -> Row:
    return {"captured": False, "error": error}


def _child(sender: Connection, way: str, name: str) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    target = Target.of(MODELS[name](), name)
    try:
        found = {"captured": True} | (ours(target) if way == OURS else rivalled(way, target))
    except Exception as error:
        found = _failed(_described(error))
    sender.send(found)


def ours(target: Target) -> Row:
    """Our capture and its self-check in train mode, and the verdict at all batches in both modes."""
    target.model.train()
    call = first(BATCHES[0], target.call)
    began = time.perf_counter()
    found = capture(target.model, call)
    module = found.instantiate(call)
    seconds = time.perf_counter() - began
    check_capture(found, module, call)
    checked = time.perf_counter() - began
    parts = {
        "train": (BATCHES[:1], ("train",)),
        "batch": (BATCHES, ("train",)),
        "eval": (BATCHES, ("eval",)),
    }
    return {
        "method": found.method,
        "notes": [note.text for note in found.notes],
        "nodes": sum(node.op != "get_attr" for node in module.graph.nodes),
        "seconds": round(seconds, 2),
        "seconds_with_check": round(checked, 2),
        "checks": {
            part: _check(partial(_verdict, target, *where)) for part, where in parts.items()
        },
    }


def _verdict(target: Target, batches: tuple[int, ...], modes: tuple[str, ...]) -> list[str]:
    found = verdict(by_pipecompile, target, batches, modes)
    return [f"{name} ({where})" for where, names in found.items() for name in names]


def rivalled(way: str, target: Target) -> Row:
    """A rival's capture in train mode, the same after `.eval()`, and another in eval mode."""
    model, captured_at = target.model.train(), first(BATCHES[0], target.call)
    began = time.perf_counter()
    rival = RIVALS[way](model, captured_at)
    seconds = time.perf_counter() - began

    def in_eval() -> list[str]:
        rival.module.eval()
        return judged(model.eval(), rival, captured_at)

    checks = {
        "train": _check(lambda: judged(model, rival, captured_at)),
        "batch": _check(lambda: judged(model, rival, first(ANOTHER, target.call))),
        "eval": _check(in_eval),
        "eval anew": _check(
            lambda: judged(model, RIVALS[way](model.eval(), captured_at), captured_at)
        ),
    }
    return {"seconds": round(seconds, 2), "checks": checks}


def _check(differing: Callable[[], list[str]]) -> str:
    """`exact`, `wrong: …` or `refused: …`."""
    try:
        names = differing()
    except Exception as error:
        return f"refused: {_described(error)}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"wrong: {', '.join(names[:3])}{more}" if names else "exact"


def _described(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:300]


if __name__ == "__main__":
    main(sys.argv[1:])
