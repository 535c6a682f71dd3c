"""What does every rank say when one of them fails, and after how long?

    python -m benchmarks.faults

Four gloo ranks train small layers with `step_timeout=2`. One step goes well; in the next, one rank
raises, hangs for four seconds or is killed (SIGKILL) in one action. Seconds count from the
beginning of the step in which a rank fails. A rank that needs nothing more of the one at fault
ends that step, and notices in the next.

Prints what the ranks say; writes results/faults.json.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import tempfile
import textwrap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.command_line import no_arguments
from pipecompile.ir.schedule import Action
from pipecompile.runtime.faults import action_text
from tests.distributed import fault_jobs
from tests.distributed.fault_jobs import Seen
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "faults.json"
RANKS = 4


class Case(NamedTuple):
    """A rank that fails: how, and in which action of which schedule."""

    fault: str
    action: str
    schedule: str = "1f1b"
    recompute: str = "none"


CASES = (
    Case("raise", "1F2"),
    Case("raise", "2W1", schedule="zb-h1"),
    Case("hang", "2B1"),
    Case("hang", "1R1", recompute="stage"),
    Case("hang", "0SEND_F1"),
    Case("kill", "3F1"),
)
VERBS = {"raise": "raises an error", "hang": "hangs", "kill": "is killed"}


def main() -> None:
    """Run all cases, and write the result."""
    no_arguments(__doc__)
    rows: list[dict[str, Any]] = []
    workers = Workers(RANKS)
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(CASES):
            if case.fault == "kill":
                said = drill_with_a_death(case, f"{folder}/store-of-case-{number}")
            else:
                said = workers.run(RANKS, drill, case, folder=folder)
            print(_text(case, said), flush=True)
            rows += [_row(case, rank, seen) for rank, seen in enumerate(said)]
    workers.close()
    result = {"step_timeout": fault_jobs.TIMEOUT, "torch": torch.__version__, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def drill(case: Case) -> Seen:
    """Return what this rank says of a fault."""
    # torch logs the schedule of a step that fails; what counts here is what is raised.
    logging.disable(logging.CRITICAL)
    return fault_jobs.drill(RANKS, case.schedule, case.recompute, case.action, case.fault)


def drill_with_a_death(case: Case, store: str) -> list[Seen | None]:
    """Return what each rank says, in processes of its own; None of the one that dies."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(RANKS)]
    for rank, (_, theirs) in enumerate(pipes):
        context.Process(target=_work, args=(rank, case, store, theirs)).start()
        theirs.close()  # so that the end of a process is the end of its pipe
    return [_received(own) for own, _ in pipes]


def _received(pipe: Connection) -> Seen | None:
    try:
        seen: Seen = pipe.recv()
    except EOFError:
        return None
    return seen


def _work(rank: int, case: Case, path: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    pipe.send(drill(case))


def _row(case: Case, rank: int, seen: Seen | None) -> dict[str, Any]:
    return {**case._asdict(), "rank": rank, "said": None if seen is None else seen._asdict()}


def _text(case: Case, said: list[Seen | None]) -> str:
    """Return what ranks say; those that say the same share a paragraph."""
    what = action_text(Action.parse(case.action))
    lines = [f"rank {case.action[0]} {VERBS[case.fault]} in {what}, schedule {case.schedule}"]
    speakers: dict[str, list[str]] = {}
    for rank, seen in enumerate(said):
        if seen is not None:
            speakers.setdefault(f"{seen.error}: {seen.text}", []).append(
                f"rank {rank} after {seen.seconds:.1f} s"
            )
    for text, ranks in speakers.items():
        lines.append(f"  {', '.join(ranks)}")
        lines += textwrap.wrap(text, 100, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
