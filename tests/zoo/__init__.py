"""The example models, and how tests capture and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from pipecompile.api.target import Target, load_target
from pipecompile.frontend.capture import capture
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.self_check import check_capture
from pipecompile.frontend.signature import Arguments

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "models.py"
EXAMPLES = ("gpt2", "bert", "t5", "llama", "resnet50", "unet", "sequential")


def example(name: str) -> Target:
    """An example model in train mode, with its minibatch of 8."""
    target = load_target(f"{MODELS}:{name}")
    target.model.train()
    return target


def first(batch: int, call: Arguments) -> Arguments:
    """The first `batch` samples of a call."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda value: value[:batch].clone(), (call.args, call.kwargs)
    )
    return Arguments(args, kwargs)


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Capture, fx.GraphModule]:
    """The capture of `model` for this call, proven by a training step."""
    call = Arguments(args, kwargs)
    found = capture(model, call)
    module = found.instantiate(call)
    check_capture(found, module, call)
    return found, module


def called(graph: fx.Graph) -> list[str]:
    """What the graph calls, in order: names of modules, methods and functions."""
    return [
        str(getattr(n.target, "__name__", n.target))
        for n in graph.nodes
        if n.op.startswith("call_")
    ]


def same(left: Any, right: Any) -> bool:
    """Whether two results have one structure and are equal bit for bit."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(left), pytree.tree_flatten(right)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )
