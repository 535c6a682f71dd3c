"""Which models of the zoo are captured, and is the capture the model?

    python -m benchmarks.capture [MODEL …]

It compares pipecompile with torch.export, torch.fx and torch.distributed.pipelining. Each of these
ways captures each model in a process of its own, with a time limit, in train mode and with a batch
of 4. The capture then takes two seeded steps: at that batch, at another one, and after `.eval()`.
Outputs, all gradients and all buffers must equal the model's bit for bit. pipecompile is judged at
four more batches. It captures the model a second time for eval mode, and models of language and
vision a third time in bfloat16. The figures also say how the others do with a second capture.

Prints a table; writes results/capture.json and the table in docs/design/capture.md. Models that are
not named keep their figures.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.capture_rivals import RIVALS, differences_of_rival
from benchmarks.command_line import chosen_names
from pipecompile.frontend.capture import capture
from pipecompile.frontend.self_check import check_capture
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from tests.zoo import first
from tests.zoo.decoders import DECODERS
from tests.zoo.diffusion import DIFFUSION
from tests.zoo.judge import BATCHES, by_pipecompile, verdict
from tests.zoo.language import LANGUAGE
from tests.zoo.models import MODELS
from tests.zoo.vision import VISION

RESULT = Path(__file__).parent / "results" / "capture.json"
DOCS = Path(__file__).parents[1] / "docs" / "design" / "capture.md"
MARKS = ("<!-- zoo table: python -m benchmarks.capture -->", "<!-- end -->")
OURS = "pipecompile"
WAYS = (OURS, *RIVALS)
CHECKS = ("train", "batch", "eval")
IN_BFLOAT16 = LANGUAGE | DECODERS | VISION | DIFFUSION
OTHER_BATCH = 2  # at which rivals are judged too
SECONDS = 120.0  # for one way on one model
SIGNS = {"exact": "✓", "wrong": "✗", "refused": "–"}

Row = dict[str, Any]


def main(names: list[str]) -> None:
    """Print and write the figures of these models, or of all."""
    torch.set_num_threads(1)
    # A run of some models must not lose the figures of the others.
    rows = json.loads(RESULT.read_text())["models"] if names and RESULT.exists() else {}
    print(
        f"{'model':18} {'nodes':>5} {'seconds':>7} {'checked':>7}  "
        + " ".join(f"{way:20}" for way in WAYS)
    )
    for name in names or MODELS:
        rows[name] = {way: attempt(way, name) for way in WAYS}
        print(_line(name, rows[name]), flush=True)
    models = {name: rows[name] for name in MODELS if name in rows}
    half = [row[OURS]["bfloat16"] for row in models.values() if "bfloat16" in row[OURS]]
    in_half = f"{OURS} in bfloat16: {half.count('exact')} of {len(half)} exact"
    print("\n".join(["", *totals(models), in_half]))
    result = {"torch": torch.__version__, "batches": BATCHES, "models": models}
    RESULT.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    before, rest = DOCS.read_text().split(MARKS[0])
    DOCS.write_text(f"{before}{MARKS[0]}\n{table(models)}\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


def _line(name: str, row: Row) -> str:
    ours = row[OURS]
    nodes, seconds = ours.get("nodes", "-"), ours.get("seconds", "-")
    figures = f"{nodes:>5} {seconds:>7} {ours.get('seconds_with_check', '-'):>7}"
    return f"{name:18} {figures}  " + " ".join(f"{_cell(row[way]):20}" for way in WAYS)


def _cell(answer: Row) -> str:
    if not answer["captured"]:
        return "not captured"
    return " ".join(SIGNS[answer["checks"][check].partition(":")[0]] for check in CHECKS)


def table(models: dict[str, Row]) -> str:
    """Return the totals and all models as two tables in Markdown."""
    heads = ("model", "nodes", "s", "s with the self-check", "bf16", *WAYS)
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
            "Per model: in training with the batch it was captured at, with another batch, "
            "in eval mode. ✓ bit for bit, ✗ wrong",
            "without an error, – refused with an error. The column bf16 is pipecompile's, in "
            "training.",
            "",
            *_head(heads),
            *rows,
        ]
    )


def _head(names: tuple[str, ...]) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"


def _markdown(name: str, row: Row) -> str:
    figures = [str(row[OURS].get(key, "–")) for key in ("nodes", "seconds", "seconds_with_check")]
    half = row[OURS].get("bfloat16")
    figures.append("" if half is None else SIGNS[half.partition(":")[0]])
    return f"| {' | '.join((name, *figures, *(_cell(row[way]) for way in WAYS)))} |"


def totals(models: dict[str, Row]) -> Iterator[str]:
    """Yield a line with the totals of each way."""
    for way in WAYS:
        yield f"{way:20} " + ", ".join(
            f"{key} {value}" for key, value in _total(models, way).items()
        )


def _total(models: dict[str, Row], way: str) -> dict[str, Any]:
    answers = [row[way] for row in models.values()]
    checks = [answer["checks"] for answer in answers if answer["captured"]]
    exact = {
        check: sum(results.get(check) == "exact" for results in checks)
        for check in (*CHECKS, "eval anew")
    }
    wrong = 0
    for results in checks:
        wrong += any(result.startswith("wrong") for result in results.values())
    # pipecompile captures a model for each mode, so its capture is never switched by `.eval()`.
    after, anew = ("–", exact["eval"]) if way == OURS else (exact["eval"], exact["eval anew"])
    return {
        "captured": f"{len(checks)}/{len(answers)}",
        "train": exact["train"],
        "another batch": exact["batch"],
        "after .eval()": after,
        "captured for eval": anew,
        "silently wrong": wrong,
    }


def attempt(way: str, name: str) -> Row:
    """Return the figures of one way for one model.

    A child measures them, since a capture may crash or take too long.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(sender, way, name))
    child.start()
    sender.close()
    try:
        if receiver.poll(SECONDS):
            answer = receiver.recv()
        else:
            answer = _failed(f"no answer within {SECONDS:.0f} s")
    except EOFError:
        child.join()
        answer = _failed(f"the process ended with code {child.exitcode}")
    child.kill()
    child.join()
    return answer


def _failed(error: str) -> Row:
    return {"captured": False, "error": error}


def _child(sender: Connection, way: str, name: str) -> None:
    # Captures print warnings, also from C++, which would tear the table apart.
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    target = Target.of(MODELS[name](), name)
    try:
        figures = judge_ours(target) if way == OURS else judge_rival(way, target)
        if way == OURS and name in IN_BFLOAT16:
            target = in_bfloat16(Target.of(MODELS[name](), name))
            figures["bfloat16"] = _check(partial(_verdict, target, BATCHES, ("train",)))
        answer = {"captured": True} | figures
    except Exception as error:
        answer = _failed(_one_line(error))
    sender.send(answer)


def judge_ours(target: Target) -> Row:
    """Return the seconds of capture and self-check in train mode, and the results of all checks.

    Each check captures the model anew.
    """
    target.model.train()
    call = first(BATCHES[0], target.call)
    began = time.perf_counter()
    captured = capture(target.model, call)
    module = captured.instantiate(call)
    seconds = time.perf_counter() - began
    check_capture(captured, module, call)
    seconds_with_check = time.perf_counter() - began
    batches_and_modes = {
        "train": (BATCHES[:1], ("train",)),
        "batch": (BATCHES, ("train",)),
        "eval": (BATCHES, ("eval",)),
    }
    return {
        "method": captured.method,
        "notes": [note.text for note in captured.notes],
        "nodes": sum(node.op != "get_attr" for node in module.graph.nodes),
        "seconds": round(seconds, 2),
        "seconds_with_check": round(seconds_with_check, 2),
        "checks": {
            check: _check(partial(_verdict, target, *where))
            for check, where in batches_and_modes.items()
        },
    }


def in_bfloat16(target: Target) -> Target:
    """Return the target with its model, and inputs that are no whole numbers, in that type."""
    target.model.to(torch.bfloat16)
    inputs = target.call.args, target.call.kwargs
    args, kwargs = torch.utils._pytree.tree_map_only(torch.Tensor, _in_bfloat16, inputs)
    return replace(target, call=Arguments(args, kwargs))


def _in_bfloat16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def _verdict(target: Target, batches: tuple[int, ...], modes: tuple[str, ...]) -> list[str]:
    differences = verdict(by_pipecompile, target, batches, modes)
    return [f"{name} ({where})" for where, names in differences.items() for name in names]


def judge_rival(way: str, target: Target) -> Row:
    """Return the figures of a rival: captured in train mode, then switched, then captured anew."""
    model, captured_at = target.model.train(), first(BATCHES[0], target.call)
    began = time.perf_counter()
    rival = RIVALS[way](model, captured_at)
    seconds = time.perf_counter() - began

    def in_eval() -> list[str]:
        rival.module.eval()
        return differences_of_rival(model.eval(), rival, captured_at)

    checks = {
        "train": _check(lambda: differences_of_rival(model, rival, captured_at)),
        "batch": _check(
            lambda: differences_of_rival(model, rival, first(OTHER_BATCH, target.call))
        ),
        "eval": _check(in_eval),
        "eval anew": _check(
            lambda: differences_of_rival(model, RIVALS[way](model.eval(), captured_at), captured_at)
        ),
    }
    return {"seconds": round(seconds, 2), "checks": checks}


def _check(differing: Callable[[], list[str]]) -> str:
    """Return `exact`, `wrong: …` with the first names that differ, or `refused: …`."""
    try:
        names = differing()
    except Exception as error:
        return f"refused: {_one_line(error)}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"wrong: {', '.join(names[:3])}{more}" if names else "exact"


def _one_line(error: Exception) -> str:
    line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {line}"[:300]


if __name__ == "__main__":
    main(chosen_names(__doc__, "model", MODELS))
