"""Checkpoints of training runs: everything that a run needs to go on, whatever the cut.

A checkpoint is one of torch.distributed.checkpoint, a folder. Its keys are of the original model
(run_state.py), so that any number of ranks and replicas, and the unsplit model too, can write and
read it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.lr_scheduler import LRScheduler

from pipecompile.errors import InputError, PipecompileError
from pipecompile.runtime import world
from pipecompile.training.run_state import RunState, given
from pipecompile.training.saved_keys import SavedKeys
from pipecompile.training.saved_versions import SavedVersions
from pipecompile.training.training_run import HeldState, ModelRun, TrainingRun, WholeModel

__all__ = ["Checkpoint"]


class Checkpoint:
    """The state of a training run, to be saved and loaded; a Stateful of
    torch.distributed.checkpoint.

    `pipeline.checkpoint(…)` makes the one of a pipeline, and `Checkpoint.of_model` the one of an
    unsplit model. Each reads what the other writes. Make it once, and call its methods on all
    ranks.

    `data` says where the run is in its data: a number, another value that can be pickled, or an
    object with `state_dict` and `load_state_dict`, for each replica. `load` loads it into the
    object, or leaves the saved value here.
    """

    def __init__(
        self,
        model: nn.Module,
        held: HeldState,
        run: TrainingRun,
        *,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        schedulers: Sequence[LRScheduler] = (),
        scaler: GradScaler | None = None,
        data: Any = None,
        versions: SavedVersions | None = None,
        check_complete: Callable[[], None] = lambda: None,
    ) -> None:
        self._state = RunState(model, held, run, optimizers, schedulers, scaler, data, versions)
        self._run = run
        self._check_complete = check_complete
        self._group: dist.ProcessGroup | None = None
        self._writing: Future[Any] | None = None

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: LRScheduler | None = None,
        scaler: GradScaler | None = None,
        *,
        data: Any = None,
    ) -> Self:
        """Return the checkpoint of an unsplit model in one process.

        Set its `steps`, for a pipeline that goes on from there. Dropout of the unsplit model itself
        draws from the generator of torch.
        """
        return cls(
            model,
            WholeModel(),
            ModelRun(model),
            optimizers=given(optimizer),
            schedulers=given(scheduler),
            scaler=scaler,
            data=data,
        )

    @property
    def steps(self) -> int:
        """The number of steps that the run has taken."""
        return self._run.steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._run.steps = steps

    @property
    def data(self) -> Any:
        """Where the run is in its data."""
        return self._state.data

    @data.setter
    def data(self, data: Any) -> None:
        self._state.data = data

    # -- files

    def save(self, path: str | Path) -> None:
        """Write the checkpoint to the folder `path`, in place of one that is there.

        Of what several ranks hold, the first one writes it. InputError if ranks disagree
        about a tied parameter, or if steps have put gradients aside.
        """
        self.wait()
        self._run.meet(f"the save of a checkpoint to {_checked(path)}")
        written = self._written()
        # Only now that nothing is refused: until then the old checkpoint can still be read.
        self._drop(path)
        _silence_warnings()
        with _failing_as("written"):
            state_dict_saver.save(
                written, checkpoint_id=path, no_dist=not self._state.is_distributed
            )

    def save_async(self, path: str | Path) -> None:
        """Write the checkpoint as `save` does, but return when the tensors are copied to the host.

        A thread writes the copies. The next `save`, `save_async` or `load` waits for it, and so
        does `wait`: call that at the end of the run. They raise the error if it could not write.
        """
        self.wait()
        self._run.meet(f"the asynchronous save of a checkpoint to {_checked(path)}")
        if self._group is None and self._state.is_distributed:
            # In the group of the steps, the thread's messages would get between theirs. And groups
            # of NCCL do not carry what is on the host.
            self._group = dist.new_group(backend="gloo")
        written = self._written()
        # All ranks plan together what they write, so none has begun when this one drops the list.
        self._drop(path)
        _silence_warnings()
        writing = state_dict_saver.async_save(
            written,
            checkpoint_id=path,
            process_group=self._group,
            no_dist=not self._state.is_distributed,
        )
        if isinstance(writing, state_dict_saver.AsyncSaveResponse):
            self._writing = writing.upload_completion
        else:
            self._writing = writing

    def wait(self) -> None:
        """Wait until `save_async` has written; raise the error if it could not."""
        writing, self._writing = self._writing, None
        if writing is not None:
            with _failing_as("written"):
                writing.result()

    def load(self, path: str | Path) -> None:
        """Load the checkpoint in the folder `path`, whatever number of ranks saved it.

        Each rank reads its own part. Gradients are dropped. Random generators are restored if there
        are as many processes as there were; what a pipeline draws does not depend on them.

        InputError if keys are missing, or are of another model, or of an optimizer or a scheduler
        of another kind: then nothing has changed.
        """
        self.wait()
        self._run.meet(f"the loading of the checkpoint {_checked(path)}")
        with self._together():
            saved = SavedKeys(path)
            # Before the weights, which are read in place.
            problem = self._state.problem(saved)
            # A rank that has a problem already does not read here, so this must not be a read of
            # all ranks together; then all ranks hear of all problems, and raise the first one.
            problem = problem or self._state.settings_problem(self._settings(path, saved))
        for message in world.gather(problem) if self._state.is_distributed else [problem]:
            if message is not None:
                raise InputError(message)
        state = self._state.readable(saved)
        _silence_warnings()
        with _failing_as("read"):
            state_dict_loader.load(
                state, checkpoint_id=path, no_dist=not self._state.is_distributed
            )
        with self._together():
            self.load_state_dict(state)

    # -- torch.distributed.checkpoint.Stateful

    def state_dict(self) -> dict[str, Any]:
        """Return what this process holds, as part of a larger checkpoint of one's own.

        `dcp.load` reads into the tensors of this dict. So it needs as many processes as there were,
        and an optimizer that has taken a step; `load` needs neither. And `dcp.save` writes what
        several ranks hold from any of them: buffers may be those of any replica.
        """
        self._check_savable()
        return {entry.key: entry.value for entry in self._state.entries()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set everything to `state`, which has the keys of `state_dict`."""
        self._state.load(state)

    # -- what is saved

    def _together(self) -> AbstractContextManager[None]:
        """Return the context in which what fails on one rank, such as a file that only others have,
        fails on all.
        """
        return world.failing_together() if self._state.is_distributed else nullcontext()

    def _check_savable(self) -> None:
        self._check_complete()
        self._state.check_ties()

    def _written(self) -> dict[str, Any]:
        self._check_savable()
        return {entry.key: entry.value for entry in self._state.entries() if entry.is_written}

    def _drop(self, path: str | Path) -> None:
        """Make what is in `path` no checkpoint, so that a save that is interrupted leaves none: the
        old list of contents with new contents would be loaded.
        """
        if self._state.process == 0:
            with suppress(OSError):  # what writes raises it on all ranks
                Path(path, ".metadata").unlink(missing_ok=True)

    # -- what is loaded

    def _settings(self, path: str | Path, saved: SavedKeys) -> dict[str, Any]:
        """Return the entries of a checkpoint that are no tensors: of optimizers, of schedulers and
        of the data.
        """
        entries = dict.fromkeys(self._state.settings_keys(saved))
        _silence_warnings()
        with _failing_as("read"):
            # Each rank for itself, see `load`.
            state_dict_loader.load(entries, checkpoint_id=path, no_dist=True)
        return entries


def _checked(path: str | Path) -> Path:
    """Return the path of a checkpoint; InputError if it is none."""
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a checkpoint is a folder, but a {type(path).__name__} was given")
    return Path(path)


@contextmanager
def _failing_as(done: str) -> Iterator[None]:
    """Raise the error of a rank as one of ours: torch's own is no Exception, which users catch."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise PipecompileError(
            f"a checkpoint could not be {done}; rank {rank}: {type(failure).__name__}: {failure}"
        ) from error


def _silence_warnings() -> None:
    """Silence torch about one process and about a folder that is written once more; not only for a
    block, because threads write too.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
