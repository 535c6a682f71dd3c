"""The test of a small model: seeded steps of its capture are its own, at several batch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from pipecompile.frontend.capture import capture
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.self_check import with_autograd_contexts
from pipecompile.frontend.signature import Arguments

from . import first
from .judge import differences, steps


def exact(
    model: nn.Module, *args: Any, batches: Sequence[int] = (4, 2), leaf: Sequence[str] = ()
) -> Capture:
    """Return the capture of `model` at the first of `batches`.

    AssertionError if two training steps of it differ from the model's, at any of `batches`; it
    names the outputs, gradients or buffers that are not equal bit for bit.
    """
    call = Arguments(args, {})
    captured = capture(model, first(batches[0], call), leaf)
    for batch in batches:
        some = first(batch, call)
        module = with_autograd_contexts(captured.instantiate(some))
        torch.manual_seed(0)
        wanted = steps(model, some, lambda call: model(*call.args))
        got = steps(model, some, partial(_run, captured, module))
        assert differences(wanted, got) == [], f"at batch {batch}"
    return captured


def _run(captured: Capture, module: fx.GraphModule, call: Arguments) -> Any:
    return captured.outputs.unflatten(module(*captured.inputs.flatten(call)))
