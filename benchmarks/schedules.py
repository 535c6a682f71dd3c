"""How good are pipecompile's schedules, do they reproduce published ones, how long do they take?

    python -m benchmarks.schedules [GROUP …]     instances, table-5, placements or scale

One simulator plays all schedules in the same run. Instances are problems with a best known
makespan: the run fails if the search is more than 0.5 % above it, above a named schedule that fits,
or takes longer than 10 s. Seconds are processor time of this process, so other processes on the
machine do not count.

Prints a table for each group; writes results/schedules.json. Groups that are not run keep their
figures.
"""

from __future__ import annotations

import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.command_line import chosen_names
from pipecompile.ir.schedule_problem import ScheduleProblem
from pipecompile.ir.serialization import read
from pipecompile.schedule.check import check_schedule
from pipecompile.schedule.named_orders import generate
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
# Units of memory for each rank, where a forward takes 2 and an input gradient leaves 1.
SEARCHED = {"ZB-1p": 2, "ZB-2p": 4}
SCALE = (64, 512)  # ranks, microbatches

Row = dict[str, Any]
T = TypeVar("T")


def main(names: list[str]) -> None:
    """Print and write the tables of these groups, or of all."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    result |= {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "seconds_of_work": SECONDS,
    }
    for name in names or list(GROUPS):
        result[name] = GROUPS[name]() or result.get(name, [])
        RESULT.write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    rows = [row for name in names or GROUPS for row in result[name]]
    violations = [text for row in rows for text in row.get("violations", ())]
    if violations:
        raise SystemExit("\n".join(violations))


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    return work(), round(time.process_time() - began, 2)


def instances() -> list[Row]:
    """Print and return named and searched makespans over the lower bound.

    A schedule that does not fit into memory is in brackets.
    """
    print("\ninstances: makespan over the lower bound, (too much memory)")
    print(f"{'':26} {'bound ms':>8} {'searched':>8} {'known':>7} {'seconds':>7}  named")
    rows = []
    for name, problem, best in _published():
        rows.append(row := _compare(name, problem, best))
        figures = f"{row['bound_ns'] / 1e6:8.2f} {row['searched']:8.4f}"
        figures += f" {row['best_known']:7.4f} {row['seconds']:7.1f}"
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
    result, seconds = _solved(problem)
    best = best_named(result.named)
    return {
        "name": name,
        "bound_ns": result.bound_ns,
        "searched_ns": result.value_ns,
        "searched": round(result.value_ns / result.bound_ns, 4),
        "best_known": round(known / result.bound_ns, 4),
        "named": {order.schedule.name: _entry(order, result) for order in result.named},
        "seconds": seconds,
        "violations": list(_violations(name, result, best, known, seconds)),
    }


def _entry(order: NamedResult, result: SearchResult) -> Row:
    return {"ratio": round(order.value_ns / result.bound_ns, 4), "fits": order.fits}


def _violations(
    name: str, result: SearchResult, best: NamedResult | None, known: int, seconds: float
) -> Iterator[str]:
    searched = result.value_ns
    if best is not None and searched > best.value_ns:
        yield f"{name}: searched {searched}, but {best.schedule.name} has {best.value_ns}"
    if searched > known * ALLOWED_OVER_KNOWN:
        yield f"{name}: searched {searched}, but {known} is known"
    if searched < result.bound_ns:
        yield f"{name}: searched {searched}, below the bound {result.bound_ns}"
    if seconds > ALLOWED_SECONDS:
        yield f"{name}: {seconds} s"


def _cell(name: str, ratio: float, fits: bool) -> str:
    return f"{name} {ratio:.3f}" if fits else f"({name} {ratio:.3f})"


def table_5() -> list[Row]:
    """Print and return the bubble rates of the Zero Bubble paper's table 5.

    Its metric is 1 − useful time / the largest span of a rank.
    """
    print("\ntable 5 of Zero Bubble (arXiv 2401.10241): bubble rate, published | ours | difference")
    print(f"{'':16} " + " ".join(f"{label:>23}" for label in (*NAMED, *SEARCHED)))
    rows = []
    for setting in json.loads(TABLE_5.read_text())["rows"]:
        ours, published = dict(_rates(setting)), setting["published"]
        rows.append(
            {key: setting[key] for key in ("model", "p", "m")}
            | {"published": published, "ours": ours}
        )
        print(f"{setting['model']:6} {setting['p']:4} {setting['m']:4}", end="")
        for label, rate in ours.items():
            cell = f"{published[label]:.4f} {rate:.4f} {rate - published[label]:+.4f}"
            print(f" {cell:>23}", end="")
        print(flush=True)
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
    """Return the problem of a row of table 5; the times of a rank are divided over its chunks."""
    # The paper gives milliseconds.
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
    """Print and return which placement is best for the same kind of costs.

    Linear has one stage on each rank, loop and V have two.
    """
    print("\nplacements: searched makespan over the best of the three")
    print(f"{'':26} {'linear':>8} {'loop':>8} {'v':>8}  best")
    makespans: dict[str, dict[str, int]] = {}
    for name, problem, _ in _published():
        family, shape = name.rsplit("-", 1)
        makespans.setdefault(family, {})[shape] = _solved(problem)[0].value_ns
    rows = []
    for family, values in makespans.items():
        best = min(values.values())
        rows.append(
            {"name": family} | {shape: round(value / best, 4) for shape, value in values.items()}
        )
        cells = " ".join(f"{rows[-1][shape]:8.4f}" for shape in ("lin", "loop", "v"))
        print(f"{family:26} {cells}  {min(values, key=lambda shape: values[shape])}", flush=True)
    return rows


def scale() -> list[Row]:
    """Print and return gaps and seconds of large problems with one stage on each rank."""
    ranks, microbatches = SCALE
    print(f"\nscale: {ranks} ranks, {microbatches} microbatches;", end=" ")
    print("best named schedule and searched one over the bound; seconds")
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
    result, searching = _timed(lambda: search(problem, seconds=SECONDS))
    _, simulating = _timed(lambda: simulate(problem, result.schedule))
    lowered, lowering = _timed(lambda: add_transfers(problem, result.schedule))
    faults, checking = _timed(lambda: check_schedule(lowered, problem))
    best = best_named(result.named)
    assert not faults, faults
    assert best is not None, "1F1B fits"
    return {
        "bound_ns": result.bound_ns,
        "named": round(best.value_ns / result.bound_ns, 4),
        "searched": round(result.value_ns / result.bound_ns, 4),
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
    main(chosen_names(__doc__, "group", GROUPS))
