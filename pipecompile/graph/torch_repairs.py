"""Repairs of torch that hold from the first capture on.

fx prints attributes whose names are no identifiers, such as "0", by `getattr`, but takes keywords
for identifiers:

    nn.ModuleDict({"class": …})       self.class.weight     no Python
                                      getattr(self, "class").weight

and reads a parameter named "self" into that of the generated forward.

Fake tensors multiply groups of matrices, as mixtures of experts do, in bfloat16 only (until torch
2.14), while real ones do so in float32 too. They count integers, as the tokens of each expert, on
GPUs only, while fakes of the CPU stand in for tensors of any device here. The states of an LSTM
have one dimension too many on fake tensors that carry gradients (until torch 2.11). Of its window
`istft` asks whether it is too small somewhere, which fakes cannot know; those of captures say no.
"""

from __future__ import annotations

from functools import reduce
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch._decomp import decompositions
from torch._ops import OpOverload
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.fx import graph as fx_graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["new_fake_mode", "repair_torch"]

_OF_CAPTURES = "_answers_istft"
"""An attribute of the modes of fakes that are ours; others go without `_equality`."""

_fake_grouped_product = getattr(_meta_registrations, "_meta_grouped_mm_common", None)
_fake_lstm_layer = getattr(decompositions, "one_layer_lstm", None)


def repair_torch() -> None:
    """Let torch do what it should, from now on."""
    fx_graph._format_target = _format_target
    fx_graph._illegal_names["self"] = object()
    # Releases of torch differ in which of these they have.
    if _fake_grouped_product is not None:
        vars(_meta_registrations)["_meta_grouped_mm_common"] = _grouped_product
    if _fake_lstm_layer is not None:
        vars(decompositions)["one_layer_lstm"] = _lstm_layer
    fake_impls.op_implementations_dict[torch.ops.aten.histc.default] = _histogram
    fake_impls.op_implementations_dict[torch.ops.aten.equal.default] = _equality


def _format_target(base: str, target: str) -> str:
    """Return the code for the attribute `target`, a path with dots, of `base`.

    >>> _format_target("self", "layers.0.class.weight")
    'getattr(getattr(self.layers, "0"), "class").weight'
    """
    return reduce(_attribute, target.split("."), base)


def _attribute(base: str, name: str) -> str:
    if name.isidentifier() and not iskeyword(name):
        return f"{base}.{name}"
    return f'getattr({base}, "{name}")'


def _grouped_product(
    left: Tensor, right: Tensor, *args: Any, offs: Tensor | None = None, **kwargs: Any
) -> Tensor:
    """Return the fake product of fakes; torch's checks are for types of 16 bits."""
    assert _fake_grouped_product is not None
    if left.dtype != torch.float32 or right.dtype != torch.float32:
        product: Tensor = _fake_grouped_product(left, right, *args, offs=offs, **kwargs)
        return product
    rows, columns = left.shape[-2], right.shape[-1]
    # Groups are those of a batch, or ranges of rows, of columns, or of what is summed over.
    if left.dim() == 3 and right.dim() == 3:
        return left.new_empty(left.shape[0], rows, columns)
    if left.dim() == 2 and right.dim() == 2 and offs is not None:
        return left.new_empty(offs.shape[0], rows, columns)
    # (rows, k) by (groups, k, columns), whose groups are ranges of rows, or (groups, rows, k) by
    # (k, columns), whose groups are ranges of columns.
    return left.new_empty(rows, columns)


def _lstm_layer(*args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return what one layer makes of a sequence, and its states of shape (N, H).

    Torch 2.11 drops the dimension of the batch, if that is 1, and not that of the layer.
    """
    assert _fake_lstm_layer is not None
    output, states = _fake_lstm_layer(*args, **kwargs)
    return output, tuple(each.squeeze(0) if each.dim() == 3 else each for each in states)


def new_fake_mode(shape_env: ShapeEnv | None = None) -> FakeTensorMode:
    """Return a mode of fakes for a capture, or for a run of a graph."""
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    setattr(mode, _OF_CAPTURES, True)
    return mode


def _equality(mode: FakeTensorMode, func: OpOverload, left: Tensor, right: Tensor) -> bool:
    """Return what `istft` expects when it asks whether its window is too small somewhere: a truth
    value, beside another one. What a forward itself asks is refused by the recorder.
    """
    kinds = {(each.dim(), each.dtype) for each in (left, right)}
    if kinds == {(0, torch.bool)} and hasattr(mode, _OF_CAPTURES):
        return False
    raise DataDependentOutputException(func)


def _histogram(
    mode: FakeTensorMode, _: OpOverload, values: Tensor, bins: int = 100, *__: Any, **___: Any
) -> Tensor:
    """Return the fake histogram of a fake."""
    with mode:
        return values.new_empty(bins)
