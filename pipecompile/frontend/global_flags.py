"""Torch's global flags that a forward may ask for: its branches on them are in the graph.

Flags that only choose among kernels are not compared unless code asks for them:

    torch.backends.cudnn.deterministic            by its name, and that of what has it
    from torch.backends import cudnn as c         by its name: the object `c` was found
    from torch import get_num_threads as count    the function was found under another name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import attrgetter
from sys import intern
from typing import Any, Protocol

import torch

__all__ = ["FoundCode", "asked_flags"]


class FoundCode(Protocol):
    """What is known of the code of a forward: the `names` in it, and what it may have."""

    @property
    def names(self) -> frozenset[str]:
        """All names in the code."""

    def has_found(self, value: Any) -> bool:
        """Return whether the code may have this function, object or Python module, by any name."""


def asked_flags(code: FoundCode) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the questions after flags that code may ask, as it reads, and what answers them now."""
    for path in FUNCTIONS:
        if path.rpartition(".")[2] in code.names or code.has_found(attrgetter(path)(torch)):
            yield f"torch.{path}()", partial(_answer, path)
    for path in ATTRIBUTES:
        owner, _, name = path.rpartition(".")
        # A function has a name of its own, but `deterministic` may be an attribute of anything.
        has_owner = owner.rpartition(".")[2] in code.names
        if name in code.names and (has_owner or code.has_found(attrgetter(owner)(torch))):
            yield f"torch.{path}", partial(_answer, path)


def _answer(path: str) -> str:
    answer = attrgetter(path)(torch)
    # Text, of which there is one each: what has not changed is found by its identity.
    return intern(repr(answer() if path in FUNCTIONS else answer))


FUNCTIONS: Mapping[str, None] = dict.fromkeys(
    (
        "are_deterministic_algorithms_enabled",
        "is_deterministic_algorithms_warn_only_enabled",
        "get_deterministic_debug_mode",
        "get_float32_matmul_precision",
        "get_num_threads",
        "get_num_interop_threads",
        "is_anomaly_enabled",
        "is_anomaly_check_nan_enabled",
        "is_warn_always_enabled",
        "backends.cuda.flash_sdp_enabled",
        "backends.cuda.mem_efficient_sdp_enabled",
        "backends.cuda.math_sdp_enabled",
        "backends.cuda.cudnn_sdp_enabled",
        "backends.cuda.preferred_linalg_library",
        "backends.cuda.preferred_blas_library",
        "backends.mha.get_fastpath_enabled",
        "distributed.is_initialized",
    )
)
ATTRIBUTES = (
    *(
        f"backends.cuda.matmul.allow_{what}"
        for what in ("tf32", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction")
    ),
    "backends.cuda.matmul.allow_fp16_accumulation",
    "backends.cuda.matmul.fp32_precision",
    *(
        f"backends.cudnn.{what}"
        for what in ("allow_tf32", "benchmark", "benchmark_limit", "deterministic", "enabled")
    ),
    "backends.mkldnn.allow_tf32",
    "backends.mkldnn.deterministic",
    "backends.mkldnn.enabled",
    "backends.opt_einsum.enabled",
    "backends.opt_einsum.strategy",
    "utils.deterministic.fill_uninitialized_memory",
)
