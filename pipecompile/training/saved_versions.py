"""The older versions of weights that a drained asynchronous run still reads, for checkpoints.

    versions                    under which rule they are, and after how many minibatches
    version.2.layer.weight      the value of a parameter two updates before the newest

The newest version is what the model has. So other schedules, other cuts and the unsplit model read
the checkpoint too, and go on from the newest weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.training.continuous_training import ContinuousTraining

__all__ = ["SavedVersions"]

PREFIX = "version."


class SavedVersions:
    """The versions of `training`, by the names of this process's parameters."""

    def __init__(
        self, training: ContinuousTraining, named: Iterable[tuple[str, nn.Parameter]]
    ) -> None:
        self._training = training
        self._parameters = dict(named)

    @property
    def run(self) -> tuple[Any, ...]:
        """The rule, its sizes, and how many minibatches have gone back.

        Of a run that is over these are 0: what is loaded from there begins with version 0.
        """
        done = 0 if self._training.is_over else self._training.done
        return (*self._training.weights.conditions, done)

    def entries(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the keys of a checkpoint with the name of the parameter, and the value."""
        names = {parameter: name for name, parameter in self._parameters.items()}
        for weights in self._training.weights.by_owner.values():
            versions = weights.versions
            for version, values in versions.live.items():
                # With versions 3, 4 and 5 of `w` these are `version.2.w` and `version.1.w`; 5 is
                # `model.w`.
                lag = versions.newest - version
                for parameter, value in zip(versions.parameters, values, strict=True):
                    if lag:
                        yield f"{PREFIX}{lag}.{names[parameter]}", names[parameter], value

    def readable(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """Return those of the saved keys that this process reads, with tensors to read into."""
        state = {}
        for key in saved:
            parameter = self._parameters.get(key.removeprefix(PREFIX).partition(".")[2])
            if parameter is not None:
                state[key] = torch.empty_like(parameter, requires_grad=False)
        return state

    def load(self, state: Mapping[str, Any]) -> None:
        """Let the training go on from there; from a run of another kind it begins with version 0.

        InputError if the versions are those of another rule or cut.
        """
        if self._training.is_over:
            return  # the newest weights are all that it has
        # A checkpoint of a synchronous run has none: its weights are version 0 of this run.
        here = self._training.weights.conditions
        *rule, done = state.get("versions", (*here, 0))
        if tuple(rule) != here:
            schedule, stages, microbatches, *replicas = rule
            on = f" on {','.join(map(str, replicas))} ranks" if replicas else ""
            raise InputError(
                f"the checkpoint has the weight versions of {schedule!r} with k={stages}{on} and "
                f"microbatches={microbatches}, but this run is {here}; go on under "
                "the same, or load it before train(batches, factory) to begin with its newest "
                "weights"
            )
        older: dict[int, dict[int, tuple[Tensor, ...]]] = defaultdict(dict)
        names = {parameter: name for name, parameter in self._parameters.items()}
        for owner, weights in self._training.weights.by_owner.items():
            parameters = [names[parameter] for parameter in weights.versions.parameters]
            for lag in self._training.weights.older_versions(owner, done):
                keys = [f"{PREFIX}{lag}.{name}" for name in parameters]
                older[owner][lag] = tuple(state[key] for key in keys)
        self._training.restore(done, older)
