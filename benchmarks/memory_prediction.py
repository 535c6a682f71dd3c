"""Does each rank hold what the plan predicts? Expected and bound against the allocator's own events.

Every rank is a process with gloo and one thread. It runs two steps with the optimizer under torch.profiler, which
reports each allocation of torch's CPU allocator: receive buffers, optimizer state, activations, gradients, scratch of
kernels. A run of which it lost events is made again, and so is one that is far from the plan until two agree, since
the profiler loses more than can be seen. The highest running sum, with the stage's parameters and buffers
and its part of the minibatch, is what is measured. Prints a table, names the worst case, writes the models' rows to
benchmarks/results/memory_prediction.json.

    python -m benchmarks.memory_prediction [MODEL …]
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.models import CONVOLUTIONAL, MODELS
from pipecompile.api.compile import pipecompile
from pipecompile.api.pipeline import Pipeline
from pipecompile.api.target import Target
from pipecompile.schedule.named import MAY_SPLIT
from tests.allocations import events
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "memory_prediction.json"
SETTLING_SECONDS = 0.3
HOLDING_SECONDS = (
    0.05  # gloo's threads hold what they sent; what they free the profiler does not see
)
TRIALS, LOST = 4, 1 << 12  # runs at the most, until no more bytes are lost
FAR = 0.005  # what is farther from the plan has to be measured twice


class Setting(NamedTuple):
    """A plan to make and run."""

    schedule: str
    k: int
    microbatches: int
    optimizer: str
    recompute: str = "none"
    memory: int | None = None  # bytes of each rank
    half_way: bool = (
        False  # budgets half way between what whole stages computed again need and what none does
    )
    stages_per_rank: int = 1
    saving: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """How many run it."""
        return self.k // self.stages_per_rank

    @property
    def label(self) -> str:
        """What it is called in the table."""
        words = [self.schedule, f"k={self.k}", f"m={self.microbatches}", self.optimizer]
        words += ["recompute", self.recompute] if self.recompute != "none" else []
        words += ["half way"] if self.half_way else []
        return " ".join([*words, *self.saving])


SETTINGS = (
    Setting("gpipe", 2, 1, "adamw"),
    Setting("gpipe", 2, 2, "sgd"),
    Setting("1f1b", 2, 4, "momentum"),
    Setting("gpipe", 2, 8, "rmsprop"),
    Setting("1f1b", 4, 8, "adamw"),
    Setting("1f1b", 8, 8, "adafactor"),
    Setting("1f1b", 4, 4, "adam", "stage"),
    Setting("1f1b", 4, 4, "sgd", "except-last"),
    Setting("gpipe", 2, 1, "adamw", "block"),
    Setting("gpipe", 2, 4, "sgd", "block"),
    Setting("1f1b", 4, 8, "adam", "block"),
    Setting("gpipe", 2, 8, "sgd", "sqrt"),
    Setting("1f1b", 4, 4, "momentum", "sqrt"),
    Setting("1f1b", 4, 8, "adamw", "auto", half_way=True),
    Setting("gpipe", 2, 4, "sgd", "auto", half_way=True, saving=("mask", "relu", "pool")),
    Setting("interleaved-1f1b", 8, 8, "adamw", stages_per_rank=2),
    Setting("interleaved-1f1b", 4, 4, "sgd", "auto", half_way=True, stages_per_rank=2),
    Setting("looped-bfs", 4, 4, "sgd", "stage", stages_per_rank=2),
    Setting("zb-h1", 4, 8, "adamw"),
    Setting("zb-h1", 2, 4, "sgd", "stage"),
    Setting("zb-h1", 2, 4, "adam", "auto", half_way=True),
    Setting("zb-h2", 2, 4, "momentum"),
    Setting("zb-v", 8, 8, "adamw", stages_per_rank=2),
    Setting("zb-v", 4, 4, "sgd", "stage", stages_per_rank=2),
    Setting("v-half", 4, 4, "adam", stages_per_rank=2),
    Setting("v-min", 4, 4, "sgd", stages_per_rank=2),
    Setting("dualpipe-v", 4, 4, "momentum", stages_per_rank=2),
    Setting("search", 2, 4, "sgd"),
)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def measured_rank(name: str, setting: Setting) -> tuple[int, int, int]:
    """On one rank: bytes expected, bound and measured."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return measured(Target.of(MODELS[name](), name), setting)


def measured(target: Target, setting: Setting) -> tuple[int, int, int]:
    """The same of a model at hand."""
    choices = _half_way(target, setting) if setting.half_way else {"memory": setting.memory}
    pipeline = _compiled(target, setting, **choices)
    if setting.recompute not in ("none", "stage", "except-last"):
        stages = pipeline.plan.stages
        assert any(stage.recompute != "none" or stage.encoded_runs for stage in stages), (
            "everything is kept as it is"
        )
    rank = torch.distributed.get_rank()
    total, found = pipeline.plan.prediction.memory[rank].total, list[int]()
    for _ in range(TRIALS):
        held = resident(pipeline, target, rank)
        peak, lost = _highest(pipeline, target, setting)
        found += [held + peak] if lost <= LOST else []
        settled = _settled(found, total.expected)
        if not _anywhere(settled is None):
            assert settled is not None
            return total.expected, total.bound, settled
        pipeline = pipecompile(
            target.model, target.call, plan=pipeline.plan, loss_fn=target.loss_fn, self_check=False
        )
    raise RuntimeError(
        f"rank {rank}: {TRIALS} runs do not agree: {found} bytes; expected are {total.expected:,}"
    )


def _settled(found: Sequence[int], expected: int) -> int | None:
    """Of what was measured that which is near to what is expected, or was measured twice."""
    near = (size for size in found if abs(expected - size) <= FAR * size)
    twice = (one for one, other in combinations(found, 2) if abs(one - other) <= LOST)
    return next(chain(near, twice), None)


def _anywhere(here: bool) -> bool:
    """Whether it is so on any rank."""
    flag = torch.tensor(int(here))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)


def _half_way(target: Target, setting: Setting) -> dict[str, Any]:
    """The cut without recompute, and budgets between what its ranks need then and with whole stages computed again."""
    plain = _compiled(target, setting._replace(recompute="none", saving=())).plan
    pin = plain.assignment
    again = _compiled(target, setting._replace(recompute="stage", saving=()), pin=pin).plan
    needed = ([rank.total.bound for rank in plan.prediction.memory] for plan in (plain, again))
    return {
        "pin": pin,
        "memory": [(most + min(most, least)) // 2 for most, least in zip(*needed, strict=True)],
    }


def _compiled(target: Target, setting: Setting, **choices: Any) -> Pipeline:
    return pipecompile(
        target.model,
        target.call,
        k=setting.k,
        microbatches=setting.microbatches,
        schedule=setting.schedule,
        stages_per_rank=setting.stages_per_rank,
        recompute=setting.recompute,
        saving=setting.saving,
        optimizer=setting.optimizer,
        costs="flops",
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        self_check=False,
        **choices,
    )


def resident(pipeline: Pipeline, target: Target, rank: int) -> int:
    """What the rank holds before its first step: parameters, buffers, and the minibatch where it is read."""
    tensors = [*pipeline.parameters(), *(buffer for _, buffer in pipeline.named_buffers())]
    if rank == pipeline.plan.schedule.placement[0]:
        tensors += _leaves((target.call.args, target.call.kwargs))
    if rank == pipeline.plan.schedule.placement[-1]:
        tensors += _leaves(target.targets)
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return sum(storages.values())


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _highest(pipeline: Pipeline, target: Target, setting: Setting) -> tuple[int, int]:
    """The highest sum of allocations during two steps, the first of which makes what stays; and what was lost of them.

    On a busy machine the profiler drops events. What the second step takes it gives back, if all of it was seen.
    """
    optimizer = OPTIMIZERS[setting.optimizer](list(pipeline.parameters()))
    gc.collect()  # what planning left is not let go meanwhile
    with events():  # a process's first profile may miss some
        torch.empty(1)
    with events() as found:
        for step in ("first", "second"):
            with record_function(step):
                pipeline.step(target.call, target.targets)
                time.sleep(HOLDING_SECONDS)
                optimizer.step()
                optimizer.zero_grad()
    return max(accumulate(found[""])), abs(sum(found["second"]))


def highest(run: Callable[[], object]) -> int:
    """The highest sum of allocations of torch's CPU allocator during `run`."""
    gc.collect()  # what planning left is not let go meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        torch.empty(1)  # a process's first profile may miss events
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        time.sleep(SETTLING_SECONDS)  # events at the very begin and end are dropped
        run()
        time.sleep(SETTLING_SECONDS)
    events = (
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    )
    return max(
        accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    )


def main() -> None:
    """Prints and writes the table."""
    rows = list[dict[str, Any]]()
    for name in sys.argv[1:] or list(MODELS):
        rows += _rows(name)
        _write(rows)
    others = MODELS.keys() - set(CONVOLUTIONAL)
    for kind, names, most in (
        ("transformers and MLPs", others, 0.01),
        ("convnets", CONVOLUTIONAL, 0.03),
    ):
        for beyond in (False, True):
            chosen = [row for row in rows if row["model"] in names and _is_beyond(row) == beyond]
            _say_worst(kind + ", recompute and split backwards" * beyond, chosen, most)


def _write(rows: list[dict[str, Any]]) -> None:
    """These, and what the file has of other models."""
    models = {row["model"] for row in rows}
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    every = [*(row for row in known if row["model"] not in models), *rows]
    every.sort(key=lambda row: list(MODELS).index(row["model"]))
    RESULT.write_text(
        json.dumps({"torch": torch.__version__, "device": "cpu", "rows": every}, indent=1) + "\n"
    )


def _rows(name: str) -> Iterator[dict[str, Any]]:
    header = ("model", "plan", "rank", "expected", "measured", "error", "bound", "above")
    print("{:9} {:50} {:>4} {:>11} {:>11} {:>7} {:>11} {:>6}".format(*header))
    workers = Workers(max(setting.ranks for setting in SETTINGS))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for setting in SETTINGS:
                yield from _measured(workers, name, setting, folder)
    finally:
        workers.close()


def _measured(
    workers: Workers, name: str, setting: Setting, folder: str
) -> Iterator[dict[str, Any]]:
    plan = setting.label
    for rank, row in enumerate(
        workers.run(setting.ranks, measured_rank, name, setting, folder=folder)
    ):
        expected, bound, measured = row
        error, above = expected / measured - 1, bound / measured - 1
        print(
            f"{name:9} {plan:50} {rank:4} {expected:11,} {measured:11,} {error:+7.2%} {bound:11,} {above:+6.1%}",
            flush=True,
        )
        yield {
            "model": name, "plan": plan, "rank": rank, "expected": expected, "measured": measured, "bound": bound,
        }  # fmt: skip


def _is_beyond(row: dict[str, Any]) -> bool:
    """Whether its plan recomputes or splits backwards: what these hold is known less exactly."""
    return "recompute" in row["plan"] or row["plan"].split()[0] in MAY_SPLIT


def _say_worst(kind: str, rows: list[dict[str, Any]], most: float) -> None:
    """The worst of these, and whether all are within `most` and no bound is below what was measured."""
    if not rows:
        return
    errors = [abs(row["expected"] / row["measured"] - 1) for row in rows]
    beyond = sum(error > most for error in errors)
    worst = max(rows, key=lambda row: abs(row["expected"] / row["measured"] - 1))
    loosest = max(rows, key=lambda row: row["bound"] / row["measured"])
    broken = [row for row in rows if row["bound"] < row["measured"]]
    print(
        f"{kind}: {len(rows)} ranks; expected at worst {worst['expected'] / worst['measured'] - 1:+.2%} "
        f"({worst['model']}, {worst['plan']}, rank {worst['rank']}); bound at most "
        f"{loosest['bound'] / loosest['measured'] - 1:+.1%} ({loosest['model']}, {loosest['plan']}, rank "
        f"{loosest['rank']}), below what was measured on {len(broken)}; beyond {most:.0%} on {beyond}: "
        f"{'holds' if not beyond and not broken else 'DOES NOT HOLD'}"
    )


if __name__ == "__main__":
    main()
