"""Do the samples of a batch know of each other? Microbatches are cut along dimension 0.

An LSTM that reads (time, batch) would be cut along time, and train without an error. So other rows
are given beside the rows of a microbatch, whose outputs must stay as they are:

    model([a, b])      ┌ a's outputs ┐ b's outputs ┐
    model([a, a])      └ the same    │             │
    model([b, b])                    └ the same    ┘

It is asked in eval mode, where BatchNorm and dropout do not mix or change samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from pipecompile.errors import InputError
from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.frontend.self_check import restored_state
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["refuse_dependent_rows"]

# Of the largest value of an output. Rounding may differ where an operator groups rows by values.
TOLERANCE = 0.02


def refuse_dependent_rows(model: nn.Module, first: Arguments, second: Arguments) -> None:
    """Raise InputError if outputs for the rows of one microbatch depend on those of the other.

    A model that fails in eval mode, or draws random numbers or writes to buffers there, is not
    asked.
    """
    with restored_state(model), torch.no_grad():
        for module in model.modules():
            module.training = False
        before = _states(model)
        try:
            both = _outputs(model, first, second)
            pairs = [_outputs(model, each, each) for each in (first, second)]
        except Exception:
            return  # a training step of it is known to work
        # What it writes in eval mode makes results depend on earlier calls, not on other rows.
        if not all(map(torch.equal, before, _states(model))):
            return
    inputs = tensor_leaves((first.args, first.kwargs))
    rows = next(tensor.shape[0] for tensor in inputs if tensor.dim())
    for index, (own, *others) in enumerate(zip(both, *pairs, strict=False)):
        # Other outputs, such as a loss or the states of layers, have no row for each sample.
        is_batched = own.dim() > 0 and len(own) == 2 * rows and own.is_floating_point()
        for share in _shares_changed(own, *others) if is_batched and own.numel() else ():
            if share > TOLERANCE:
                raise InputError(
                    "rows along dimension 0 are not independent: with other rows beside it in the "
                    f"batch, output {index} of a microbatch changes by {share:.1%} of its largest "
                    "value. Inputs must have the batch as dimension 0: transpose them "
                    "(batch_first=True for an LSTM); if samples are to know only those of their "
                    "own microbatch, self_check=False accepts it"
                )


def _outputs(model: nn.Module, one: Arguments, other: Arguments) -> tuple[Tensor, ...]:
    """Return the model's output tensors for the rows of `one` and then those of `other`."""
    join = partial(tree_map, lambda a, b: torch.cat([a, b]) if _is_batched(a) else a)
    return tensor_leaves(model(*join(one.args, other.args), **join(one.kwargs, other.kwargs)))


def _is_batched(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _shares_changed(both: Tensor, firsts: Tensor, seconds: Tensor) -> Iterator[float]:
    """Yield by how much of its largest value an output for (first, second) differs in its first
    half from that for (first, first), and in its second half from that for (second, second).
    """
    half = len(both) // 2
    for own, other in ((both[:half], firsts[:half]), (both[half:], seconds[half:])):
        largest = torch.maximum(own.abs().max(), other.abs().max())
        yield float((own - other).abs().max() / largest) if largest > 0 else 0.0


def _states(model: nn.Module) -> list[Tensor]:
    """Return copies of the states of generators and of the buffers."""
    generators = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda_devices(model))]
    return [*generators, *(buffer.clone() for buffer in model.buffers())]
