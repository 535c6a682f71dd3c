"""What a user hands over: a model with one minibatch, a loss and targets; from Python or from a
TARGET.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, get_args

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipecompile.cost_models.table import CostFunction
from pipecompile.errors import InputError
from pipecompile.frontend.loss_module import loss_to_hold
from pipecompile.frontend.loss_reduction import LossReduction, weighed
from pipecompile.frontend.microbatch import MicrobatchSizes
from pipecompile.frontend.signature import Arguments, InputStructure, arguments_of
from pipecompile.frontend.target_cut import cut_targets
from pipecompile.graph.loss_module import joined_modules
from pipecompile.graph.model_state import has_values, named_state, without_values
from pipecompile.graph.pytrees import map_tensors

__all__ = ["LossFunction", "Target", "model_loss", "sum_of_squares"]

LossFunction = Callable[[Any, Any], Tensor]
FIELDS = (
    "model",
    "sample_input",
    "sample_kwargs",
    "batch_dim",
    "loss_fn",
    "targets",
    "target_batch_dims",
    "loss_reduction",
    "optimizer",
)


@dataclass(frozen=True)
class Target:
    """A model and one minibatch; `loss_fn(output, target)` gives the scalar to train, None the
    model's own `loss`.

    `costs` is a user's function of a node's cost, for the costs called "function". `optimizer`
    names the one whose state is counted, see `memory_model/optimizer.py`. `autocast` is the type to
    which operators of forwards and of the loss cast; None leaves it to the code around.
    `target_batch_dims` says along which dimensions targets are cut, see `cut_targets`, and
    `loss_reduction` how losses of microbatches make up one. InputError if that does not go with the
    loss. A loss that is a module with parameters or buffers is a part of the last stage.
    """

    model: nn.Module
    call: Arguments
    loss_fn: LossFunction | None = None
    targets: Any = None
    costs: CostFunction | None = None
    optimizer: str | None = None
    autocast: torch.dtype | None = None
    target_batch_dims: Any = None
    loss_reduction: LossReduction = "mean"

    def __post_init__(self) -> None:
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise InputError(
                f"loss_fn is {self.loss_fn!r}, but must be a function of (output, target), such as "
                "torch.nn.functional.mse_loss; leave it out if the model returns its loss"
            )
        known, given = get_args(LossReduction), self.loss_reduction
        if given not in known:
            raise InputError(f"loss_reduction={given!r}, but it is one of {', '.join(known)}")
        if given != "mean" and self.loss_fn is None:
            returned = "output.loss" if given == "sum" else "(output.loss, weight)"
            raise InputError(
                f"loss_reduction={given!r} needs a loss_fn: what a model returns as its `loss` is "
                "taken for a mean over samples; if it is not, say so by "
                f"loss_fn=lambda output, target: {returned}"
            )
        # Made at once, since it may refuse the loss.
        _ = self.loss_module

    @cached_property
    def loss_module(self) -> nn.Module | None:
        """The loss, if it has parameters or buffers, which the last stage then holds."""
        return loss_to_hold(self.model, self.loss_fn)

    @cached_property
    def model_with_loss(self) -> nn.Module:
        """The model, with that loss as one module more: all that is trained and saved."""
        return joined_modules(self.model, self.loss_module)

    def tried_loss(self, output: Any, wanted: Any) -> Any:
        """Return what `trained_by` does, of copies of the target: a loss may write to it."""
        return self.trained_by(output, map_tensors(torch.clone, wanted))

    def cut_targets(self, microbatches: int) -> list[Any]:
        """Return the targets of each of so many equal microbatches."""
        if self.targets is None:
            return [None] * microbatches
        sizes = (self.samples // microbatches,) * microbatches
        dims = self.inputs.batch_dims
        return cut_targets(self.targets, sizes, self.target_batch_dims, dims)

    def microbatches(self, count: int) -> list[Arguments]:
        """Return the minibatch as so many equal microbatches; InputError if it cannot be cut so."""
        inputs, size = self.inputs, self.samples // count
        rows = MicrobatchSizes(size, (size,) * count).rows(
            inputs.flatten(self.call), inputs.batch_dims
        )
        return list(map(inputs.unflatten, rows))

    def beginning(self, number: int, microbatches: int) -> tuple[Arguments, Any]:
        """Return the first `number` of so many equal microbatches as one, and its target."""
        size, dims = self.samples // microbatches, self.inputs.batch_dims
        bounds = (number * size, (microbatches - number) * size)
        sizes = tuple(filter(None, bounds))
        rows = MicrobatchSizes(size, sizes).rows(self.inputs.flatten(self.call), dims)
        targets = [None]
        if self.targets is not None:
            targets = cut_targets(self.targets, sizes, self.target_batch_dims, dims)
        return self.inputs.unflatten(rows[0]), targets[0]

    def share(self, replicas: int) -> Target:
        """Return the target of one of so many replicas: the first equal part of the minibatch."""
        if replicas == 1:
            return self
        # Replicas are given parts of a batch just as microbatches are: cut in order, all of one
        # size.
        calls, targets = self.microbatches(replicas), self.cut_targets(replicas)
        return replace(self, call=calls[0], targets=targets[0])

    @cached_property
    def inputs(self) -> InputStructure:
        """How the minibatch is put together from tensors."""
        return InputStructure.of(self.model, self.call)

    @property
    def samples(self) -> int:
        """The number of samples of the minibatch."""
        return self.inputs.batch_size(self.inputs.flatten(self.call))

    def precision(self) -> AbstractContextManager[Any]:
        """Enter the autocast under which forwards run."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.autocast)

    @property
    def device(self) -> torch.device:
        """Where the model is; costs are measured there. Fake tensors count as being on the meta
        device.
        """
        # A model without parameters runs where new tensors are made.
        first = next(self.model.parameters(), torch.empty(0))
        return torch.device("meta") if isinstance(first, FakeTensor) else first.device

    @property
    def has_values(self) -> bool:
        """Whether it can run: neither the model nor the minibatch is on the meta device or of fake
        tensors.
        """
        state = [tensor for _, tensor in named_state(self.model_with_loss)]
        minibatch = _tensors(self.call.args, self.call.kwargs, self.targets)
        return all(map(has_values, (*state, *minibatch)))

    def check_values(self, purpose: str) -> None:
        """Raise InputError unless it can run, which `purpose` needs."""
        if not self.has_values:
            raise InputError(
                f"{purpose} runs the model, but it, its input or its targets are on the meta "
                "device or of fake tensors; give values, or plan and profile it with costs flops "
                "or roofline:DEVICE"
            )

    def on_device(self, tensor: Tensor) -> Tensor:
        """Return `tensor`, which is of the minibatch, on the model's device."""
        return tensor.to(self.device) if has_values(tensor) else without_values(tensor, self.device)

    @property
    def trained_by(self) -> LossFunction:
        """The loss of a microbatch, or a pair of that and of what comes with it; weighted losses
        are multiplied by their weights.
        """
        own = self.loss_fn or model_loss
        # Multiplied where it is computed, so that its backward begins with the weight, and all
        # sums over microbatches and replicas are plain ones.
        return weighed(own) if self.loss_reduction == "weighted" else own

    @staticmethod
    def of(value: Any, origin: str) -> Target:
        """Return the target that a factory returned as (model, sample_input) or as a mapping.

        InputError, which begins with `origin`, if it returned anything else.
        """
        if isinstance(value, tuple) and len(value) == 2:
            value = {"model": value[0], "sample_input": value[1]}
        required, known = {"model", "sample_input"}, set(FIELDS)
        if not isinstance(value, Mapping) or not required <= value.keys() <= known:
            raise InputError(
                f"{origin} must return (model, sample_input) or a mapping with model, sample_input "
                f"and optionally {', '.join(FIELDS[2:])}; it returned {_described(value)}"
            )
        model = value["model"]
        if not isinstance(model, nn.Module):
            raise InputError(
                f"{origin}: model is a {type(model).__name__}, but must be an nn.Module"
            )
        sample, kwargs = value["sample_input"], value.get("sample_kwargs")
        call = arguments_of(model, sample, kwargs, value.get("batch_dim", 0))
        optimizer = _optimizer_name(value.get("optimizer"), model, origin)
        return Target(
            model,
            call,
            value.get("loss_fn"),
            value.get("targets"),
            optimizer=optimizer,
            target_batch_dims=value.get("target_batch_dims"),
            loss_reduction=value.get("loss_reduction", "mean"),
        )


def _optimizer_name(value: Any, model: nn.Module, origin: str) -> str | None:
    """Return the name of an optimizer that is given as a name, as a class, or as an instance."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, torch.optim.Optimizer):
        _check_state(value, model, origin)
    # SGD has a buffer for each parameter only if a group has momentum: two optimizers in one class.
    groups = value.param_groups if isinstance(value, torch.optim.SGD) else ()
    if any(group["momentum"] for group in groups):
        return "momentum"
    kind = value if isinstance(value, type) else type(value)
    if issubclass(kind, torch.optim.Optimizer):
        return kind.__name__.lower()
    raise InputError(
        f"{origin}: optimizer is a {kind.__name__}, but must be a name or a torch.optim.Optimizer"
    )


def _check_state(optimizer: torch.optim.Optimizer, model: nn.Module, origin: str) -> None:
    """Raise InputError if it holds other state than its name says, by its options or by the
    parameters that it steps.
    """
    kind, groups = type(optimizer).__name__, optimizer.param_groups
    # Options that add a tensor for each parameter: amsgrad (Adam), centered and momentum (RMSprop).
    options = [] if isinstance(optimizer, torch.optim.SGD) else ["amsgrad", "centered", "momentum"]
    given = [f"{name}={group[name]}" for name in options for group in groups if group.get(name)]
    estimate = f"give optimizer={kind.lower()!r}, its name, to count it"
    if given:
        raise InputError(
            f"{origin}: optimizer is {kind} with {given[0]}, whose further state is not counted; "
            f"{estimate} without"
        )
    # The plan counts state for every trained parameter: of one that is not stepped there is none.
    stepped = {id(parameter) for group in groups for parameter in group["params"]}
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    left_out = [name for name, parameter in trained if id(parameter) not in stepped]
    if left_out:
        raise InputError(
            f"{origin}: optimizer, {kind}, does not step {left_out[0]!r} of the model (nor "
            f"{len(left_out) - 1} more); freeze what is not trained (requires_grad_(False)), or "
            f"{estimate} for all trained parameters"
        )


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {sorted(map(str, value))}"
    return f"a {type(value).__name__}"


def model_loss(output: Any, target: Any) -> Tensor:
    """Return the loss that the model computed itself, as its `loss` output; InputError if it has
    none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor) or loss.dim():
        raise InputError(
            "the model has no `loss` output that is a scalar tensor; give loss_fn=…, or pass the "
            "labels to the model"
        )
    return loss


def sum_of_squares(output: Any, target: Any) -> Tensor:
    """Return a loss for any model, to compare gradients by: the sum of the squares of all its
    outputs.
    """
    values: Sequence[Tensor] = _tensors(output)
    # In float32, since in float16 the square of 256 is infinite already.
    squares = [value.float().square().sum() for value in values if value.requires_grad]
    if not squares:
        raise InputError("no output of the model carries a gradient, so there is nothing to train")
    return torch.stack(squares).sum()
