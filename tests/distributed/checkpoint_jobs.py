"""What workers do in tests of checkpoints: each function runs on every rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pipecompile.errors import InputError, PipecompileError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.runtime.shards import local_part
from pipecompile.training.checkpoint import Checkpoint
from tests.distributed.parallel_jobs import sharding
from tests.distributed.training_jobs import Run, run_of

State = dict[str, Tensor] | None


@dataclass(frozen=True)
class Training:
    """A pipeline, or the unsplit model, with its optimizer: 16 samples a step, in other order."""

    run: Run
    checkpoint: Checkpoint
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    step_on: Callable[[Target], Any]

    def steps(self, count: int) -> None:
        """So many steps, each with other data."""
        for _ in range(count):
            self.optimizer.zero_grad()
            self.step_on(rolled(self.run.whole, self.checkpoint.data))
            self.optimizer.step()
            self.scheduler.step()
            self.checkpoint.data += 1

    @property
    def progress(self) -> tuple[int, int, float]:
        """How many steps were taken, the place in the data, and the learning rate."""
        rate = self.optimizer.param_groups[0]["lr"]
        return self.checkpoint.steps, self.checkpoint.data, rate


def rolled(whole: Target, position: int) -> Target:
    """The minibatch at a place in the data: the same samples in another order."""
    tokens = whole.call.args[0].roll(position, 0)
    return replace(whole, call=arguments_of(whole.model, tokens), targets=tokens.roll(1, 1))


def optimizer_of(model: Any) -> tuple[Any, Any]:
    """AdamW with weight decay for matrices only, and a falling learning rate.

    The gradient of the convolution's bias is zero, since the layer norm behind it removes the bias.
    AdamW divides what rounding leaves of it by the square root of its square and eps: 1e-8 would
    magnify it to steps of 1e-11.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.003}]
    groups = [group for group in groups if group["params"]]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, eps=1e-6)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def pipelined(ranks: int, replicas: int, **options: Any) -> Training:
    """The mixture on so many ranks, with 4 microbatches over all replicas."""
    options = {"schedule": "1f1b", "batch_norm": "minibatch", **options}
    run = run_of(ranks, replicas, microbatches=4 // replicas, **options)
    optimizer, scheduler = optimizer_of(run.pipeline)

    def step(minibatch: Target) -> None:
        run.pipeline.step(run.part(minibatch.call.args[0]), run.part(minibatch.targets))

    checkpoint = run.pipeline.checkpoint(optimizer, scheduler, data=0)
    return Training(run, checkpoint, optimizer, scheduler, step)


def unsplit() -> Training:
    """The mixture in a training loop of its own, with the dropout of a pipeline."""
    run = run_of(1, 1, schedule="1f1b", batch_norm="minibatch")
    optimizer, scheduler = optimizer_of(run.reference.model)
    checkpoint = Checkpoint.of_model(run.reference.model, optimizer, scheduler, data=0)

    def step(minibatch: Target) -> None:
        run.reference.step(minibatch, 4, seed=0, step=checkpoint.steps)
        checkpoint.steps += 1

    return Training(run, checkpoint, optimizer, scheduler, step)


def trained(
    ranks: int,
    replicas: int,
    steps: int,
    *,
    load: str | None = None,
    save: str | None = None,
    sharded: bool = False,
) -> tuple[tuple[int, int, float], State]:
    """Load a checkpoint, take steps and save one; the progress, and on rank 0 the model's state.
    Stages may be `sharded` over replicas.
    """
    options = sharding(ranks, replicas) if sharded else {}
    run = pipelined(ranks, replicas, **options) if ranks else unsplit()
    if load is not None:
        spoil(run)
        run.checkpoint.load(load)
    run.steps(steps)
    if save is not None:
        run.checkpoint.save(save)
    if ranks:
        return run.progress, run.run.pipeline.full_state_dict()
    return run.progress, run.run.reference.model.state_dict()


def spoil(run: Training) -> None:
    """Other weights, so that a test fails if they are not loaded."""
    with torch.no_grad():
        for group in run.optimizer.param_groups:
            for parameter in group["params"]:
                local_part(parameter).fill_(7.0)


def contents(path: str) -> dict[str, Any]:
    """All that is in a checkpoint."""
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    state: dict[str, Any] = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        if isinstance(value, dcp.metadata.TensorStorageMetadata)
        else None
        for key, value in saved.items()
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state


def saved_while_training(path: str, broken: str) -> tuple[State, State, str]:
    """The state when an asynchronous save began, and the one that it saved: steps went on while it
    wrote. Then the error of one that cannot write.
    """
    run = pipelined(2, 2)
    run.steps(2)
    progress = run.progress
    wanted = run.run.pipeline.full_state_dict()
    run.checkpoint.save_async(path)
    run.steps(2)
    run.checkpoint.wait()
    run.checkpoint.load(path)
    assert run.progress == progress
    got = run.run.pipeline.full_state_dict()
    run.checkpoint.save_async(broken)
    run.steps(1)
    try:
        run.checkpoint.save(path)
    except PipecompileError as error:
        return wanted, got, str(error)
    return wanted, got, ""


def within_a_larger_one(path: str) -> bool:
    """Whether torch's own functions save and load it beside something else."""
    run = pipelined(2, 2)
    run.steps(2)
    wanted = copy.deepcopy((run.progress, run.checkpoint.state_dict()))
    dcp.save({"app": run.checkpoint, "mine": 5}, checkpoint_id=path)
    run.steps(1)
    beside = {"app": run.checkpoint, "mine": 0}
    dcp.load(beside, checkpoint_id=path)
    got = run.checkpoint.state_dict()
    same = all(
        torch.equal(got[key], value) if isinstance(value, Tensor) else True
        for key, value in wanted[1].items()
    )
    return same and run.progress == wanted[0] and beside["mine"] == 5


def disagreeing(path: str) -> tuple[str, str]:
    """The error if the copies of a tied parameter differ, and the one in a minibatch."""
    run = pipelined(4, 1)
    run.run.step(accumulate=True)
    messages = [error_of(run, path)]
    run.run.pipeline.zero_grad()
    named = dict(run.run.pipeline.named_parameters())
    if torch.distributed.get_rank() == 3:
        named["table.weight"].data[0, 0] += 1e-9
    return error_of(run, path), messages[0]


def error_of(run: Training, path: str) -> str:
    """What saving raises."""
    try:
        run.checkpoint.save(path)
    except PipecompileError as error:
        return str(error)
    return ""


def generated(path: str | None, load: str | None) -> list[float]:
    """Two random numbers of this process, drawn after saving or loading."""
    run = pipelined(2, 1) if torch.distributed.get_world_size() == 2 else pipelined(4, 1)
    torch.manual_seed(torch.distributed.get_rank())
    if path is not None:
        run.checkpoint.save(path)
    if load is not None:
        run.checkpoint.load(load)
    return torch.rand(2).tolist()


def places(replicas: int, position: int | None, path: str) -> int | str:
    """Save with another place in the data on each replica, or load; the place afterwards."""
    run = pipelined(4 // replicas, replicas)
    if position is not None:
        run.checkpoint.data = position + run.run.replica
        run.checkpoint.save(path)
        return run.checkpoint.data
    try:
        run.checkpoint.load(path)
    except PipecompileError as error:
        return str(error)
    return run.checkpoint.data


def weights_in_a_file(file: str) -> tuple[State, list[str], bool]:
    """Write weights to a safetensors file and read them back: all of them on rank 0, the names that
    this rank read, and whether its weights are those from before.
    """
    pipeline = pipelined(4, 1).run.pipeline
    whole = pipeline.full_state_dict()
    pipeline.save_safetensors(file)
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    for parameter in pipeline.parameters():
        nn.init.zeros_(parameter)
    read: list[str] = []

    def observed(*args: Any, **options: Any) -> Any:
        opened = safe_open(*args, **options)
        return _Observed(opened, read)

    with patch("safetensors.safe_open", observed):
        pipeline.load_safetensors(file)
    same = all(torch.equal(before[name], value) for name, value in pipeline.state_dict().items())
    return whole, sorted({*read}), same


def a_file_without(name: str, file: str) -> str:
    """What this rank says of a file of weights that has all but `name`."""
    pipeline = pipelined(2, 1).run.pipeline
    state = pipeline.full_state_dict()
    if state is not None:
        save_file({n: value.clone() for n, value in state.items() if n != name}, file)
    dist.barrier()
    try:
        pipeline.load_safetensors(file)
    except InputError as error:
        return str(error)
    return ""


class _Observed:
    """An open file that notes which tensors are read."""

    def __init__(self, opened: Any, read: list[str]) -> None:
        self._opened, self._read = opened, read

    def __enter__(self) -> _Observed:
        self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        names: list[str] = self._opened.keys()
        return names

    def get_tensor(self, name: str) -> Tensor:
        self._read.append(name)
        tensor: Tensor = self._opened.get_tensor(name)
        return tensor
