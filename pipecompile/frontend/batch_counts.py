"""Numbers that count a whole batch, such as transformers' `num_items_in_batch`.

Every microbatch is given such a number whole. Its loss is then a part of a sum, and the mean over
M microbatches is 1/M of what the user means:

    the batch              (l₀ + l₁ + l₂ + l₃) / 4
    two microbatches       (l₀ + l₁) / 4 and (l₂ + l₃) / 4      their mean is half of it

A loss that such a number divides is halved if the number is doubled, and doubles if every sample
comes twice. A weight or a temperature does not do both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import isclose
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.frontend.self_check import restored_state
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.graph.pytrees import leaves_with_paths

__all__ = ["refuse_batch_counts", "refuse_counts"]

TOLERANCE = 1e-3  # of the loss, which may be in half precision


def refuse_batch_counts(target: Target, call: Arguments, wanted: Any) -> None:
    """Raise InputError if a number among the inputs of a microbatch, or in its target, counts the
    whole batch.
    """
    inputs, model = target.inputs, target.model
    columns = zip(inputs.flatten(call), inputs.batch_dims, strict=True)
    joined = inputs.unflatten([_twice(tensor, dim) for tensor, dim in columns])
    along = next((dim for dim in inputs.batch_dims if dim is not None), 0)
    both = pytree.tree_map_only(Tensor, lambda each: _twice(each, along), wanted)

    def loss(given: Mapping[str, Any]) -> Any:
        args, kwargs, targets = given.values()
        return target.trained_by(model(*args, **kwargs), targets)

    with restored_state(model), restored_state(target.loss_module or nn.Identity()):
        for module in model.modules():
            module.training = False
        refuse_counts(
            loss,
            {"the inputs": call.args, "the input": call.kwargs, "the target": wanted},
            {"the inputs": joined.args, "the input": joined.kwargs, "the target": both},
        )


def refuse_counts(
    loss: Callable[[Mapping[str, Any]], Any], given: Mapping[str, Any], doubled: Mapping[str, Any]
) -> None:
    """Raise InputError if a number in `given`, by what it is called, divides the loss of a
    microbatch and counts the whole batch. `doubled` has every sample twice.

    A loss that fails on these is not asked.
    """
    numbers = list(_numbers(given))
    if not numbers:
        return
    whole = _value(loss, given)
    if not whole or not _is_close(_value(loss, doubled), 2 * whole):
        return
    for place, name in numbers:
        if _is_close(_value(loss, _with_doubled_number(given, place)), whole / 2):
            raise InputError(
                f"the loss is divided by {name}, which every microbatch is given whole: where it "
                "counts something in the batch, the mean over microbatches is only a part of the "
                "loss; divide by what is in the microbatch, or give loss_reduction='sum' with a "
                "loss_fn whose losses add up to that of the batch"
            )


def _numbers(given: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the place among the leaves, and the name, of each number that is no truth value."""
    named = (
        (f"{name}{pytree.keystr(path)}", leaf)
        for name, part in given.items()
        for path, leaf in leaves_with_paths(part)
    )
    for place, (name, leaf) in enumerate(named):
        is_tensor = isinstance(leaf, Tensor) and not leaf.dim() and leaf.dtype != torch.bool
        if is_tensor or (isinstance(leaf, int | float) and not isinstance(leaf, bool)):
            yield place, name


def _with_doubled_number(given: Mapping[str, Any], place: int) -> Mapping[str, Any]:
    leaves, structure = pytree.tree_flatten(dict(given))
    leaves[place] = leaves[place] * 2
    changed: dict[str, Any] = pytree.tree_unflatten(leaves, structure)
    return changed


def _value(loss: Callable[[Mapping[str, Any]], Any], given: Mapping[str, Any]) -> float | None:
    try:
        with torch.no_grad():
            returned = loss(given)
        value: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return value.detach().item()
    except Exception:
        return None  # a step of it is known to work


def _is_close(value: float | None, wanted: float) -> bool:
    return value is not None and isclose(value, wanted, rel_tol=TOLERANCE)


def _twice(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor if dim is None or dim >= tensor.dim() else torch.cat([tensor, tensor], dim)
