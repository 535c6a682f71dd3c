"""The part of a model's state that this process holds, under the names of the original model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.graph.storages import is_irregular
from pipecompile.memory_model.replicas import buckets
from pipecompile.runtime import world
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.model_state import full_state
from pipecompile.runtime.shards import divided_like, gradient_parts
from pipecompile.training.checkpoint_weights import CheckpointWeights
from pipecompile.training.safetensors_file import SafetensorsWeights, check_installed, write_weights

__all__ = ["HeldModel"]


class HeldModel:
    """Parameters and buffers of the stages on this process; what a `Pipeline` is for an optimizer
    and for files.

    `model` has those of the loss too, whose state has the names `loss_names`.
    """

    def __init__(
        self, model: nn.Module, share: LocalShare, loss_names: frozenset[str] = frozenset()
    ) -> None:
        self._model = model
        self._share = share
        self._loss_names = loss_names

    def drain(self) -> None:
        """Let what is in flight go back, where there is something: weights change until then."""

    def meet(self, what: str) -> None:
        """Wait until all ranks come to `what`, where there are others."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this process's parameters by their first name in the model; a tied one on every
        rank that holds it.
        """
        for name, parameter in self._model.named_parameters():
            if self._share.holds(name):
                yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This process's parameters, for an optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def _counted_gradients(self) -> Sequence[Tensor]:
        """Return the gradients, or parts of them, that this process gives to what is summed over
        ranks, such as their norm: each of the model's is counted by one process.
        """
        # Each rank with a tied parameter has the sum of its gradients. Of one that is divided
        # each process gives its part, and the norm of the parts' norms is the norm of the whole.
        named = self.named_parameters()
        return gradient_parts(each for name, each in named if self._share.counts(name))

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """This process's buffers by their first name in the model."""
        return (
            (name, buffer)
            for name, buffer in self._model.named_buffers()
            if self._share.holds(name)
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return this process's part of the model's state, under the original names and aliases;
        of what is sharded it is a DTensor.
        """
        state = self._model.state_dict()
        return {name: value for name, value in state.items() if self._share.holds(name)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a checkpoint of the original model; InputError names what is missing, unknown or of
        another shape. One that has nothing of the loss leaves the loss as it is.
        """
        if not isinstance(state, Mapping):
            raise InputError(
                f"a state dict maps names to tensors, but a {type(state).__name__} was given"
            )
        self.drain()
        model = self._model
        own, known = self.state_dict(), model.state_dict().keys()
        # Such a state is that of the model alone, or is older than a loss with parameters.
        if self._loss_names.isdisjoint(state):
            own = {name: value for name, value in own.items() if name not in self._loss_names}
        # All before the first write: a state dict is loaded as a whole, or nothing of it.
        _refuse("are missing from", own.keys() - state.keys())
        _refuse("are not in the model, but in", state.keys() - known)
        shaped, unreadable = set[str](), set[str]()
        for name, value in own.items():
            saved = state[name]  # which may be read from a file
            if _shape_of(value) != _shape_of(saved):
                shaped.add(name)
            elif isinstance(saved, Tensor) and (saved.is_meta or is_irregular(saved)):
                unreadable.add(name)
        _refuse("have another shape in", shaped)
        _refuse("have no values, or are not dense, in", unreadable)
        # Only what is held is read, a part at a time: `state` may be a file of all weights, which
        # no rank could hold, nor its own ones twice.
        names = list(own)
        sizes = [value.nbytes if isinstance(value, Tensor) else 0 for value in own.values()]
        for run in buckets(sizes, [None] * len(sizes)):
            few = names[run.start : run.stop]
            model.load_state_dict(
                {name: divided_like(state[name], own[name]) for name in few}, strict=False
            )

    def full_state_dict(self) -> dict[str, Any] | None:
        """Return the whole model's state on rank 0, on the CPU, for the unsplit model; None
        elsewhere.

        Call it on all ranks.
        """
        self.drain()
        self.meet("the gathering of the whole state")
        return full_state(self._model, self._share)

    def save_safetensors(self, path: str | Path) -> None:
        """Write the whole model's weights to the file `path` from rank 0, under the original names.

        Call it on all ranks. A tensor with several names is written once.
        """
        check_installed()
        # All ranks send their parts, before only the first one writes.
        state = self.full_state_dict()
        world.run_on_first(lambda: write_weights(state or {}, path))

    def load_safetensors(self, path: str | Path) -> None:
        """Load weights from a safetensors file, from the index of several, or from their folder.

        Each rank reads only what it holds. Call it on all ranks with the same path: if one lacks
        something, all raise.
        """
        check_installed()
        if not isinstance(path, str | PathLike):
            raise InputError(f"weights are in a file, but a {type(path).__name__} was given")
        names = self._model.state_dict()
        self.meet(f"the loading of weights from {path}")
        with world.failing_together():
            self.load_state_dict(SafetensorsWeights(path, names, self._share.first_names))

    def _load_checkpoint_weights(self, path: str | Path) -> None:
        """Load weights from a checkpoint of torch that has nothing of a run; as above."""
        names = self._model.state_dict()
        with world.failing_together():
            self.load_state_dict(CheckpointWeights(path, names, self._share.first_names))


def _shape_of(value: Any) -> Any:
    """Return the shape of a tensor; None for a value that is no tensor."""
    return value.shape if isinstance(value, Tensor) else None


def _refuse(what: str, names: set[str]) -> None:
    if names:
        listed = ", ".join(sorted(names)[:5]) + (
            f" and {len(names) - 5} more" if len(names) > 5 else ""
        )
        raise InputError(f"{listed} {what} the state dict; it must be one of the original model")
