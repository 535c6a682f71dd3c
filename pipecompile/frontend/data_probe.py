"""What a forward on real tensors is told by its data, module call by module call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipecompile.frontend.signature import Arguments
from pipecompile.graph.attributes import unchanged
from pipecompile.graph.data_answers import Answer, Listening
from pipecompile.graph.propagation import named_state, swapped

__all__ = ["Heard", "cuda_devices", "hear"]

Heard = Mapping[tuple[str, int], tuple[Answer, ...]]
"""By a module's path and the number of the call (from 0): what data told while it ran."""


@torch.enable_grad()
def hear(model: nn.Module, call: Arguments) -> Heard:
    """Runs one forward of `model` on real tensors; it and the random state are as before afterwards."""
    paths: dict[nn.Module, str] = {}
    for path, module in model.named_modules():
        paths.setdefault(module, path)
    calls: Counter[str] = Counter()
    heard: dict[tuple[str, int], tuple[Answer, ...]] = {}
    listening = Listening()
    original = nn.Module.__call__

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if module not in paths:
            return original(module, *args, **kwargs)
        key = (paths[module], calls[paths[module]])
        calls[paths[module]] += 1
        start = len(listening.answers)
        out = original(module, *args, **kwargs)
        heard[key] = tuple(listening.answers[start:])
        return out

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        with _on_copies(model), listening:
            args, kwargs = tree_map_only(Tensor, Tensor.clone, (call.args, call.kwargs))
            model(*args, **kwargs)
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
    return heard


@contextmanager
def _on_copies(model: nn.Module) -> Iterator[None]:
    """The block finds copies of parameters and buffers; attributes and random state are as before afterwards."""
    copies = {id(tensor): _copied(tensor) for _, tensor in named_state(model)}
    with (
        torch.random.fork_rng(devices=cuda_devices(model)),
        unchanged(model),
        swapped(model, copies),
    ):
        yield


def _copied(tensor: Tensor) -> Tensor:
    """A copy of the same values, a parameter for a parameter."""
    copy = tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copy, requires_grad=tensor.requires_grad)
    return copy.requires_grad_(tensor.requires_grad)


def cuda_devices(model: nn.Module) -> list[int]:
    """The indices of the CUDA devices that its parameters are on."""
    return sorted(
        {tensor.device.index for tensor in model.parameters() if tensor.device.type == "cuda"}
    )
