"""Repairs of torch that hold from the first capture on.

fx prints attributes whose names are no identifiers, such as "0", by `getattr`, but takes keywords
for identifiers:

    nn.ModuleDict({"class": …})       self.class.weight     no Python
                                      getattr(self, "class").weight

Fake tensors multiply groups of matrices, as mixtures of experts do, in bfloat16 only (until torch
2.14), while real ones do so in other types too.
"""

from __future__ import annotations

from functools import reduce
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor, _meta_registrations
from torch.fx import graph as fx_graph

__all__ = ["repair_torch"]

_fake_grouped_product = getattr(_meta_registrations, "_meta_grouped_mm_common", None)


def repair_torch() -> None:
    """Let torch do what it should, from now on."""
    fx_graph._format_target = _format_target
    if _fake_grouped_product is not None:
        vars(_meta_registrations)["_meta_grouped_mm_common"] = _grouped_product


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


def _grouped_product(left: Tensor, right: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the fake product of fakes in their own type, by that of bfloat16."""
    assert _fake_grouped_product is not None
    pair = left, right
    if left.dtype == right.dtype and left.dtype in (torch.float32, torch.float16):
        pair = left.to(torch.bfloat16), right.to(torch.bfloat16)
    product: Tensor = _fake_grouped_product(*pair, *args, **kwargs)
    return product.to(left.dtype) if pair[0] is not left else product
