"""The state of a training run, by keys of the original model: what of it this process saves, and
reads.

    model.layer.weight              parameters and buffers, by every name that they have
    optim.layer.weight.exp_avg      the optimizer's slots
    hyperparameters.layer.weight    the options of the optimizer's group, such as lr
    scheduler, scaler, steps, seed  one for all ranks
    data.0                          where a replica is in its data
    generators.0                    the states of a process's random generators
    versions, version.1.layer.weight    older weights of an asynchronous run (saved_versions.py)

Values that are no tensors are tuples, because torch's checkpoints take dicts and lists apart.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from pipecompile.errors import InputError
from pipecompile.runtime import world
from pipecompile.runtime.model_state import different_copies
from pipecompile.runtime.random_generators import generator_states, restore_generators
from pipecompile.training.optimizer_state import NamedOptimizerState
from pipecompile.training.saved_keys import SavedKeys
from pipecompile.training.saved_versions import SavedVersions
from pipecompile.training.training_run import HeldState, TrainingRun

__all__ = ["RunState", "StateEntry", "given"]

_Part = TypeVar("_Part")


class StateEntry(NamedTuple):
    """A key of a checkpoint with this process's value, and whether `save` writes it from here."""

    key: str
    value: Any
    is_written: bool


class RunState:
    """What a checkpoint is of: weights, optimizers, schedulers, counters, generators, and the place
    in the data.
    """

    def __init__(
        self,
        model: nn.Module,
        held: HeldState,
        run: TrainingRun,
        optimizers: Sequence[torch.optim.Optimizer],
        schedulers: Sequence[LRScheduler],
        scaler: GradScaler | None,
        data: Any,
        versions: SavedVersions | None,
    ) -> None:
        _check_parts(optimizers, schedulers, scaler)
        self.data = data
        self._model = model
        self._held = held
        self._run = run
        self._optimizers = tuple(optimizers)
        self._schedulers = tuple(schedulers)
        self._scaler = scaler
        self._versions = versions

    # -- where this process is

    @property
    def is_distributed(self) -> bool:
        """Whether several processes have the run."""
        return self._held.place.is_distributed

    @property
    def process(self) -> int:
        """The number of this process."""
        return world.rank() if self.is_distributed else 0

    @property
    def _processes(self) -> int:
        return world.size() if self.is_distributed else 1

    @property
    def _device(self) -> torch.device:
        first = next((parameter for _, parameter in self._own_parameters()), torch.empty(0))
        return first.device

    # -- what is saved

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._model.named_parameters():
            if self._held.holds(name):
                yield name, parameter

    def _own_state(self) -> Iterator[tuple[str, Any]]:
        for name, value in self._model.state_dict().items():
            if self._held.holds(name):
                yield name, value

    def _named_optimizer(self, optimizer: torch.optim.Optimizer) -> NamedOptimizerState:
        return NamedOptimizerState(optimizer, self._own_parameters())

    def check_ties(self) -> None:
        """Raise InputError if ranks disagree about a tied parameter."""
        holders = self._held.holders
        # All ranks take part in the comparison or none does, since all know the same holders.
        if not self.is_distributed or all(len(stages) < 2 for stages in holders.values()):
            return
        tied = {name: p for name, p in self._own_parameters() if len(holders.get(name, ())) > 1}
        for name, (left, right) in different_copies(tied).items():
            raise InputError(
                f"tied parameter {name!r} differs between ranks {left} and {right}; give it the "
                "same options in the optimizers of both, and change it nowhere else"
            )

    def entries(self) -> Iterator[StateEntry]:
        """Yield what this process holds."""
        place, counts = self._held.place, self._held.counts
        for name, value in self._own_state():
            yield StateEntry(f"model.{name}", _wrapped(value), counts(name))
        for optimizer in self._optimizers:
            for key, name, value in self._named_optimizer(optimizer).entries():
                yield StateEntry(key, value, counts(name))
        for key, name, value in () if self._versions is None else self._versions.entries():
            yield StateEntry(key, value, counts(name))
        for key, value in self._common():
            yield StateEntry(key, value, self.process == 0)
        if self.data is not None:
            is_object = hasattr(self.data, "load_state_dict")
            value = self.data.state_dict() if is_object else self.data
            # All ranks of a pipeline read the same batches, so its first one speaks for it.
            yield StateEntry(f"data.{place.replica}", (value,), place.rank == 0)
        # With the number of processes: with another number nobody could say whose state goes
        # where.
        generators = (self._processes, generator_states(self._device))
        yield StateEntry(f"generators.{self.process}", generators, True)

    def _common(self) -> Iterator[tuple[str, Any]]:
        """Yield the entries that are the same on all ranks."""
        if self._schedulers:
            # The schedulers of all stages have stepped alike.
            first = self._schedulers[0]
            yield "scheduler", (first.state_dict(), _scheduler_kind(first))
        if self._scaler is not None:
            yield "scaler", (self._scaler.state_dict(),)
        yield "steps", self._run.steps
        yield "seed", self._run.seed
        if self._versions is not None:
            yield "versions", self._versions.run

    # -- what is loaded

    def _required(self, saved: SavedKeys) -> Iterator[str]:
        """Yield the keys that a checkpoint must have for this process."""
        yield from (f"model.{name}" for name, _ in self._own_state())
        for optimizer in self._optimizers:
            names = self._named_optimizer(optimizer).parameters
            yield from (f"hyperparameters.{name}" for name in names)
        # Without versions it is of another kind of run, whose weights are version 0 of this one.
        yield from (key for key, _ in self._common() if key != "versions")
        if self.data is not None and not saved.beginning_with("data."):
            yield "data.0"

    def problem(self, saved: SavedKeys) -> str | None:
        """Return why this process cannot load a checkpoint with these keys; None if it can."""
        own = {name: value for name, value in self._own_state() if isinstance(value, Tensor)}
        return saved.problem(self._required(saved), own, self._model.state_dict())

    def settings_keys(self, saved: SavedKeys) -> list[str]:
        """Return the keys that `settings_problem` reads."""
        named = map(self._named_optimizer, self._optimizers)
        keys = [key for each in named for key in each.option_keys]
        scheduler = ["scheduler"] if self._schedulers else []
        return [*keys, *scheduler, *saved.beginning_with("data.")]

    def settings_problem(self, state: Mapping[str, Any]) -> str | None:
        """Return why this run cannot go on from the settings in `state`, of optimizers, schedulers
        and the data; None if it can.
        """
        for optimizer in self._optimizers:
            if (problem := self._named_optimizer(optimizer).problem(state)) is not None:
                return problem
        for scheduler in self._schedulers:
            # Checkpoints of before do not say the class.
            _, *kinds = state["scheduler"]
            if kinds and kinds[0] != _scheduler_kind(scheduler):
                return (
                    f"the checkpoint has the state of {kinds[0]}, but the scheduler is "
                    f"{_scheduler_kind(scheduler)}; make one like that which saved it, or leave "
                    "the scheduler out"
                )
        return self._data_problem(state)

    def readable(self, saved: SavedKeys) -> dict[str, Any]:
        """Return the keys that this process reads, with tensors to read into."""
        state = {f"model.{name}": _wrapped(value) for name, value in self._own_state()}
        common = (key for key, _ in self._common())
        state.update(dict.fromkeys(key for key in common if key != "versions" or key in saved))
        if self._versions is not None:
            state.update(self._versions.readable(saved.beginning_with("version.")))
        for optimizer in self._optimizers:
            parameters = self._named_optimizer(optimizer).parameters
            state.update(dict.fromkeys(f"hyperparameters.{name}" for name in parameters))
            for key in saved.beginning_with("optim."):
                # An optimizer has no slots before its first step, so they get new tensors.
                parameter = parameters.get(key.removeprefix("optim.").rpartition(".")[0])
                if parameter is not None:
                    state[key] = saved.room_for(key, parameter)
        # Those of all replicas: another number of them needs the same place in all.
        state.update(dict.fromkeys(saved.beginning_with("data.")))
        generators = f"generators.{self.process}"
        if generators in saved:
            state[generators] = None
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Set everything to `state`, which has the keys of the entries."""
        if (problem := self.settings_problem(state)) is not None:
            raise InputError(problem)
        # Minibatches in flight would write to the weights that are loaded here, and their
        # gradients are of the old ones.
        self._run.drain()
        named = {key.removeprefix("model."): key for key in _keys(state, "model.")}
        values = {name: _unwrapped(state[key]) for name, key in named.items()}
        self._model.load_state_dict(values, strict=False)
        for optimizer in self._optimizers:
            self._named_optimizer(optimizer).load(state)
        for scheduler in self._schedulers:
            # Each has one of its own, since a scheduler may keep what it is given.
            scheduler.load_state_dict(copy.deepcopy(_unwrapped(state["scheduler"])))
            _fit_to_groups(scheduler)
        if self._scaler is not None:
            self._scaler.load_state_dict(_unwrapped(state["scaler"]))
        self._run.zero_grad()
        self._run.steps, self._run.seed = state["steps"], state["seed"]
        if self._versions is not None:
            self._versions.load(state)
        self._load_data(state)
        processes, generators = state.get(f"generators.{self.process}", (0, {}))
        if processes == self._processes:
            restore_generators(generators, self._device)

    def _own_places(self, state: Mapping[str, Any]) -> list[Any]:
        """Return the places in the data that this replica may go on from."""
        place, keys = self._held.place, _keys(state, "data.")
        own = f"data.{place.replica}"
        # Two replicas at the minibatches 10 and 12 go on as two: each has its own place. As three
        # they could not, unless both were at the same one.
        if len(keys) == place.replicas and own in keys:
            keys = [own]
        return [_unwrapped(state[key]) for key in keys]

    def _data_problem(self, state: Mapping[str, Any]) -> str | None:
        places = self._own_places(state)
        if len(set(map(pickle.dumps, places))) > 1:
            return (
                f"{len(places)} replicas were at different places in their data, from which "
                f"{self._held.place.replicas} cannot go on; save one place for all, such as the "
                "number of minibatches"
            )
        return None

    def _load_data(self, state: Mapping[str, Any]) -> None:
        """Go to this replica's place in the data, or to that of all if their number has changed."""
        for value in self._own_places(state):
            if hasattr(self.data, "load_state_dict"):
                self.data.load_state_dict(value)
            else:
                self.data = value
            return


def given(part: _Part | None) -> tuple[_Part, ...]:
    """Return a tuple of what was given, empty if nothing was."""
    return () if part is None else (part,)


def _check_parts(
    optimizers: Sequence[object], schedulers: Sequence[object], scaler: object
) -> None:
    """Raise InputError for a part of a run that has no state to be saved."""
    parts = {"optimizer": (*optimizers,), "scheduler": (*schedulers,), "scaler": given(scaler)}
    for name, each in ((name, each) for name, values in parts.items() for each in values):
        needed = "param_groups" if name == "optimizer" else "load_state_dict"
        if not hasattr(each, needed):
            raise InputError(
                f"the {name} of a checkpoint is a {type(each).__name__}; give the {name} itself, "
                "or leave it out"
            )


def _keys(state: Mapping[str, Any], prefix: str) -> list[str]:
    return [key for key in state if key.startswith(prefix)]


def _wrapped(value: Any) -> Any:
    """Return a tensor as it is; anything else in a tuple, which torch's checkpoints do not take
    apart.
    """
    return value if isinstance(value, Tensor) else (value,)


def _unwrapped(value: Any) -> Any:
    return value if isinstance(value, Tensor) else value[0]


def _scheduler_kind(scheduler: LRScheduler) -> str:
    """Return the class of a scheduler, with those of the schedulers that it runs."""
    inner = ", ".join(map(_scheduler_kind, getattr(scheduler, "_schedulers", ())))
    return f"{type(scheduler).__name__}({inner})" if inner else type(scheduler).__name__


def _fit_to_groups(scheduler: LRScheduler) -> None:
    """Set what a scheduler lists by group to what this process's groups have.

    The list that was saved is that of one rank, whose groups may be others.
    """
    for inner in getattr(scheduler, "_schedulers", ()):
        _fit_to_groups(inner)
    groups, saved = scheduler.optimizer.param_groups, getattr(scheduler, "_last_lr", ())
    for group, rate in zip(groups, saved if len(saved) == len(groups) else (), strict=False):
        # A group whose parameters are all on other ranks gets no options by their names.
        if not group["params"]:
            group["lr"] = rate
    if hasattr(scheduler, "base_lrs") and all("initial_lr" in group for group in groups):
        scheduler.base_lrs = [group["initial_lr"] for group in groups]
    scheduler._last_lr = [group["lr"] for group in groups]
