"""What a user hands over: a model with one minibatch, a loss and targets; from Python or from a TARGET."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile import __version__
from pipecompile.cost_models.table import CostFunction
from pipecompile.errors import InputError
from pipecompile.frontend.signature import Arguments, arguments_of
from pipecompile.graph.propagation import has_values, without_values

__all__ = ["LossFunction", "Target", "load_target", "made_with", "model_loss", "sum_of_squares"]

LossFunction = Callable[[Any, Any], Tensor]
FIELDS = ("model", "sample_input", "sample_kwargs", "loss_fn", "targets", "optimizer")


@dataclass(frozen=True)
class Target:
    """A model and one minibatch; `loss_fn(output, target)` gives the scalar to train, None the model's own `loss`.

    `costs` is a function of the user's that prices nodes, for the costs called "function". `optimizer` names the one
    whose state counts, see `memory_model/optimizer.py`.
    """

    model: nn.Module
    call: Arguments
    loss_fn: LossFunction | None = None
    targets: Any = None
    costs: CostFunction | None = None
    optimizer: str | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is; costs are measured there. Fake tensors are of the meta device for us."""
        first = next(self.model.parameters(), torch.empty(0))
        return torch.device("meta") if isinstance(first, FakeTensor) else first.device

    @property
    def has_values(self) -> bool:
        """Whether it can run: neither the model nor the minibatch is on the meta device or of fake tensors."""
        state = (*self.model.parameters(), *self.model.buffers())
        return all(
            map(has_values, (*state, *_tensors(self.call.args, self.call.kwargs, self.targets)))
        )

    def check_values(self, purpose: str) -> None:
        """InputError unless it can run, which `purpose` needs."""
        if not self.has_values:
            raise InputError(
                f"{purpose} runs the model, but it, its input or its targets are on the meta device or "
                "of fake tensors; give values, or plan and profile it with costs flops or roofline:DEVICE"
            )

    def on_device(self, tensor: Tensor) -> Tensor:
        """`tensor` of the minibatch, beside the model."""
        return tensor.to(self.device) if has_values(tensor) else without_values(tensor, self.device)

    @property
    def trained_by(self) -> LossFunction:
        """The loss of the step."""
        return self.loss_fn or model_loss

    @staticmethod
    def of(value: Any, origin: str) -> Target:
        """Reads what a factory returned: (model, sample_input) or a mapping."""
        if isinstance(value, tuple) and len(value) == 2:
            value = {"model": value[0], "sample_input": value[1]}
        if not isinstance(value, Mapping) or not {"model", "sample_input"} <= value.keys() <= set(
            FIELDS
        ):
            raise InputError(
                f"{origin} must return (model, sample_input) or a mapping with model, sample_input and optionally "
                f"{', '.join(FIELDS[2:])}; it returned {_described(value)}"
            )
        if not isinstance(value["model"], nn.Module):
            raise InputError(
                f"{origin}: model is a {type(value['model']).__name__}, but must be an nn.Module"
            )
        call = arguments_of(value["model"], value["sample_input"], value.get("sample_kwargs"))
        optimizer = _optimizer_name(value.get("optimizer"), value["model"], origin)
        return Target(
            value["model"], call, value.get("loss_fn"), value.get("targets"), optimizer=optimizer
        )


def _optimizer_name(value: Any, model: nn.Module, origin: str) -> str | None:
    """The name of an optimizer given as a name, as a class or as one that is ready to step."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, torch.optim.Optimizer):
        _check_state(value, model, origin)
    if isinstance(value, torch.optim.SGD) and any(
        group["momentum"] for group in value.param_groups
    ):
        return "momentum"
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, torch.optim.Optimizer):
        return kind.__name__.lower()
    raise InputError(
        f"{origin}: optimizer is a {kind.__name__}, but must be a name or a torch.optim.Optimizer"
    )


def _check_state(optimizer: torch.optim.Optimizer, model: nn.Module, origin: str) -> None:
    """InputError if it holds other state than its name says: by its options, or for the parameters that it steps."""
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    options = [] if isinstance(optimizer, torch.optim.SGD) else ["amsgrad", "centered", "momentum"]
    given = [f"{name}={group[name]}" for name in options for group in groups if group.get(name)]
    estimate = f"give optimizer={kind.lower()!r}, its name, to count it"
    if given:
        raise InputError(
            f"{origin}: optimizer is {kind} with {given[0]}, whose further state is not counted; {estimate} without"
        )
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    left = [
        name for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped
    ]
    if left:
        raise InputError(
            f"{origin}: optimizer, {kind}, does not step {left[0]!r} of the model (nor {len(left) - 1} more); "
            f"freeze what is not trained (requires_grad_(False)), or {estimate} for all trained parameters"
        )


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _described(value: Any) -> str:
    return (
        f"a mapping with {sorted(map(str, value))}"
        if isinstance(value, Mapping)
        else f"a {type(value).__name__}"
    )


def load_target(text: str) -> Target:
    """Runs the factory that `package.module:factory` or `path/file.py:factory` names."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise InputError(
            f"{text!r} is not a target; write package.module:factory or path/file.py:factory"
        )
    module = _from_file(Path(place), text) if place.endswith(".py") else _by_name(place, text)
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_")
        ]
        raise InputError(
            f"{text}: there is no factory {name!r}; {place} defines {', '.join(known) or 'nothing'}"
        )
    try:
        value = factory()
    except Exception as error:
        raise InputError(f"{text}: the factory failed: {type(error).__name__}: {error}") from error
    return Target.of(value, text)


def _by_name(place: str, text: str) -> ModuleType:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise InputError(
            f"{text}: {place} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        sys.path.pop(0)


def _from_file(path: Path, text: str) -> ModuleType:
    if not path.is_file():
        raise InputError(f"{text}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its functions are found again by name, as torch and pickling expect.
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise InputError(
            f"{text}: {path} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    return module


def made_with(target: Target) -> str:
    """The versions and the device that a plan of `target` comes from, in one line."""
    return f"made with pipecompile {__version__}, torch {torch.__version__}, on {target.device}"


def model_loss(output: Any, target: Any) -> Tensor:
    """The loss that the model computed itself, as its `loss` output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim():
        raise InputError(
            "the model has no `loss` output that is a scalar tensor; give loss_fn=…, or pass the labels to the model"
        )
    return loss


def sum_of_squares(output: Any, target: Any) -> Tensor:
    """A loss for any model, to compare gradients by: the sum of the squares of all its outputs."""
    values: Sequence[Tensor] = [
        leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)
    ]
    squares = [value.float().square().sum() for value in values if value.requires_grad]
    if not squares:
        raise InputError("no output of the model carries a gradient, so there is nothing to train")
    return torch.stack(squares).sum()
