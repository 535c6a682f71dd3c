"""What ranks do in the drill of faults; each function runs on every rank."""

from __future__ import annotations

import builtins
import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.graph.batch_statistics import StepStatistics
from pipecompile.ir.schedule import Action
from pipecompile.runtime.in_flight import MinibatchesInFlight
from pipecompile.runtime.rank_step import RankStep
from pipecompile.training.pipeline import Pipeline
from tests.device import DEVICE
from tests.distributed.parallel_jobs import sharding

TIMEOUT = 2.0


class Seen(NamedTuple):
    """What a rank has seen of a fault."""

    error: str
    text: str
    seconds: float


def small_pipeline(schedule: str, ranks: int, **options: object) -> tuple[Pipeline, torch.Tensor]:
    """A pipeline of small layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh())])
    model, batch = model.to(DEVICE), torch.randn(8, 8).to(DEVICE)
    options = {"costs": "flops", "self_check": False, "microbatches": 4, **options}
    pipeline = pipecompile(
        model,
        batch,
        ranks=ranks,
        schedule=schedule,
        loss_fn=lambda output, _: output.square().mean(),
        **options,  # type: ignore[arg-type]
    )
    return pipeline, batch


def drill(
    ranks: int, schedule: str, recompute: str, action: str, fault: str, culprit: int | None = None
) -> Seen:
    """A step that goes well, and one or two in which `fault` happens in `action`: on the rank that
    has it, or of several replicas on the global rank `culprit`.
    """
    pipeline, batch = small_pipeline(schedule, ranks, recompute=recompute, step_timeout=TIMEOUT)
    pipeline.step(batch)
    perform = RankStep._perform

    def planted(rank_step: RankStep, current: Action) -> None:
        if str(current) == action and culprit in (None, dist.get_rank()):
            _happen(fault)
        perform(rank_step, current)

    try:
        with patch.object(RankStep, "_perform", planted):
            # A rank that needs nothing more of the culprit notices in the next step.
            for _ in range(2):
                start = time.monotonic()
                pipeline.step(batch)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        seconds = time.monotonic() - start
        # Some rank may still be in the step: a barrier would wait for it for ever.
        dist.destroy_process_group()
        return Seen(type(error).__name__, "; ".join([str(error), *notes]), seconds)
    return Seen("", "", time.monotonic() - start)


def drill_in_flight(schedule: str, action: str, fault: str) -> Seen:
    """A training of which one minibatch goes well, and in the next but one that begins a `fault`
    happens in `action`, while others are in flight.
    """
    ranks = dist.get_world_size()
    pipeline, batch = small_pipeline(schedule, ranks, step_timeout=TIMEOUT)
    run = pipeline.train(
        [(batch, None)] * 12, lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    next(run)
    seen = 0

    def planted(perform: Callable[[Any, Action], None]) -> Callable[[Any, Action], None]:
        def performed(of: Any, current: Action) -> None:
            nonlocal seen
            if str(current).startswith(action):
                seen += 1
                if seen == 2:
                    _happen(fault)
            perform(of, current)

        return performed

    with ExitStack() as patches:
        for of, name in ((RankStep, "_perform"), (MinibatchesInFlight, "_update_weights")):
            patches.enter_context(patch.object(of, name, planted(getattr(of, name))))
        found = _seen_of(lambda: next(run))
        if not found.error:  # a rank that needs nothing more of the culprit notices later
            found = _seen_of(lambda: list(run))
    dist.destroy_process_group()
    return found


def gathered_by_one() -> str:
    """What rank 0 says if it gathers the weights alone, and the other rank ends."""
    pipeline, _ = small_pipeline("1f1b", 2)
    said = _said_by(pipeline.full_state_dict) if not dist.get_rank() else ""
    dist.destroy_process_group()
    del pipeline
    gc.collect()  # as at the end of a process, which a worker does not come to
    return said


def after_a_loss(schedule: str, action: str, error: str) -> list[str]:
    """What a rank says of a step in which `action` raises `error`, and of what follows."""
    ranks = dist.get_world_size()
    pipeline, batch = small_pipeline(schedule, ranks, step_timeout=TIMEOUT)
    pipeline.step(batch)
    perform = RankStep._perform

    def planted(rank_step: RankStep, current: Action) -> None:
        if str(current) == action:
            raise getattr(builtins, error)("planted")
        perform(rank_step, current)

    with patch.object(RankStep, "_perform", planted):
        said = [_said_by(lambda: pipeline.step(batch))]
    for act in (
        lambda: pipeline.step(batch),
        lambda: pipeline.evaluate(batch),
        pipeline.full_state_dict,
        lambda: pipeline.checkpoint().save("no-folder"),
    ):
        said.append(_said_by(act))
    dist.destroy_process_group()
    return said


def _said_by(act: Callable[[], object]) -> str:
    try:
        act()
    except (Exception, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _happen(fault: str) -> None:
    if fault == "raise":
        raise ValueError("planted")
    if fault in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    time.sleep(TIMEOUT + 2)


def drill_of_evaluation(ranks: int, culprit: int, fault: str) -> Seen:
    """An evaluation that goes well, and one with a `fault` on a rank; it has time for three
    steps.
    """
    pipeline, batch = small_pipeline("1f1b", ranks, step_timeout=TIMEOUT / 3)
    samples = torch.cat([batch, batch, batch[:1]])
    pipeline.evaluate(samples)
    perform = RankStep._perform

    def planted(rank_step: RankStep, current: Action) -> None:
        if str(current) == f"{culprit}F1":
            _happen(fault)
        perform(rank_step, current)

    start = time.monotonic()
    try:
        with patch.object(RankStep, "_perform", planted):
            pipeline.evaluate(samples)
            pipeline.evaluate(samples)
    except Exception as error:
        seconds = time.monotonic() - start
        dist.destroy_process_group()
        return Seen(type(error).__name__, str(error), seconds)
    return Seen("", "", time.monotonic() - start)


def evaluated_badly(error: type[Exception]) -> list[Seen]:
    """What a rank says of an evaluation whose last microbatch raises an error on the last rank,
    and of what follows.
    """
    ranks = dist.get_world_size()
    pipeline, batch = small_pipeline("1f1b", ranks, step_timeout=TIMEOUT)
    last, perform = f"{ranks - 1}F3", RankStep._perform

    def planted(rank_step: RankStep, current: Action) -> None:
        if str(current) == last:
            raise error("planted")
        perform(rank_step, current)

    with patch.object(RankStep, "_perform", planted):
        seen = [_seen_of(lambda: pipeline.evaluate(batch))]
    seen += [_seen_of(lambda: pipeline.evaluate(batch)), _seen_of(lambda: pipeline.step(batch))]
    dist.destroy_process_group()
    return seen


def late_for_exchange(what: str) -> Seen:
    """What rank 0 sees if rank 1 does not come to an exchange of the step or behind it."""
    pipeline, batch = small_pipeline("1f1b", 2, step_timeout=TIMEOUT)
    if what != "the first agreement":
        pipeline.step(batch)
    if what == "another pipeline's":  # which has not begun as often
        pipeline, _ = small_pipeline("1f1b", 2, step_timeout=TIMEOUT)

    def exchange() -> None:
        if dist.get_rank():
            time.sleep(TIMEOUT + 1)
        elif what == "the clipping":
            pipeline.clip_grad_norm_(1.0)
        elif what == "the save":
            pipeline.checkpoint().save("no-folder")
        elif what == "the load":
            pipeline.checkpoint().load("no-folder")
        elif what == "the whole state":
            pipeline.full_state_dict()
        else:
            pipeline.step(batch)

    return seen_in(exchange)


def interrupted_in_sums() -> list[str]:
    """What a rank says where rank 0 is interrupted in the exchanges behind the actions of a step,
    and of the next step.
    """
    pipeline, batch = small_pipeline("1f1b", 2, step_timeout=TIMEOUT)
    pipeline.step(batch)

    def interrupted(*_: object) -> None:
        if dist.get_rank() == 0:
            raise KeyboardInterrupt
        time.sleep(0.2)

    with patch("pipecompile.training.runner.sum_tied_gradients", interrupted):
        said = [_said_by(lambda: pipeline.step(batch))]
    said.append(_said_by(lambda: pipeline.step(batch)))
    dist.destroy_process_group()
    return said


def steps_of_two_pipelines() -> Seen:
    """What this rank sees where ranks step with two pipelines of one plan in another order."""
    (first, batch), (second, _) = (small_pipeline("1f1b", 2) for _ in range(2))
    for each in (first, second):
        each.step(batch)
    return seen_in(lambda: (second if dist.get_rank() else first).step(batch))


def other_scales() -> Seen:
    """What this rank sees where each has a scaler of its own scale."""
    pipeline, batch = small_pipeline("1f1b", 2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0 ** (3 + dist.get_rank()))
    return seen_in(lambda: pipeline.step(batch, scaler=scaler))


def scales_that_go_apart() -> Seen:
    """What this rank sees where one scaler has another scale after the steps that are compared."""
    pipeline, batch = small_pipeline("1f1b", 2)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    for _ in range(3):
        pipeline.step(batch, scaler=scaler)
    scaler.update(4.0 if dist.get_rank() else 8.0)
    return seen_in(lambda: pipeline.step(batch, scaler=scaler))


def hook_that_fails() -> Seen:
    """What this rank sees where the communication hook has an error."""
    pipeline, batch = small_pipeline("1f1b", 1, step_timeout=TIMEOUT)

    def hook(_: object, bucket: Any) -> Any:
        raise RuntimeError("planted")

    pipeline.register_comm_hook(pipeline.replica_group, hook)
    return seen_in(lambda: pipeline.step(batch))


def clipped_by_one() -> Seen:
    """What this rank sees where rank 1 clips to a number that is none."""
    pipeline, batch = small_pipeline("1f1b", 2, step_timeout=TIMEOUT)
    pipeline.step(batch)
    return seen_in(lambda: pipeline.clip_grad_norm_(-1.0 if dist.get_rank() else 1.0))


def clipped_apart() -> Seen:
    """What this rank sees where each clips to another norm."""
    pipeline, batch = small_pipeline("1f1b", 2, step_timeout=TIMEOUT)
    pipeline.step(batch)
    return seen_in(lambda: pipeline.clip_grad_norm_(1.0 + dist.get_rank()))


def different_saves(what: str, folder: str) -> Seen:
    """What this rank sees where ranks save otherwise."""
    pipeline, batch = small_pipeline("1f1b", 2, step_timeout=TIMEOUT)
    pipeline.step(batch)
    checkpoint, is_first = pipeline.checkpoint(), dist.get_rank() == 0

    def save() -> None:
        if what == "another folder":
            checkpoint.save(f"{folder}/{dist.get_rank()}")
        elif what == "another way" and is_first:
            checkpoint.save(f"{folder}/saved")
        elif what == "another way":
            checkpoint.save_async(f"{folder}/saved")
        elif is_first:
            checkpoint.save(f"{folder}/saved")
        else:
            pipeline.step(batch)

    return seen_in(save)


def returned_with_a_function() -> Seen:
    """What this rank sees of a step that returns on all ranks what cannot be sent."""
    torch.manual_seed(0)
    model, rows = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    pipeline = pipecompile(
        *(model, rows),
        k=2,
        microbatches=2,
        costs="flops",
        step_timeout=TIMEOUT,
        loss_fn=lambda output, _: (output.sum(), lambda: output),
    )
    return seen_in(lambda: pipeline.step(rows, rows, everywhere=True))


def seen_in(exchange: Callable[[], object]) -> Seen:
    """What this rank sees of an exchange to which another one comes too late."""
    seen = _seen_of(exchange)
    dist.destroy_process_group()
    return seen


def _seen_of(act: Callable[[], object]) -> Seen:
    start, error = time.monotonic(), None
    try:
        act()
    except Exception as raised:
        error = raised
    seconds = time.monotonic() - start
    text = "; ".join([str(error), *getattr(error, "__notes__", [])])
    return Seen("" if error is None else type(error).__name__, text, seconds)


def begins_alone() -> Seen:
    """What rank 0 sees of an exchange that rank 1 never comes to."""
    pipeline, batch = small_pipeline("1f1b", 2, step_timeout=TIMEOUT)
    pipeline.step(batch)
    if dist.get_rank():
        time.sleep(600)
    return seen_in(lambda: pipeline.step(batch))


def late_for_averages() -> Seen:
    """What the first of two replicas sees if the other does not come to the averages of norms."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model, batch = model.to(DEVICE), torch.randn(8, 8).to(DEVICE)
    pipeline = pipecompile(
        model,
        batch,
        ranks=1,
        costs="flops",
        batch_norm="minibatch",
        loss_fn=lambda output, _: output.square().mean(),
        step_timeout=TIMEOUT,
        microbatches=1,
    )
    pipeline.step(batch)
    add_all = StepStatistics.add_all

    def late(*arguments: StepStatistics) -> None:
        time.sleep(TIMEOUT + 1 if dist.get_rank() else 0)
        add_all(*arguments)

    with patch.object(StepStatistics, "add_all", late):
        return seen_in(lambda: pipeline.step(batch))


def refused_by_one(what: str) -> tuple[str, float]:
    """What a rank says if only the last one is given what it refuses, and the loss of the next
    step, which is as if nothing had been.
    """
    ranks = dist.get_world_size()
    pipeline, batch = small_pipeline("1f1b", ranks, step_timeout=TIMEOUT)
    is_last = dist.get_rank() == ranks - 1
    act = pipeline.evaluate if what == "an evaluation" else pipeline.step
    given: dict[str, torch.Tensor] = {
        "too many samples": torch.cat([batch, batch]),
        "another type": batch.double(),
        "another shape": batch[:, :-1],
        "an evaluation": batch[:, :-1],
    }
    text = ""
    with torch.no_grad() if what == "no gradients" and is_last else nullcontext():
        try:
            act(given.get(what, batch) if is_last else batch)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    loss = pipeline.step(batch, everywhere=True)
    return text, float(loss)


class Unreadable(tuple[Tensor, ...]):
    """A batch that raises in reading."""

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("planted")


def refused_by_last(what: str, ranks: int, *, sharded: bool = False) -> tuple[str, float, float]:
    """What a rank of several replicas says if only the last one cannot begin, how long that takes,
    and the loss of the next step.
    """
    replicas = dist.get_world_size() // ranks
    options = sharding(ranks, replicas) if sharded else {}
    pipeline, batch = small_pipeline("1f1b", ranks, step_timeout=TIMEOUT, **options)
    is_last = dist.get_rank() == dist.get_world_size() - 1
    narrow = batch[:, :-1] if is_last else batch
    acts: dict[str, Callable[[], object]] = {
        "the loss of an evaluation": lambda: pipeline.evaluate(narrow, batch),
        "an evaluation": lambda: pipeline.evaluate(narrow),
        "a batch that raises": lambda: pipeline.step(Unreadable([batch]) if is_last else batch),
        "a target that raises": lambda: pipeline.evaluate(
            batch, Unreadable([batch]) if is_last else batch
        ),
    }
    start, text = time.monotonic(), ""
    try:
        acts[what]()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    return text, seconds, float(pipeline.step(batch, everywhere=True))


def evaluated_apart(ranks: int) -> tuple[int, float, float]:
    """How many evaluations reached this rank if each replica evaluates another number of batches,
    then the loss of an evaluation that all take part in, and of a step.
    """
    pipeline, batch = small_pipeline("1f1b", ranks, step_timeout=20)
    replica = dist.get_rank() // ranks
    outputs = [pipeline.evaluate(batch[: 3 + count]) for count in range(1 + 2 * replica)]
    loss = pipeline.evaluate(batch, batch)
    step = float(pipeline.step(batch, everywhere=True))
    return sum(each is not None for each in outputs), step if loss is None else float(loss), step


def different_batches() -> str:
    """What a rank says if ranks are given different numbers of microbatches."""
    pipeline, batch = small_pipeline("1f1b", dist.get_world_size())
    try:
        pipeline.step(batch if dist.get_rank() else batch[:4])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def different_models() -> str:
    """What a rank says if another model is compiled on the last rank than on the others."""
    is_last = dist.get_rank() == dist.get_world_size() - 1
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Tanh() if is_last else nn.ReLU())
    try:
        pipecompile(model, torch.rand(8, 4), k=2, costs="flops", microbatches=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def compiled_after_a_fault() -> str:
    """What a rank says if another pipeline is made after a step that failed midway."""
    ranks = dist.get_world_size()
    pipeline, batch = small_pipeline("1f1b", ranks, step_timeout=TIMEOUT)
    perform = RankStep._perform

    def planted(rank_step: RankStep, current: Action) -> None:
        if str(current) == "1F2":
            _happen("raise")
        perform(rank_step, current)

    with patch.object(RankStep, "_perform", planted), suppress(Exception):
        pipeline.step(batch)
    try:
        small_pipeline("1f1b", ranks)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        dist.destroy_process_group()
    return ""
