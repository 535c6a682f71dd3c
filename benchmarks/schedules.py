"""How good are our schedules, do they reproduce published ones, and how long do they take?

    python -m benchmarks.schedules [instances] [table-5] [placements] [scale]

All are simulated by the same rules in the same run. Instances are problems with a best known makespan: ours may be
0.5 % above it at most, above no named schedule that fits, and take 10 s; that is checked. Seconds are of this
process on one processor, so that others on the machine do not count. Writes benchmarks/results/schedules.json; groups
that are not run keep their figures.
"""

from __future__ import annotations

import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pipecompile.ir.schedule_problem import ScheduleProblem
from pipecompile.ir.serialization import read
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named import generate
from pipecompile.schedule.placement import place
from pipecompile.schedule.problem import PlacedProblem, StageCosts, placed_problem
from pipecompile.schedule.search import NamedResult, SearchResult, best_named, search
from pipecompile.schedule.simulator import simulate
from pipecompile.schedule.transfers import add_transfers

ROOT = Path(__file__).parents[1]
INSTANCES = ROOT.parent / "shared" / "instances" / "schedule"
TABLE_5 = ROOT / "tests" / "golden" / "zero_bubble_table5.json"
RESULT = Path(__file__).parent / "results" / "schedules.json"
SECONDS = 5.0  # of work
ALLOWED_SECONDS = 10.0
ALLOWED_OVER_KNOWN = 1.005
NAMED = {"1F1B": "1f1b", "1F1B-I": "interleaved-1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
SEARCHED = {
    "ZB-1p": 2,
    "ZB-2p": 4,
}  # units of memory for each rank, where a forward takes 2 and half a backward leaves 1
SCALE = (64, 512)  # ranks, microbatches

Row = dict[str, Any]
T = TypeVar("T")


def main(names: list[str]) -> None:
    """Prints and writes the tables of these groups, or of all."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result |= {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "seconds_of_work": SECONDS,
    }
    for name in names or list(GROUPS):
        result[name] = GROUPS[name]() or result.get(name, [])
        RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    violations = [
        text
        for name in names or GROUPS
        for row in result[name]
        for text in row.get("violations", ())
    ]
    if violations:
        raise SystemExit("\n".join(violations))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    return work(), round(time.process_time() - began, 2)


def instances() -> list[Row]:
    """Named and searched makespans over the lower bound; what does not fit in memory is in brackets."""
    print("\ninstances: makespan over the lower bound, (too much memory)")
    print(f"{'':26} {'bound ms':>8} {'searched':>8} {'known':>7} {'seconds':>7}  named")
    rows = []
    for name, problem, best in _published():
        rows.append(row := _compare(name, problem, best))
        figures = f"{row['bound_ns'] / 1e6:8.2f} {row['searched']:8.4f} {row['best_known']:7.4f} {row['seconds']:7.1f}"
        named = " ".join(
            _cell(other, entry["ratio"], entry["fits"]) for other, entry in row["named"].items()
        )
        print(f"{name:26} {figures}  {named}", flush=True)
    return rows


def _published() -> Iterator[tuple[str, PlacedProblem, int]]:
    known = INSTANCES / "best_known.json"
    if not known.exists():
        print("the schedule instances are not here; skipped")
        return
    for name, best in json.loads(known.read_text())["cases"].items():
        yield (
            name,
            placed_problem(read(INSTANCES / f"{name}.json", ScheduleProblem)),
            best["best_found_ns"],
        )


@cache
def _solved(problem: PlacedProblem) -> tuple[SearchResult, float]:
    return _timed(lambda: search(problem, seconds=SECONDS))


def _compare(name: str, problem: PlacedProblem, known: int) -> Row:
    found, seconds = _solved(problem)
    best = best_named(found.named)
    return {
        "name": name,
        "bound_ns": found.bound_ns,
        "searched_ns": found.value_ns,
        "searched": round(found.value_ns / found.bound_ns, 4),
        "best_known": round(known / found.bound_ns, 4),
        "named": {order.schedule.name: _entry(order, found) for order in found.named},
        "seconds": seconds,
        "violations": list(_violations(name, found, best, known, seconds)),
    }


def _entry(order: NamedResult, found: SearchResult) -> Row:
    return {"ratio": round(order.value_ns / found.bound_ns, 4), "fits": order.fits}


def _violations(
    name: str, found: SearchResult, best: NamedResult | None, known: int, seconds: float
) -> Iterator[str]:
    if best is not None and found.value_ns > best.value_ns:
        yield f"{name}: searched {found.value_ns}, but {best.schedule.name} has {best.value_ns}"
    if found.value_ns > known * ALLOWED_OVER_KNOWN:
        yield f"{name}: searched {found.value_ns}, but {known} is known"
    if found.value_ns < found.bound_ns:
        yield f"{name}: searched {found.value_ns}, below the bound {found.bound_ns}"
    if seconds > ALLOWED_SECONDS:
        yield f"{name}: {seconds} s"


def _cell(name: str, ratio: float, fits: bool) -> str:
    return f"{name} {ratio:.3f}" if fits else f"({name} {ratio:.3f})"


def table_5() -> list[Row]:
    """Bubble rates of the Zero Bubble paper, by its metric: of the largest span of a rank."""
    print("\ntable 5 of Zero Bubble (arXiv 2401.10241): bubble rate, published | ours | difference")
    print(f"{'':16} " + " ".join(f"{label:>23}" for label in (*NAMED, *SEARCHED)))
    rows = []
    for setting in json.loads(TABLE_5.read_text())["rows"]:
        ours, published = dict(_rates(setting)), setting["published"]
        rows.append(
            {key: setting[key] for key in ("model", "p", "m")}
            | {"published": published, "ours": ours}
        )
        cells = (
            f"{published[label]:.4f} {ours[label]:.4f} {ours[label] - published[label]:+.4f}"
            for label in ours
        )
        print(
            f"{setting['model']:6} {setting['p']:4} {setting['m']:4} "
            + " ".join(f"{c:>23}" for c in cells),
            flush=True,
        )
    return rows


def _rates(setting: Row) -> Iterator[tuple[str, float]]:
    for label, name in NAMED.items():
        problem = _of_table_5(setting, setting["chunks"] if label == "1F1B-I" else 1)
        schedule = generate(name, problem.placement, problem.microbatches)
        yield label, _bubble_rate(setting, simulate(problem, schedule).span_ns)
    problem = _of_table_5(setting, 1)
    for label, units in SEARCHED.items():
        capped = replace(problem, caps=(units * problem.ranks,) * problem.ranks)
        yield (
            label,
            _bubble_rate(setting, search(capped, objective="span", seconds=SECONDS).value_ns),
        )


def _of_table_5(setting: Row, chunks: int) -> PlacedProblem:
    """Times in ns; those of a rank are divided over its chunks."""
    forward, inputs, weights, hop = (
        round(setting[key] * 1e6) for key in ("TF", "TB", "TW", "Tcomm")
    )
    times = (forward // chunks, (inputs + weights) // chunks, inputs // chunks, weights // chunks)
    costs = StageCosts(*times, kept_bytes=2, between_bytes=1)
    return _linked(
        place("loop", setting["p"], chunks), setting["m"], [costs] * (setting["p"] * chunks), hop
    )


def _linked(
    placement: tuple[int, ...], microbatches: int, costs: Sequence[StageCosts], hop: int
) -> PlacedProblem:
    hops = (hop,) * (len(placement) - 1)
    return PlacedProblem(
        placement, microbatches, tuple(costs), hops, hops, gradient=(True,) * len(hops)
    )


def _bubble_rate(setting: Row, span_ns: int) -> float:
    useful = setting["m"] * sum(setting[key] for key in ("TF", "TB", "TW"))
    return round(1 - useful * 1e6 / span_ns, 4)


def placements() -> list[Row]:
    """Which placement is best for the same kind of costs; linear has one stage a rank, loop and V have two."""
    print("\nplacements: searched makespan over the best of the three")
    print(f"{'':26} {'linear':>8} {'loop':>8} {'v':>8}  best")
    found: dict[str, dict[str, int]] = {}
    for name, problem, _ in _published():
        family, shape = name.rsplit("-", 1)
        found.setdefault(family, {})[shape] = _solved(problem)[0].value_ns
    rows = []
    for family, values in found.items():
        best = min(values.values())
        rows.append(
            {"name": family} | {shape: round(value / best, 4) for shape, value in values.items()}
        )
        cells = " ".join(f"{rows[-1][shape]:8.4f}" for shape in ("lin", "loop", "v"))
        print(f"{family:26} {cells}  {min(values, key=lambda shape: values[shape])}", flush=True)
    return rows


def scale() -> list[Row]:
    """Large problems with one stage a rank: how far from the bound, and how long everything takes."""
    ranks, microbatches = SCALE
    print(
        f"\nscale: {ranks} ranks, {microbatches} microbatches; the best named one and searched over the bound; seconds"
    )
    heads = ("search", "simulate", "lower", "check")
    print(
        f"{'costs':10} {'memory':7} {'named':>8} {'searched':>8} "
        + " ".join(f"{head:>8}" for head in heads)
    )
    rows = []
    for costs in ("equal", "±20 %"):
        for memory in ("1f1b's", "any"):
            rows.append(row := {"costs": costs, "memory": memory} | _measure(_large(costs, memory)))
            ratios = f"{row['named']:8.4f} {row['searched']:8.4f}"
            cells = " ".join(f"{row['seconds'][head]:8.1f}" for head in heads)
            print(f"{costs:10} {memory:7} {ratios} {cells}", flush=True)
    return rows


def _large(costs: str, memory: str) -> PlacedProblem:
    ranks, microbatches = SCALE
    draw = random.Random(0)

    def time_ns() -> int:
        return 10_000 if costs == "equal" else draw.randrange(8_000, 12_001)

    times = [(time_ns(), time_ns(), time_ns()) for _ in range(ranks)]
    stages = [StageCosts(f, i + w, i, w, kept_bytes=2, between_bytes=1) for f, i, w in times]
    problem = _linked(tuple(range(ranks)), microbatches, stages, 500)
    return replace(problem, caps=(2 * ranks,) * ranks) if memory == "1f1b's" else problem


def _measure(problem: PlacedProblem) -> Row:
    found, searching = _timed(lambda: search(problem, seconds=SECONDS))
    _, simulating = _timed(lambda: simulate(problem, found.schedule))
    lowered, lowering = _timed(lambda: add_transfers(problem, found.schedule))
    faults, checking = _timed(lambda: check_schedule(lowered, problem))
    best = best_named(found.named)
    assert not faults, faults
    assert best is not None, "1F1B fits"
    return {
        "bound_ns": found.bound_ns,
        "named": round(best.value_ns / found.bound_ns, 4),
        "searched": round(found.value_ns / found.bound_ns, 4),
        "seconds": {
            "search": searching,
            "simulate": simulating,
            "lower": lowering,
            "check": checking,
        },
    }


GROUPS: dict[str, Callable[[], list[Row]]] = {
    "instances": instances,
    "table-5": table_5,
    "placements": placements,
    "scale": scale,
}


if __name__ == "__main__":
    main(sys.argv[1:])
