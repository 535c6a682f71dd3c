"""The state of an optimizer by the names of parameters, for checkpoints.

An optimizer numbers its parameters, and the numbers change with the ranks and with how parameters
are grouped. Names do not, so that the state of any optimizer of the same class goes to any other:

    optim.layer.weight.exp_avg      a slot: a tensor (or value) that is kept for one parameter
    hyperparameters.layer.weight    the options of its group, such as lr, the names of its slots,
                                    and the class of the optimizer
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.training.host_optimizer import HostOptimizer

__all__ = ["NamedOptimizerState"]

# Keys of a group that are not options.
_MEMBERS = ("params", "param_names")


@dataclass(frozen=True)
class _SteppedParameter:
    """A parameter of an optimizer: its name, its number there, and the index of its group."""

    name: str
    number: int
    group: int
    parameter: nn.Parameter


class NamedOptimizerState:
    """The state of `optimizer`, whose parameters are among those that are `named`."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Iterable[tuple[str, nn.Parameter]],
    ) -> None:
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in named}

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that the optimizer steps, by name."""
        return {member.name: member.parameter for member in self._members()}

    def entries(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the keys of a checkpoint with the name of the parameter that each belongs to, and
        the value.
        """
        packed = self._optimizer.state_dict()
        for member in self._members(packed):
            name, slots = member.name, packed["state"].get(member.number, {})
            options = _options(packed["param_groups"][member.group])
            # A tuple, because torch's checkpoints take dicts apart.
            yield f"hyperparameters.{name}", name, (options, tuple(slots), self._kind)
            for slot, value in slots.items():
                wrapped = value if isinstance(value, Tensor) else (value,)
                yield f"optim.{name}.{slot}", name, wrapped

    @property
    def option_keys(self) -> list[str]:
        """The keys of options, which say the class of the optimizer too."""
        return [f"hyperparameters.{name}" for name in self.parameters]

    def problem(self, state: Mapping[str, Any]) -> str | None:
        """Return what is wrong with the options in `state`; None if it can be loaded.

        An optimizer of another class has other slots, or its slots mean something else; and
        parameters of one group have the same options.
        """
        first: dict[int, tuple[str, dict[str, Any]]] = {}
        for member in self._members():
            options, _, *saved = state[f"hyperparameters.{member.name}"]
            # Checkpoints of before do not say the class.
            if saved and saved[0] != self._kind:
                return (
                    f"the checkpoint has the state of {saved[0]}, but the optimizer is "
                    f"{self._kind}; make one like that which saved it, or load the weights alone: "
                    "a checkpoint without an optimizer"
                )
            # Saved by an optimizer with two groups and loaded into one with one group, two
            # learning rates would have to become one.
            name, expected = first.setdefault(member.group, (member.name, options))
            if (different := _other_options(name, expected, member.name, options)) is not None:
                return different
        return None

    @property
    def _kind(self) -> str:
        """The class of what steps: an optimizer on the host steps as the one that it holds."""
        stepping = self._optimizer
        if isinstance(stepping, HostOptimizer):
            stepping = stepping.stepping
        return type(stepping).__name__

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state from the keys of a checkpoint in which there is no `problem`.

        InputError if slots are missing there.
        """
        packed = self._optimizer.state_dict()
        slots_by_number: dict[int, dict[str, Any]] = {}
        options_by_group: dict[int, dict[str, Any]] = {}
        for member in self._members(packed):
            options, slots, *_ = state[f"hyperparameters.{member.name}"]
            options_by_group.setdefault(member.group, options)
            # Before its first step an optimizer has no slots, and must make them by itself as it
            # steps.
            if slots:
                slots_by_number[member.number] = _slots_of(member.name, slots, state)
        for index, options in options_by_group.items():
            packed["param_groups"][index].update(options)
        # By the optimizer's own method, which moves slots to the device of their parameter.
        self._optimizer.load_state_dict({**packed, "state": slots_by_number})

    def _members(self, packed: Mapping[str, Any] | None = None) -> Iterator[_SteppedParameter]:
        packed = self._optimizer.state_dict() if packed is None else packed
        groups = zip(self._optimizer.param_groups, packed["param_groups"], strict=True)
        for index, (group, numbered) in enumerate(groups):
            # torch numbers through all groups: of (a, b) and (c) the packed groups have [0, 1]
            # and [2], and the packed state is by these numbers.
            for parameter, number in zip(group["params"], numbered["params"], strict=True):
                if id(parameter) not in self._names:
                    raise InputError(
                        f"group {index} of the optimizer has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not one of this process; make the "
                        "optimizer from pipeline.parameters() or pipeline.named_parameters()"
                    )
                yield _SteppedParameter(self._names[id(parameter)], number, index, parameter)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _MEMBERS}


def _slots_of(name: str, slots: Iterable[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved slots of a parameter."""
    values = {}
    for slot in slots:
        key = f"optim.{name}.{slot}"
        if key not in state:
            raise InputError(
                f"the checkpoint has {key}, but the optimizer has no state yet that "
                "torch.distributed.checkpoint.load could read it into; read it with "
                "Checkpoint.load(path), which makes that state"
            )
        value = state[key]
        values[slot] = value if isinstance(value, Tensor) else value[0]
    return values


def _other_options(
    first: str, expected: Mapping[str, Any], name: str, options: Mapping[str, Any]
) -> str | None:
    """Return in which option two parameters of one group differ; None if in none."""
    different = [
        key
        for key in sorted({*expected, *options})
        if not _equal(expected.get(key), options.get(key))
    ]
    if not different:
        return None
    key = different[0]
    return (
        f"parameters {first!r} and {name!r} are in one group of the optimizer, but in the "
        f"checkpoint they have {key}={expected.get(key)} and {key}={options.get(key)}; group "
        "parameters as they were when it was saved"
    )


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    return bool(left == right)
