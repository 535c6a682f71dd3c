"""A probe of data: one forward on real tensors, with the answers of its data by module call.

The recorder uses these answers for modules that branch on data, and a capture for each new batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.frontend.signature import Arguments
from pipecompile.graph.attributes import attributes_restored
from pipecompile.graph.data_answers import DataAnswer, RecordAnswers
from pipecompile.graph.model_state import named_state, swapped_state
from pipecompile.graph.pytrees import map_tensors

__all__ = ["ProbedAnswers", "cuda_devices", "probe_data"]

ProbedAnswers = Mapping[tuple[str, int], tuple[DataAnswer, ...]]
"""By a module's path and the number of its call, from 0: the answers of data within this call."""


@torch.enable_grad()
def probe_data(model: nn.Module, call: Arguments) -> ProbedAnswers:
    """Run one forward of `model` on real tensors and return the answers of its data.

    The model and the random state are restored.
    """
    paths: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        paths.setdefault(module, path)
    calls: Counter[str] = Counter()
    answers_by_call: dict[tuple[str, int], tuple[DataAnswer, ...]] = {}
    record = RecordAnswers()
    original = nn.Module.__call__

    def probed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in paths:
            return original(module, *args, **kwargs)
        path = paths[module]
        # By number too: a module that is called twice may be asked of other data the second time,
        # and its two nodes replay their own answers.
        key = (path, calls[path])
        calls[path] += 1
        start = len(record.answers)
        result = original(module, *args, **kwargs)
        # Answers of inner modules are among those of the outer one: either may become the node.
        answers_by_call[key] = tuple(record.answers[start:])
        return result

    nn.Module.__call__ = probed_call  # type: ignore[method-assign]
    try:
        with _on_copies(model), record:
            # The forward may write to its inputs, which are the user's.
            args, kwargs = map_tensors(Tensor.clone, (call.args, call.kwargs))
            model(*args, **kwargs)
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
    return answers_by_call


@contextmanager
def _on_copies(model: nn.Module) -> Iterator[None]:
    """Run the block on copies of parameters and buffers; restore attributes and random state."""
    copies = {id(tensor): _copied(tensor) for _, tensor in named_state(model)}
    with (
        torch.random.fork_rng(devices=cuda_devices(model)),
        attributes_restored(model),
        swapped_state(model, copies),
    ):
        yield


def _copied(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor; a copy of a parameter is a parameter."""
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def cuda_devices(model: nn.Module) -> list[int]:
    """Return the indices of the CUDA devices that the parameters of `model` are on."""
    return sorted(
        {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    )
