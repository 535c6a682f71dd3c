"""Numbers that count a whole batch, such as transformers' `num_items_in_batch`.

Every microbatch is given such a number whole. Its loss is then a part of a sum, and the mean over
M microbatches is 1/M of what the user means:

    the batch              (l₀ + l₁ + l₂ + l₃) / 4
    two microbatches       (l₀ + l₁) / 4 and (l₂ + l₃) / 4      their mean is half of it

Where such a number divides a sum, l = Σ/n + b, it is the same whether every sample comes twice or
the number is halved, and then another loss. With a weight or a temperature, or a mean, that is not
so. Numbers are halved, and not doubled, since a number may be an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isclose
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from pipecompile.errors import InputError
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.training_step import restored_state
from pipecompile.graph.pytrees import leaves_with_paths

__all__ = ["OUTPUT", "refuse_batch_counts", "refuse_counts", "value_of_loss"]

OUTPUT = "the output"
"""What a loss is given of the model."""
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
        return target.tried_loss(model(*args, **kwargs), targets)

    with restored_state(model), restored_state(target.loss_module or nn.Identity()):
        # Dropout would give two losses for the same data.
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
    microbatch, or a part of it, and counts the whole batch. `doubled` has every sample twice.

    `OUTPUT` is not given by the user, and has no counts. Nothing is refused if the loss fails on
    these inputs.
    """
    numbers = dict(_numbers(given, doubled))
    if not numbers:
        return
    # With samples that add up to 10, and n = 4:
    #
    #     once      10 / 4 = 2.5
    #     twice     20 / 4 = 5       every sample twice
    #     halved    10 / 2 = 5       the same: n counts them
    #
    # A temperature of 4 below a mean of 10 gives 2.5, 2.5 and 5: the mean does not know how many
    # there are, so it counts nothing. Odd numbers are made even first, to be halved without a
    # rest.
    even = _with_halves(given, numbers, 2)
    once = value_of_loss(loss, even)
    if _is_close(value_of_loss(loss, _with_halves(even, numbers, 1)), once):
        return  # it reads none of them
    twice = value_of_loss(loss, _with_halves(doubled, numbers, 2))
    # Several numbers may count, each for a part of the loss.
    for counts in [*([place] for place in numbers), list(numbers)]:
        halved = value_of_loss(loss, _with_halves(even, counts, 1))
        if _is_close(twice, halved) and not _is_close(once, halved):
            names = " and ".join(numbers[place] for place in counts)
            raise InputError(
                f"the loss is divided by {names}, which every microbatch is given whole: where it "
                "counts something in the batch, the mean over microbatches is only a part of the "
                "loss; divide by what is in the microbatch, or give loss_reduction='sum' with a "
                "loss_fn whose losses add up to that of the batch"
            )


def _numbers(given: Mapping[str, Any], doubled: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """Yield the place among the leaves, and the name, of each number that is no truth value, and
    that is not of one sample.
    """
    named = (
        (name, f"{name}{pytree.keystr(path)}", leaf)
        for name, part in given.items()
        for path, leaf in leaves_with_paths(part)
    )
    others = pytree.tree_leaves(dict(doubled))
    for place, ((part, name, leaf), other) in enumerate(zip(named, others, strict=True)):
        is_number = isinstance(leaf, int | float | np.number) and not isinstance(leaf, bool)
        if isinstance(leaf, Tensor):
            is_number = leaf.numel() == other.numel() == 1 and leaf.dtype != torch.bool
        if is_number and part != OUTPUT:
            yield place, name


def _with_halves(given: Mapping[str, Any], places: Iterable[int], halves: int) -> Mapping[str, Any]:
    """Return `given` with so many `halves` of the numbers in these places; an odd number is halved
    as the even one below it.
    """
    leaves, structure = pytree.tree_flatten(dict(given))
    for place in places:
        number = leaves[place]
        leaves[place] = halves * (number / 2 if _has_fractions(number) else number // 2)
    changed: dict[str, Any] = pytree.tree_unflatten(leaves, structure)
    return changed


def _has_fractions(number: Any) -> bool:
    if isinstance(number, Tensor):
        return number.is_floating_point()
    return isinstance(number, float | np.floating)


def value_of_loss(loss: Callable[[Any], Any], given: Any) -> float | None:
    """Return the loss of what is `given`, without what comes with it; None if it fails."""
    try:
        with torch.no_grad():
            returned = loss(given)
        value: Tensor = returned[0] if isinstance(returned, tuple) else returned
        return float(value.detach().item())
    except Exception:
        return None  # a step of it is known to work


def _is_close(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and isclose(one, other, rel_tol=TOLERANCE)


def _twice(tensor: Tensor, dim: int | None) -> Tensor:
    return tensor if dim is None or dim >= tensor.dim() else torch.cat([tensor, tensor], dim)
