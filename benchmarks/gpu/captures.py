"""Captures of models that lie on the device, each proven by a training step there.

The graph must also be the one that is captured on a CPU, so that a plan made without a GPU fits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.cases import Case
from benchmarks.gpu.models import MODELS, TINY, target_on
from benchmarks.gpu.rows import Row
from pipecompile.api.options import options_for
from pipecompile.frontend.target_capture import Captured, capture_target

__all__ = ["capture_cases"]

MICROBATCHES = 2


def capture_cases(bench: Bench) -> Iterator[Case]:
    """Yield a case for each of the ten models, at a size for tests."""
    for name, factory in MODELS.items():
        yield Case(name, partial(_rows, bench, name, factory))


def _rows(bench: Bench, name: str, factory: Any) -> Iterator[Row]:
    transformers.logging.set_verbosity_error()
    began = time.perf_counter()
    captured = _captured(bench.device, factory, verify=True)
    seconds = time.perf_counter() - began
    how = f"{captured.capture.method}, {seconds:.1f} s"
    yield Row(f"{name}, proven", 1, int(captured.verified), "graphs", "bit for bit", how)
    on_cpu = _captured(torch.device("cpu"), factory, verify=False)
    is_same = captured.digest == on_cpu.digest
    yield Row(f"{name}, same graph", 1, int(is_same), "graphs", "as on a CPU")


def _captured(device: torch.device, factory: Any, *, verify: bool) -> Captured:
    target = target_on(device, factory, TINY)
    options = options_for(target, k=1, microbatches=MICROBATCHES, schedule="gpipe", costs="flops")
    return capture_target(target, options, verify=verify)
