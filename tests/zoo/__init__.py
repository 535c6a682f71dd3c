"""The example models, and how tests capture and compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from pipecompile.api.target import load_target
from pipecompile.frontend.capture import capture
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.self_check import check_capture
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "examples" / "models.py"
EXAMPLES = ("gpt2", "bert", "t5", "llama", "resnet50", "unet", "sequential")


def example(name: str) -> Target:
    """Return an example model in train mode, with its minibatch of 8."""
    target = load_target(f"{MODELS}:{name}")
    target.model.train()
    return target


def first(batch: int, call: Arguments) -> Arguments:
    """Return the first `batch` samples of a call."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda value: value[:batch].clone(), (call.args, call.kwargs)
    )
    return Arguments(args, kwargs)


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Capture, fx.GraphModule]:
    """Return the capture of `model` for this call, after its self-check."""
    call = Arguments(args, kwargs)
    result = capture(model, call)
    module = result.instantiate(call)
    check_capture(result, module, call)
    return result, module


def called(graph: fx.Graph) -> list[str]:
    """Return the names of the modules, methods and functions that the graph calls, in order."""
    return [
        str(getattr(n.target, "__name__", n.target))
        for n in graph.nodes
        if n.op.startswith("call_")
    ]


def same(left: Any, right: Any) -> bool:
    """Return whether two results have the same structure and are equal bit for bit."""
    (leaves, spec), (others, other_spec) = pytree.tree_flatten(left), pytree.tree_flatten(right)
    return spec == other_spec and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(leaves, others, strict=True)
    )
