"""Small architectures made of torch's own layers, and what all small models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from examples.models import sequential, unet

BATCH = 8
TOKENS = 8
WIDTH = 32
VOCABULARY = 64


def normal(*shape: int, seed: int = 1) -> Tensor:
    """A minibatch of numbers, 8 × shape."""
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int = 1) -> Tensor:
    return torch.randint(
        1, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(seed)
    )


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of the logits of each token."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def regression(
    kind: Callable[[], nn.Module], sample: Any = None, *, outputs: tuple[int, ...] = (4,)
) -> Any:
    """Return a target whose model maps vectors, or `sample`, to `outputs` numbers each."""
    torch.manual_seed(0)
    return {
        "model": kind(),
        "sample_input": normal(WIDTH) if sample is None else sample,
        "targets": normal(*outputs, seed=2),
        "loss_fn": nn.functional.mse_loss,
    }


def language(kind: Callable[[], nn.Module], *more: Tensor) -> dict[str, Any]:
    """Return a target whose model maps tokens to the logits of the next ones."""
    torch.manual_seed(0)
    tokens = _tokens()
    return {
        "model": kind(),
        "sample_input": (tokens, *more),
        "targets": tokens.roll(-1, 1),
        "loss_fn": token_loss,
    }


class Block(nn.Module):
    """A residual feed-forward block with dropout; the last dimension is `width`."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 2 * width)
        self.contract = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.contract(nn.functional.gelu(self.expand(self.norm(x)))))


class Skips(nn.Module):
    """The input and the first block's result are joined to the last block's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(3 * WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        first = features = self.blocks[0](x)
        for block in self.blocks[1:]:
            features = block(features)
        return self.head(torch.cat([x, first, features], dim=-1))


def skips() -> dict[str, Any]:
    """Skips across six blocks, which are relayed over many stages."""
    return regression(Skips)


class Shared(nn.Module):
    """`block` is called three times, and has a second name."""

    def __init__(self) -> None:
        super().__init__()
        self.block = self.same_block = Block()
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        x = self.block(torch.tanh(self.between[0](x)))
        x = self.same_block(torch.tanh(self.between[1](x)))
        return self.head(x)


def shared() -> dict[str, Any]:
    """One module called three times, under two names."""
    return regression(Shared)


class Ties(nn.Module):
    """One matrix embeds and, transposed, gives logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def ties() -> dict[str, Any]:
    """Embedding and head are one parameter, of the first and of the last stage."""
    return language(Ties)


class Recurrent(nn.Module):
    """Three LSTMs, the last one in both directions; each begins with the last one's final state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.both_ways = nn.LSTM(WIDTH, WIDTH, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        features, state = self.first(self.embedding(tokens))
        features, state = self.second(features, state)
        return self.head(self.both_ways(features, state)[0])


def lstm() -> dict[str, Any]:
    """Stacked LSTMs whose states pass on beside their results."""
    return language(Recurrent)


class SequenceToSequence(nn.Module):
    """A GRU reads, a GRU cell writes token by token and looks back."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRUCell(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        memory, state = self.encoder(self.embedding(source))
        state = state[-1]
        states = []
        for word in self.embedding(target).unbind(dim=1):
            weights = (memory @ state[:, :, None]).softmax(dim=1)
            state = self.decoder(torch.cat([word, (weights * memory).sum(dim=1)], dim=-1), state)
            states.append(state)
        return self.head(torch.stack(states, dim=1))


def gru_seq2seq() -> dict[str, Any]:
    """A loop over tokens around one cell: a long chain of calls of one module."""
    return language(SequenceToSequence, _tokens(seed=2))


class Siamese(nn.Module):
    """One encoder for three images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, WIDTH),
        )

    def forward(
        self, anchor: Tensor, positive: Tensor, negative: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.encoder(anchor), self.encoder(positive), self.encoder(negative)


def triplet_loss(output: tuple[Tensor, Tensor, Tensor], target: None) -> Tensor:
    """The positive image is to be nearer to the anchor than the negative one."""
    return nn.functional.triplet_margin_loss(*output)


def siamese() -> dict[str, Any]:
    """One encoder with running statistics for three inputs, and a loss without targets."""
    torch.manual_seed(0)
    images = tuple(normal(3, 16, 16, seed=seed) for seed in (1, 2, 3))
    return {"model": Siamese(), "sample_input": images, "loss_fn": triplet_loss}


class Translator(nn.Module):
    """nn.Transformer between an embedding and a head; the source is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, dim_feedforward=64, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(
            target.shape[1], device=target.device
        )
        padding = torch.where(source == 0, float("-inf"), 0.0)
        features = self.body(
            self.embedding(source),
            self.embedding(target),
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(features)


def transformer() -> dict[str, Any]:
    """The nn.Transformer of torch, masked, with a padded source."""
    source = _tokens(seed=2)
    source[::2, -3:] = 0
    return language(Translator, source)


class TimedConvolution(nn.Module):
    """A convolution that also reads the time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(4, outputs)
        self.time = nn.Linear(WIDTH, outputs)

    def forward(self, signal: Tensor, time: Tensor) -> Tensor:
        return nn.functional.silu(self.norm(self.convolution(signal)) + self.time(time)[:, :, None])


class Denoiser(nn.Module):
    """A U-Net over signals of 32 samples; all levels read the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.down = nn.ModuleList(
            [TimedConvolution(2, 8), TimedConvolution(8, 16), TimedConvolution(16, 32)]
        )
        self.up = nn.ModuleList([TimedConvolution(32, 16), TimedConvolution(16, 8)])
        self.widen = nn.ModuleList(
            [nn.ConvTranspose1d(32, 16, 2, stride=2), nn.ConvTranspose1d(16, 8, 2, stride=2)]
        )
        self.head = nn.Conv1d(8, 2, 1)

    def forward(self, signal: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(WIDTH // 2, device=time.device) / 4)
        angles = time[:, None] * frequencies
        encoded = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        first = self.down[0](signal, encoded)
        second = self.down[1](nn.functional.avg_pool1d(first, 2), encoded)
        third = self.down[2](nn.functional.avg_pool1d(second, 2), encoded)
        second = self.up[0](torch.cat([second, self.widen[0](third)], dim=1), encoded)
        first = self.up[1](torch.cat([first, self.widen[1](second)], dim=1), encoded)
        return self.head(first)


def denoiser() -> dict[str, Any]:
    """The U-Net of a diffusion model in one dimension; the time reaches every level."""
    return regression(Denoiser, (normal(2, 32), normal().abs()), outputs=(2, 32))


MODULES: dict[str, Callable[[], Any]] = {
    factory.__name__: factory
    for factory in (
        sequential, unet, skips, shared, ties, lstm, gru_seq2seq, siamese, transformer,
        denoiser,
    )
}  # fmt: skip
