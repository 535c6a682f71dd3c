"""Torch's global flags that a forward may ask for: its branches on them are in the graph.

Flags that only choose among kernels are not compared unless code names what asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from operator import attrgetter
from sys import intern
from typing import Any

import torch

__all__ = ["asked_flags"]


def asked_flags(names: Collection[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield the questions after flags that code with these `names` may ask, as it reads, and what
    answers them now.
    """
    for where, read in QUESTIONS.items():
        *_, owner, name = where.split(".")
        # A function has a name of its own, but `deterministic` may be an attribute of anything.
        if name.removesuffix("()") in names and (name.endswith("()") or owner in names):
            yield where, read


def _matmul_precision() -> str:
    # A new string each time, but what has not changed is found by its identity.
    return intern(torch.get_float32_matmul_precision())


FUNCTIONS = (
    "are_deterministic_algorithms_enabled",
    "is_deterministic_algorithms_warn_only_enabled",
    "get_deterministic_debug_mode",
    "get_num_threads",
    "is_anomaly_enabled",
    "backends.cuda.flash_sdp_enabled",
    "backends.cuda.mem_efficient_sdp_enabled",
    "backends.cuda.math_sdp_enabled",
    "backends.cuda.cudnn_sdp_enabled",
    "backends.mha.get_fastpath_enabled",
)
ATTRIBUTES = (
    "backends.cuda.matmul.allow_tf32",
    "backends.cudnn.allow_tf32",
    "backends.cudnn.benchmark",
    "backends.cudnn.deterministic",
    "backends.cudnn.enabled",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.enabled",
    "backends.opt_einsum.enabled",
)
QUESTIONS: Mapping[str, Callable[[], Any]] = {
    "torch.get_float32_matmul_precision()": _matmul_precision,
    **{f"torch.{name}()": attrgetter(name)(torch) for name in FUNCTIONS},
    **{f"torch.{name}": partial(attrgetter(name), torch) for name in ATTRIBUTES},
}
"""By the code that asks."""
