"""Models whose forward depends on the sizes of its input, for tests of several shapes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CausalModel", "ImageModel", "samples_of", "token_loss"]

VOCABULARY, WIDTH = 13, 16


class CausalModel(nn.Module):
    """Tokens to logits of the next ones: positions, a causal mask, dropout, a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(2)])
        self.attentions = nn.ModuleList([nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Ids of shape (N, T) to logits of shape (N, T, 13)."""
        length = ids.shape[1]
        value = self.tokens(ids) + self.positions(torch.arange(length))
        mask = torch.full((length, length), float("-inf"), dtype=value.dtype).triu(1)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            query, key, content = attention(norm(value)).chunk(3, -1)
            scores = query @ key.transpose(1, 2) / length**0.5 + mask
            value = value + self.dropout(scores.softmax(-1) @ content)
        return self.head(value)


class ImageModel(nn.Module):
    """Images of any size to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last = nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        """Images of shape (N, 3, H, W) to logits of shape (N, 5)."""
        value = torch.relu(self.norm(self.first(images)))
        value = torch.relu(self.second(value))
        value = functional.interpolate(value, scale_factor=0.5, mode="bilinear")
        return self.last(value.mean((2, 3)))


def samples_of(samples: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ids of shape (samples, length) and their targets, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * samples + 10 * length + seed)
    ids = torch.randint(0, VOCABULARY, (samples, length), generator=generator)
    return ids, ids.roll(-1, 1)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross entropy of all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
