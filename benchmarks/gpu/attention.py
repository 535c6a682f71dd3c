"""Activations that attention keeps on a device, against what the memory model expects.

On a GPU PyTorch chooses among several kernels, and each keeps other things for its backward.
`profiling/cuda.py` says which one is expected; the notes here name the one that ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from benchmarks.gpu.bench import Bench, warm_up
from benchmarks.gpu.cases import Case
from benchmarks.gpu.models import Scale
from benchmarks.gpu.rows import Row
from benchmarks.gpu.subject import subject_of
from pipecompile.graph.random_streams import StreamKey
from pipecompile.profiling.cuda import attention_kernel

__all__ = ["AttentionKind", "AttentionLayer", "attention_cases"]


class AttentionKind(NamedTuple):
    """One way to call attention."""

    name: str
    dtype: torch.dtype
    is_causal: bool = False
    dropout: float = 0.0
    has_mask: bool = False
    head_width: int = 64


KINDS = (
    AttentionKind("bfloat16", torch.bfloat16),
    AttentionKind("bfloat16, causal", torch.bfloat16, is_causal=True),
    AttentionKind("bfloat16, causal, dropout", torch.bfloat16, is_causal=True, dropout=0.1),
    AttentionKind("bfloat16, heads of 60", torch.bfloat16, is_causal=True, head_width=60),
    AttentionKind("bfloat16, heads of 128", torch.bfloat16, is_causal=True, head_width=128),
    AttentionKind("bfloat16, mask", torch.bfloat16, has_mask=True),
    AttentionKind("float16, causal", torch.float16, is_causal=True),
    AttentionKind("float32, causal", torch.float32, is_causal=True),
    AttentionKind("float32, dropout", torch.float32, dropout=0.1),
)


class AttentionLayer(nn.Module):
    """Projections, attention, and a projection back, for states (batch, tokens, width)."""

    def __init__(self, kind: AttentionKind, heads: int, tokens: int) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        width = heads * kind.head_width
        self.project_in, self.project_out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mask: Tensor
        mask = torch.zeros(tokens, tokens).tril() if kind.has_mask else torch.zeros(1)
        self.register_buffer("mask", mask)

    def forward(self, state: Tensor) -> Tensor:
        query, key, value = self.heads_of(state)
        mixed: Tensor = nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=self.mask if self.kind.has_mask else None,
            dropout_p=self.kind.dropout,
            is_causal=self.kind.is_causal,
        )
        output: Tensor = self.project_out(mixed.transpose(1, 2).flatten(2))
        return output

    def heads_of(self, state: Tensor) -> list[Tensor]:
        """Return query, key and value, each (batch, heads, tokens, head width)."""
        parts = self.project_in(state).chunk(3, -1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]

    def expected_kernel(self, state: Tensor) -> str:
        """Return which kernel the memory model expects on CUDA."""
        mask = self.mask if self.kind.has_mask else None
        query, key, value = self.heads_of(state)
        return attention_kernel(query, key, value, mask, self.kind.is_causal)


def attention_cases(bench: Bench) -> Iterator[Case]:
    """Yield a case for each way to call attention."""
    for kind in KINDS:
        yield Case(kind.name, partial(_rows, bench, kind))


def _layer(kind: AttentionKind, scale: Scale) -> dict[str, Any]:
    width = scale.heads * kind.head_width
    shape = scale.batch, scale.tokens, width
    states = torch.randn(shape, generator=torch.Generator().manual_seed(1), device="cpu")
    return {
        "model": AttentionLayer(kind, scale.heads, scale.tokens).to(kind.dtype),
        "sample_input": states.to(kind.dtype),
        "targets": torch.zeros(scale.batch, device="cpu"),
        "loss_fn": _mean_square,
    }


def _mean_square(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def _rows(bench: Bench, kind: AttentionKind) -> Iterator[Row]:
    warm_up(bench.device)

    def layer(scale: Scale) -> dict[str, Any]:
        return _layer(kind, scale)

    subject = subject_of(bench, layer, microbatches=1)
    plan = subject.plan(k=1, schedule="gpipe")
    (stage,) = subject.stages(plan)
    (values,), (target,) = subject.inputs(), subject.targets()
    note = _kernels(subject.target.model, values[0])
    usage = bench.meter.usage(lambda: stage.forward(values, StreamKey(0, 0, 0), target))
    activations = plan.stages[0].footprint.activations
    yield Row(f"kept, {kind.name}", activations.expected, usage.kept, "bytes", "expected", note)


def _kernels(layer: nn.Module, state: Tensor) -> str:
    """Return the kernel that is expected on CUDA and the one that ran, by its autograd node."""
    assert isinstance(layer, AttentionLayer)
    output = layer(state)
    names = {name for name in _autograd_names(output.grad_fn) if "ttention" in name}
    ran = ", ".join(sorted(names)) or "none that is fused"
    return f"expected on CUDA {layer.expected_kernel(state)}; ran {ran}"


def _autograd_names(root: Node | None) -> set[str]:
    """Return the names of all autograd nodes behind `root`."""
    names, waiting, seen = set[str](), [root], set[Node]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.add(node.name())
        waiting += [following for following, _ in node.next_functions]
    return names
