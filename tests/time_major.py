"""Models that read (time, batch, …), and the loop over views of a minibatch as their oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.unequal_batches import sizes_of

__all__ = [
    "DIMS",
    "LENGTH",
    "WIDTH",
    "Classifier",
    "Encoder",
    "Recurrent",
    "Translator",
    "gap",
    "loop",
    "output_loss",
    "parts_of",
    "translations",
]

WIDTH, LENGTH = 8, 5
DIMS = {"source": 1, "wanted": 1, "padding": 0, "causal": None}
"""Where the inputs of a Translator have the batch."""


class Recurrent(nn.Module):
    """Two recurrent layers between linear ones; returns outputs and all states."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lower, self.upper = kind(WIDTH, WIDTH, 2, dropout=dropout), kind(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Any]:
        """(T, N, WIDTH) to (T, N, WIDTH) and the states, of (L, N, WIDTH) each."""
        value, state = self.lower(self.first(value))
        return self.last(self.upper(value)[0]), state


class Encoder(nn.Module):
    """Two encoder layers; returns what they make of (T, N, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0) for _ in range(2)]
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.Sequential(*layers)

    def forward(self, value: Tensor) -> tuple[Tensor, None]:
        return self.layers(self.first(value)), None


class Classifier(nn.Module):
    """Reads (T, N, WIDTH) and returns (N, classes)."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.last = nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, classes)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(torch.tanh(self.body(value)[0][-1]))


class Translator(nn.Module):
    """nn.Transformer over time-major sequences, with a mask of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(WIDTH, 2, 1, 2, 16, dropout=0.0)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, source: Tensor, wanted: Tensor, *, padding: Tensor, causal: Tensor) -> Tensor:
        """`padding` is (N, time of source), `causal` (time, time) of `wanted`."""
        value = self.body(source, wanted, tgt_mask=causal, src_key_padding_mask=padding)
        return self.last(value)


def translations(samples: int, seed: int = 0) -> dict[str, Tensor]:
    """A batch for a Translator; in some samples the end of the source is padding."""
    generator = torch.Generator().manual_seed(seed)
    source, wanted = (
        torch.randn(length, samples, WIDTH, generator=generator).double()
        for length in (LENGTH, LENGTH + 1)
    )
    lengths = torch.arange(samples) % 3 + LENGTH - 2
    padding = torch.arange(LENGTH) >= lengths[:, None]
    causal = torch.ones(LENGTH + 1, LENGTH + 1).triu(1).bool()
    return {"source": source, "wanted": wanted, "padding": padding, "causal": causal}


def output_loss(output: Any, target: Tensor) -> Tensor:
    """The distance of the first output to the target, and the squares of states beside it."""
    value, state = output if isinstance(output, tuple) else (output, None)
    states = () if state is None else state if isinstance(state, tuple) else (state,)
    return functional.mse_loss(value, target) + sum(each.square().mean() for each in states)


def parts_of(
    batch: Mapping[str, Tensor], dims: Mapping[str, int | None], planned: int
) -> list[dict[str, Tensor]]:
    """The microbatches of a batch as views; what has no batch is in each of them."""
    name, dim = next((name, dim) for name, dim in dims.items() if dim is not None)
    sizes = sizes_of(batch[name].shape[dim], planned)
    columns = {
        name: [value] * len(sizes) if dims[name] is None else value.split(sizes, dims[name])
        for name, value in batch.items()
    }
    return [{name: column[i] for name, column in columns.items()} for i in range(len(sizes))]


def loop(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    batch: Mapping[str, Tensor],
    target: Tensor,
    dims: Mapping[str, int | None],
    planned: int,
    target_dim: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean loss and the gradients of a plain loop over microbatches that are views."""
    model.zero_grad()
    rows = parts_of({**batch, "target": target}, {**dims, "target": target_dim}, planned)
    samples, losses = target.shape[target_dim], []
    for row in rows:
        wanted = row.pop("target")
        weight = wanted.shape[target_dim] / planned
        loss = loss_fn(model(**row), wanted)
        (loss * weight if weight != 1 else loss).backward()
        losses.append(loss.detach() * (weight * planned / samples))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(samples / planned)
    named = model.named_parameters()
    return torch.stack(losses).sum(), {n: p.grad for n, p in named if p.grad is not None}


def gap(own: Any, other: Any) -> float:
    """The largest difference of two results, which are trees of tensors of the same shapes."""
    pairs = zip(
        torch.utils._pytree.tree_leaves(own), torch.utils._pytree.tree_leaves(other), strict=True
    )
    found = [0.0]
    for one, two in pairs:
        if isinstance(one, Tensor):
            assert one.shape == two.shape
            found.append((one - two).abs().max().item())
    return max(found)
