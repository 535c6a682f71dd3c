"""Does each rank hold as many bytes as the plan predicts, by the allocator's own events?

    python -m benchmarks.memory_prediction [MODEL …]

Every rank is a process with gloo and one thread. It runs two steps with the optimizer under
torch.profiler, which reports each allocation of torch's CPU allocator: receive buffers, optimizer
state, activations, gradients, kernel workspace. Measured is the highest running sum, plus the
stage's parameters and buffers and its part of the minibatch.

The profiler loses events on a busy machine. A run that visibly lost some is repeated. A run that is
far from the plan is repeated until two runs agree, since not every loss can be seen.

There are two bounds. That of the rows is of the plan as it runs: the rows say where each receive is
posted. That of the plan holds under any times, which decide where its rows have receives: caps are
held against it.

Prints a table and the worst cases; writes results/memory_prediction.json. Models that are not named
keep their figures.
"""

from __future__ import annotations

import copy
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.command_line import chosen_names
from benchmarks.models import CONVOLUTIONAL, MODELS
from pipecompile.api.compilation import pipecompile
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan, ShardLevel
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.peak_snapshots import peak_snapshots
from pipecompile.memory_model.rank import rank_memory
from pipecompile.memory_model.unread_gradients import unread_gradients
from pipecompile.runtime.shards import local_part
from pipecompile.schedule.named_orders import MAY_SPLIT
from pipecompile.training.pipeline import Pipeline
from tests.allocations import events
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "memory_prediction.json"
SETTLING_SECONDS = 0.3
# gloo's threads hold what they send for a moment, and the profiler does not see what they free.
GLOO_SECONDS = 0.05
TRIALS = 4  # runs at the most
LOST_BYTES = 1 << 12  # A run that lost more does not count.
FAR_SHARE = 0.005  # A result that is farther from the plan has to be measured twice.


class PlanSetting(NamedTuple):
    """The choices of a plan that is made and run."""

    schedule: str
    k: int
    microbatches: int
    optimizer: str
    recompute: str = "none"
    memory: int | None = None  # bytes of each rank
    # The cap of a rank is the mean of what it needs with whole stages recomputed and with none.
    mean_cap: bool = False
    stages_per_rank: int = 1
    encodings: tuple[str, ...] = ()
    replicas: int = 1
    shard: ShardLevel | None = None

    @property
    def ranks(self) -> int:
        """How many ranks run it, in all replicas."""
        return self.k // self.stages_per_rank * self.replicas

    @property
    def label(self) -> str:
        """The name of the plan in the table."""
        words = [self.schedule, f"k={self.k}", f"m={self.microbatches}", self.optimizer]
        words += ["recompute", self.recompute] if self.recompute != "none" else []
        words += ["half way"] if self.mean_cap else []
        words += [f"replicas={self.replicas}"] if self.replicas > 1 else []
        words += [f"shard {self.shard}"] if self.shard else []
        return " ".join([*words, *self.encodings])


SETTINGS = (
    PlanSetting("gpipe", 2, 1, "adamw"),
    PlanSetting("gpipe", 2, 2, "sgd"),
    PlanSetting("1f1b", 2, 4, "momentum"),
    PlanSetting("gpipe", 2, 8, "rmsprop"),
    PlanSetting("1f1b", 4, 8, "adamw"),
    PlanSetting("1f1b", 8, 8, "adafactor"),
    PlanSetting("1f1b", 4, 4, "adam", "stage"),
    PlanSetting("1f1b", 4, 4, "sgd", "except-last"),
    PlanSetting("gpipe", 2, 1, "adamw", "block"),
    PlanSetting("gpipe", 2, 4, "sgd", "block"),
    PlanSetting("1f1b", 4, 8, "adam", "block"),
    PlanSetting("gpipe", 2, 8, "sgd", "sqrt"),
    PlanSetting("1f1b", 4, 4, "momentum", "sqrt"),
    PlanSetting("1f1b", 4, 8, "adamw", "auto", mean_cap=True),
    PlanSetting("gpipe", 2, 4, "sgd", "auto", mean_cap=True, encodings=("mask", "relu", "pool")),
    PlanSetting("interleaved-1f1b", 8, 8, "adamw", stages_per_rank=2),
    PlanSetting("interleaved-1f1b", 4, 4, "sgd", "auto", mean_cap=True, stages_per_rank=2),
    PlanSetting("looped-bfs", 4, 4, "sgd", "stage", stages_per_rank=2),
    PlanSetting("zb-h1", 4, 8, "adamw"),
    PlanSetting("zb-h1", 2, 4, "sgd", "stage"),
    PlanSetting("zb-h1", 2, 4, "adam", "auto", mean_cap=True),
    PlanSetting("zb-h2", 2, 4, "momentum"),
    PlanSetting("zb-v", 8, 8, "adamw", stages_per_rank=2),
    PlanSetting("zb-v", 4, 4, "sgd", "stage", stages_per_rank=2),
    PlanSetting("v-half", 4, 4, "adam", stages_per_rank=2),
    PlanSetting("v-min", 4, 4, "sgd", stages_per_rank=2),
    PlanSetting("dualpipe-v", 4, 4, "momentum", stages_per_rank=2),
    PlanSetting("search", 2, 4, "sgd"),
    PlanSetting("1f1b", 2, 4, "adamw", replicas=2),
    PlanSetting("zb-h1", 2, 4, "momentum", replicas=2),
    PlanSetting("interleaved-1f1b", 4, 4, "adam", stages_per_rank=2, replicas=2),
    PlanSetting("gpipe", 2, 2, "adamw", replicas=2, shard="optimizer"),
    PlanSetting("1f1b", 2, 4, "sgd", "stage", replicas=2, shard="optimizer"),
)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


class RankPeak(NamedTuple):
    """What a rank holds at its peak, in bytes: by the plan, and `measured`.

    `row_bound` is the bound of its row as it is in the plan, `bound` that under any times.
    """

    expected: int
    row_bound: int
    bound: int
    measured: int


def measure_rank(name: str, setting: PlanSetting) -> RankPeak:
    """On one rank: return what it holds at its peak."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    return measure(Target.of(MODELS[name](), name), setting)


def measure(target: Target, setting: PlanSetting) -> RankPeak:
    """On one rank: return what it holds of this model at its peak.

    RuntimeError where `TRIALS` runs do not agree.
    """
    choices = _mean_caps(target, setting) if setting.mean_cap else {"memory": setting.memory}
    pipeline = _compiled(target, setting, **choices)
    if setting.recompute not in ("none", "stage", "except-last"):
        stages = pipeline.plan.stages
        assert any(stage.recompute != "none" or stage.encoded_runs for stage in stages), (
            "the plan neither recomputes nor encodes anything"
        )
    rank = torch.distributed.get_rank() % pipeline.plan.ranks
    total, peaks = pipeline.plan.prediction.memory[rank].total, list[int]()
    for _ in range(TRIALS):
        held = resident(pipeline, target, rank)
        peak, lost = _peak_and_loss(pipeline, target, setting)
        if lost <= LOST_BYTES:
            peaks.append(held + peak)
        agreed = _agreed(peaks, total.expected)
        # All ranks run a step together, so they repeat it together too.
        if not _is_true_anywhere(agreed is None):
            assert agreed is not None
            return RankPeak(total.expected, row_bound(pipeline.plan, rank), total.bound, agreed)
        pipeline = _compiled(target, setting, **choices)
    raise RuntimeError(
        f"rank {rank}: {TRIALS} runs do not agree: {peaks} bytes; expected are {total.expected:,}"
    )


def row_bound(plan: Plan, rank: int) -> int:
    """Return the most that an allocator may take on a rank that performs its row of `plan`."""
    snapshots = peak_snapshots(plan.schedule.rows[rank], unread_gradients(plan.schedule))
    allocator = ALLOCATORS[plan.allocator]
    memory = rank_memory(
        plan.footprints(rank), snapshots, microbatches=plan.microbatches, allocator=allocator
    )
    return memory.total.bound


def _agreed(peaks: Sequence[int], expected: int) -> int | None:
    """Return the measured peak that is near the expected one, or that was measured twice."""
    near = (peak for peak in peaks if abs(expected - peak) <= FAR_SHARE * peak)
    twice = (one for one, other in combinations(peaks, 2) if abs(one - other) <= LOST_BYTES)
    return next(chain(near, twice), None)


def _is_true_anywhere(here: bool) -> bool:
    """Return whether `here` is true on any rank."""
    flag = torch.tensor(int(here))
    torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
    return bool(flag)


def _mean_caps(target: Target, setting: PlanSetting) -> dict[str, Any]:
    """Return a plan's cut and caps, each 2 % above the mean of two needs of a rank.

    They are what it needs without recompute and with whole stages recomputed, under the cut that is
    planned without recompute. The 2 % are for a rank that frees nothing by recompute, while a
    neighbour that recomputes lets messages wait longer.
    """
    plain = _compiled(target, setting._replace(recompute="none", encodings=())).plan
    pin = plain.assignment
    recomputing = _compiled(target, setting._replace(recompute="stage", encodings=()), pin=pin).plan
    caps = []
    for most, least in zip(plain.prediction.memory, recomputing.prediction.memory, strict=True):
        caps.append((most.total.bound + min(most.total.bound, least.total.bound)) * 51 // 100)
    return {"pin": pin, "memory": caps}


def _compiled(target: Target, setting: PlanSetting, **choices: Any) -> Pipeline:
    mesh = None
    if setting.replicas > 1:
        shape = setting.replicas, setting.ranks // setting.replicas
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp"))
    return pipecompile(
        # A copy, since a pipeline may leave parts of parameters in it.
        copy.deepcopy(target.model),
        target.call,
        k=setting.k,
        microbatches=setting.microbatches,
        schedule=setting.schedule,
        stages_per_rank=setting.stages_per_rank,
        recompute=setting.recompute,
        encodings=setting.encodings,
        optimizer=setting.optimizer,
        costs="flops",
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        self_check=False,
        mesh=mesh,
        parallelize=_shard if setting.shard else None,
        shard=setting.shard,
        **choices,
    )


def _shard(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(stage, mesh=mesh["dp"])


def resident(pipeline: Pipeline, target: Target, rank: int) -> int:
    """Return the bytes that the rank holds before its first step.

    These are parameters, buffers, and the minibatch on the ranks that read it.
    """
    tensors = [*pipeline.parameters(), *(buffer for _, buffer in pipeline.named_buffers())]
    if rank == pipeline.plan.schedule.placement[0]:
        tensors += _leaves((target.call.args, target.call.kwargs))
    if rank == pipeline.plan.schedule.placement[-1]:
        tensors += _leaves(target.targets)
    return _bytes_of(tensors)


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the storages that this rank has of `tensors`."""
    parts = (local_part(tensor).untyped_storage() for tensor in tensors)
    storages = {storage.data_ptr(): storage.nbytes() for storage in parts}
    return sum(storages.values())


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _peak_and_loss(pipeline: Pipeline, target: Target, setting: PlanSetting) -> tuple[int, int]:
    """Return the highest sum of allocations during two steps, and the bytes that went missing.

    The first step also makes what stays: the optimizer's state. The second one frees all that it
    allocates. What they seem to leave beside that are events that the profiler lost.
    """
    optimizer = OPTIMIZERS[setting.optimizer](list(pipeline.parameters()))
    gc.collect()  # Otherwise garbage of planning could be freed during the steps.
    with events():  # The first profile of a process may miss events.
        torch.empty(1)
    with events() as sizes:
        for step in ("first", "second"):
            with record_function(step):
                pipeline.step(target.call, target.targets)
                time.sleep(GLOO_SECONDS)
                optimizer.step()
                optimizer.zero_grad()
    state = _bytes_of(_leaves(optimizer.state_dict()["state"]))
    lost = max(abs(sum(sizes[""]) - state), abs(sum(sizes["second"])))
    return max(accumulate(sizes[""])), lost


def peak_allocation(run: Callable[[], object]) -> int:
    """Return the highest sum of allocations of torch's CPU allocator during `run`, in bytes."""
    gc.collect()  # Otherwise garbage of planning could be freed during the run.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        torch.empty(1)  # The first profile of a process may miss events.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        time.sleep(SETTLING_SECONDS)  # Events at the very begin and end of a profile are dropped.
        run()
        time.sleep(SETTLING_SECONDS)
    memory = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in memory))


def main(names: list[str]) -> None:
    """Print and write the table of these models, or of all."""
    rows = list[dict[str, Any]]()
    for name in names or list(MODELS):
        rows += _rows(name)
        _write(rows)
    others = MODELS.keys() - set(CONVOLUTIONAL)
    for kind, models, most in (
        ("transformers and MLPs", others, 0.01),
        ("convnets", CONVOLUTIONAL, 0.03),
    ):
        for harder in (False, True):
            chosen = [row for row in rows if row["model"] in models and _is_harder(row) == harder]
            _print_worst(kind + ", recompute and split backwards" * harder, chosen, most)


def _write(rows: list[dict[str, Any]]) -> None:
    """Write these rows, and those that the file has of other models."""
    models = {row["model"] for row in rows}
    known = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []
    all_rows = [*(row for row in known if row["model"] not in models), *rows]
    all_rows.sort(key=lambda row: list(MODELS).index(row["model"]))
    result = {"torch": torch.__version__, "device": "cpu", "rows": all_rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _rows(name: str) -> Iterator[dict[str, Any]]:
    header = ("model", "plan", "rank", "measured", "expected", "error", "rows' bound", "above")
    text = "{:9} {:50} {:>4} {:>11} {:>11} {:>7} {:>11} {:>6} {:>11} {:>6}"
    print(text.format(*header, "plan's", "above"))
    workers = Workers(max(setting.ranks for setting in SETTINGS))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for setting in SETTINGS:
                yield from _measured(workers, name, setting, folder)
    finally:
        workers.close()


def _measured(
    workers: Workers, name: str, setting: PlanSetting, folder: str
) -> Iterator[dict[str, Any]]:
    plan = setting.label
    rows = workers.run(setting.ranks, measure_rank, name, setting, folder=folder)
    for rank, peak in enumerate(rows):
        row: dict[str, Any] = {"model": name, "plan": plan, "rank": rank, **peak._asdict()}
        error, row_above, above = (_excess(row, key) for key in ("expected", "row_bound", "bound"))
        print(f"{name:9} {plan:50} {rank:4} {peak.measured:11,} {peak.expected:11,}", end=" ")
        print(f"{error:+7.2%} {peak.row_bound:11,} {row_above:+6.1%}", end=" ")
        print(f"{peak.bound:11,} {above:+6.1%}", flush=True)
        yield row


def _is_harder(row: dict[str, Any]) -> bool:
    """Return whether its plan recomputes or splits backwards, which is harder to predict."""
    return "recompute" in row["plan"] or row["plan"].split()[0] in MAY_SPLIT


def _print_worst(kind: str, rows: list[dict[str, Any]], most: float) -> None:
    """Print the worst of these, and whether the predictions hold.

    They hold if every expected peak is within `most` of the measured one and no bound is below it.
    """
    if not rows:
        return
    worst = max(rows, key=lambda row: abs(_excess(row, "expected")))
    loosest_row = max(rows, key=lambda row: _excess(row, "row_bound"))
    loosest = max(rows, key=lambda row: _excess(row, "bound"))
    too_far = sum(abs(_excess(row, "expected")) > most for row in rows)
    too_low = sum(row["row_bound"] < row["measured"] for row in rows)
    print(
        f"{kind}: {len(rows)} ranks; "
        f"expected at worst {_excess(worst, 'expected'):+.2%} ({_where(worst)}); "
        f"bound of a row at most {_excess(loosest_row, 'row_bound'):+.1%} ({_where(loosest_row)}), "
        f"below the measured peak on {too_low}; "
        f"bound of a plan at most {_excess(loosest, 'bound'):+.1%} ({_where(loosest)}); "
        f"beyond {most:.0%} on {too_far}: {'DOES NOT HOLD' if too_far or too_low else 'holds'}"
    )


def _excess(row: dict[str, Any], key: str) -> float:
    return float(row[key] / row["measured"] - 1)


def _where(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['plan']}, rank {row['rank']}"


if __name__ == "__main__":
    main(chosen_names(__doc__, "model", MODELS))
