"""Do the samples of a batch know of each other? Microbatches are cut where `batch_dim` says.

An LSTM that reads (time, batch) would be cut along time, and train without an error. So other rows
are given beside the rows of a microbatch, whose outputs must stay as they are:

    model([a, b])      ┌ a's outputs ┐ b's outputs ┐
    model([a, a])      └ the same    │             │
    model([b, b])        the same    └ the same    ┘
    model([a])         ┌ the same    ┐

Numbers of b are enlarged. The first half for (b, b) shows whether rows know where in the batch they
are, and a alone whether they know how many there are. It is asked in eval mode, where BatchNorm and
dropout do not mix or change samples, and what is drawn there all the same is the same number
everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from pipecompile.errors import InputError
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.frontend.kept_state import holders_of_user
from pipecompile.frontend.other_data import enlarged
from pipecompile.frontend.signature import Arguments, InputStructure
from pipecompile.frontend.training_step import fill_zeros, restored_state
from pipecompile.graph.pytrees import tensor_leaves

__all__ = ["refuse_dependent_rows"]

DRAWS = frozenset(
    {
        *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial"),
        *("normal", "poisson", "rand", "rand_like", "randint", "randint_like", "randn"),
        *("randn_like", "random", "randperm", "uniform"),
    }
)
"""Operators that return nothing but random numbers."""
MOST_DRAWS = 10_000
"""A model that draws until a number is small enough would draw for ever."""

# Of the largest value of an output. Rounding may differ where an operator groups rows by values.
TOLERANCE = 0.02


def refuse_dependent_rows(model: nn.Module, first: Arguments, second: Arguments) -> None:
    """Raise InputError if outputs for the rows of one microbatch depend on those of the other.

    A model that fails in eval mode, or writes to buffers there, is not asked.
    """
    kept = callable_restored(*holders_of_user(model))
    with restored_state(model), kept, torch.no_grad(), _normalised_alone(model), _NoChance(model):
        for module in model.modules():
            module.training = False
        fill_zeros(model)
        # What draws from what nobody seeds is a matter of the self-check, which knows more of it.
        if not _repeats(model, first):
            return
        # A model may not take numbers that are so large.
        outputs = _all_outputs(model, first, _enlarged(model, second))
        outputs = outputs or _all_outputs(model, first, second)
        if outputs:
            _refuse_changed_rows(model, first, outputs)


def _refuse_changed_rows(
    model: nn.Module, first: Arguments, outputs: Sequence[tuple[Tensor, ...]]
) -> None:
    """Raise InputError if outputs, as `_all_outputs` has them, differ by the rows beside theirs."""
    inputs = InputStructure.of(model, first)
    tensors = inputs.flatten(first)
    rows = inputs.batch_size(tensors)
    has_rows = [_batch_dim(own, small, rows) for own, small, *_ in zip(*outputs, strict=False)]
    if all(dim is None for dim in has_rows):
        with torch.enable_grad():
            results = tensor_leaves(model(*first.args, **first.kwargs))
        trained = [each.requires_grad for each in results]
        _refuse_outputs_without_rows(inputs, tensors, outputs, trained)
    for index, (own, small, *others) in enumerate(zip(*outputs, strict=False)):
        # Other outputs, such as a loss, have no row for each sample.
        dim = _batch_dim(own, small, rows)
        if dim is None or not own.numel() or not own.is_floating_point():
            continue
        for beside, share in _shares_changed(dim, own, small, *others):
            if share > TOLERANCE:
                raise InputError(
                    f"rows along {_where(inputs)} are not independent: with {beside} rows beside "
                    f"it in the batch, output {index} of a microbatch changes by {share:.1%} of "
                    f"its largest value. {_remedy(inputs, tensors)}, or transpose the inputs "
                    "(batch_first=True for an LSTM); if samples are to know only those of their "
                    "own microbatch, self_check=False accepts it"
                )


def _refuse_outputs_without_rows(
    inputs: InputStructure,
    tensors: Sequence[Tensor],
    outputs: Sequence[tuple[Tensor, ...]],
    trained: Sequence[bool],
) -> None:
    """Raise InputError if no output has a row for each sample, and one of several elements that
    carries a gradient changes with the rows that are beside others: it may have its rows elsewhere.
    A number is a loss, and what carries no gradient a statistic.
    """
    for index, (is_trained, (_, alone, one, other)) in enumerate(
        zip(trained, zip(*outputs, strict=False), strict=False)
    ):
        has_no_rows = alone.numel() > 1 and alone.shape == one.shape == other.shape
        if is_trained and has_no_rows and _share_changed(one, other) > TOLERANCE:
            raise InputError(
                f"output {index} is of shape {tuple(one.shape)} for any number of rows along "
                f"{_where(inputs)}, and depends on them all: a microbatch would have an output of "
                f"its own. {_remedy(inputs, tensors)}; return losses apart, each as one number; if "
                "that is what you want, self_check=False accepts it"
            )


class _NoChance(TorchDispatchMode):
    """A mode in which each draw of random numbers gives the same, however many there are."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._devices = cuda_devices(model)
        self._draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.rstrip("_") not in DRAWS:
            return func(*args, **(kwargs or {}))
        self._draws += 1
        if self._draws > MOST_DRAWS:
            raise RuntimeError("the model may draw until it gets another number")
        # The generators stay as they are: what moves them is no sign of a write.
        with torch.random.fork_rng(self._devices):
            result = func(*args, **(kwargs or {}))
        for drawn in tensor_leaves(result):
            if func is torch.ops.aten.randperm.default:
                torch.arange(len(drawn), out=drawn)
            else:
                drawn.fill_(0.5 if drawn.is_floating_point() else 0)
        return result


@contextmanager
def _normalised_alone(model: nn.Module) -> Iterator[None]:
    """Give batch norms that keep no statistics some in the block: in eval mode too they would use
    those of the batch.
    """
    norms = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    ]
    try:
        for norm in norms:
            device = None if norm.weight is None else norm.weight.device
            norm.running_mean = torch.zeros(norm.num_features, device=device)
            norm.running_var = torch.ones(norm.num_features, device=device)
        yield
    finally:
        for norm in norms:
            norm.running_mean = norm.running_var = None


def _all_outputs(
    model: nn.Module, first: Arguments, second: Arguments
) -> list[tuple[Tensor, ...]] | None:
    """Return the output tensors for both calls together, for the first alone, and for each of them
    twice; None if the model is not to be asked.
    """
    try:
        before = _states(model)
        both = _outputs(model, first, second)
        # Compared after one call: a switch that each call turns is as it was after two.
        writes = not all(map(torch.equal, before, _states(model)))
        pairs = [_outputs(model, each, each) for each in (first, second)]
        alone = tensor_leaves(model(*first.args, **first.kwargs))
    except Exception:
        return None  # a training step of it is known to work
    # What it writes in eval mode makes results depend on earlier calls, not on other rows.
    if writes or not all(map(torch.equal, before, _states(model))):
        return None
    return [both, tuple(alone), *pairs]


def _repeats(model: nn.Module, call: Arguments) -> bool:
    """Return whether a model returns the same for the same call; False if it fails."""
    try:
        # The first call is not compared: a hook may remove itself in it.
        _, *results = (tensor_leaves(model(*call.args, **call.kwargs)) for _ in range(9))
        return all(all(map(torch.equal, results[0], other)) for other in results)
    except Exception:
        return False  # a training step of it is known to work


def _enlarged(model: nn.Module, call: Arguments) -> Arguments:
    """Return a call with larger numbers in the rows."""
    inputs = InputStructure.of(model, call)
    return inputs.unflatten(enlarged(inputs.flatten(call), inputs.batch_dims))


def _outputs(model: nn.Module, one: Arguments, other: Arguments) -> tuple[Tensor, ...]:
    """Return the model's output tensors for the rows of `one` and then those of `other`."""
    inputs = InputStructure.of(model, one)
    columns = zip(inputs.flatten(one), inputs.flatten(other), inputs.batch_dims, strict=True)
    joined = [a if dim is None else torch.cat([a, b], dim) for a, b, dim in columns]
    call = inputs.unflatten(joined)
    return tensor_leaves(model(*call.args, **call.kwargs))


def _batch_dim(both: Tensor, alone: Tensor, rows: int) -> int | None:
    """Return the dimension that has a row for each of two and of one times so many samples."""
    sizes = zip(both.shape, alone.shape, strict=False)
    return next((dim for dim, pair in enumerate(sizes) if pair == (2 * rows, rows)), None)


def _where(inputs: InputStructure) -> str:
    dims = {dim for dim in inputs.batch_dims if dim is not None}
    return f"dimension {dims.pop()}" if len(dims) == 1 else f"the dimensions {inputs.batch_dims}"


def _remedy(inputs: InputStructure, tensors: Sequence[Tensor]) -> str:
    """Return what to say where the batch is: the other one of the first two dimensions, if inputs
    agree on its size.
    """
    cut = [t for t, dim in zip(tensors, inputs.batch_dims, strict=True) if dim is not None]
    other = 1 if 0 in inputs.batch_dims else 0
    if len({tensor.shape[other : other + 1] for tensor in cut}) == 1 and cut[0].dim() > other:
        return f"If the batch is dimension {other}, give batch_dim={other}"
    return "Say with batch_dim= which dimension of each input is the batch"


def _shares_changed(
    dim: int, both: Tensor, alone: Tensor, firsts: Tensor, seconds: Tensor
) -> Iterator[tuple[str, float]]:
    """Yield by how much of its largest value an output for (first, second) differs in its first
    half from that for (first, first) and for the first alone, and in its second half from both
    halves of that for (second, second); and which rows the other one had beside it.
    """
    (begin, end), (first, _) = both.chunk(2, dim), firsts.chunk(2, dim)
    pairs = [(begin, first, "other"), *((end, each, "other") for each in seconds.chunk(2, dim))]
    if begin.shape == alone.shape:  # which it is not where columns are samples too
        pairs.append((begin, alone, "no"))
    for own, other, beside in pairs:
        yield beside, _share_changed(own, other)


def _share_changed(own: Tensor, other: Tensor) -> float:
    """Return by how much of the largest value two tensors differ; a masked logit of minus infinity
    differs by all of it from any other value.
    """
    is_same = (own == other) | (own.isnan() & other.isnan())
    largest = max(float(each.where(each.isfinite(), 0).abs().max()) for each in (own, other))
    change = float((own - other).where(~is_same, 0).abs().nan_to_num(nan=math.inf).max())
    return change / largest if largest > 0 else float(change > 0)


def _states(model: nn.Module) -> list[Tensor]:
    """Return copies of the states of generators and of the buffers."""
    generators = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, cuda_devices(model))]
    return [*generators, *(buffer.clone() for buffer in model.buffers())]
