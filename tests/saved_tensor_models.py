"""Models, and saved tensors, on which tests try how these are encoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipecompile.graph.saved_tensors import EncodedStorages, encode_saved_tensors
from pipecompile.ir.encodings import ENCODINGS

EXACT = tuple(encoding for encoding in ENCODINGS if encoding != "half")


MIXES = (*((encoding,) for encoding in EXACT), ("mask", "relu", "pool"), EXACT)


class ConvolutionBlock(nn.Module):
    """A block as in the first layers of a convolutional network."""

    def __init__(self, inputs: int, outputs: int, *, inplace: bool) -> None:
        super().__init__()
        self.convolution, self.norm = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
        )
        self.relu, self.pool = nn.ReLU(inplace=inplace), nn.MaxPool2d(3, 2, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.pool(self.relu(self.norm(self.convolution(image))))  # type: ignore[no-any-return]


class Pools(nn.Module):
    """Every kind of pooling, and ReLU whose result other nodes save or do not save."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6 * 3 * 3, 5)

    def forward(self, image: Tensor) -> Tensor:
        image = self.first(image).relu()
        lined = functional.max_pool1d(image.flatten(2), 3).sum()
        image = functional.max_pool2d(image * image, 2, ceil_mode=True).relu_()
        deep = (
            functional.max_pool3d(image[:, None], 2).sum()
            + functional.avg_pool3d(image[:, None], 2).sum()
        )
        image = functional.avg_pool2d(
            image.to(memory_format=torch.channels_last), 3, stride=1, padding=1
        )
        adaptive = functional.adaptive_max_pool3d(image[:, None], (2, 3, 3)).sum()
        image = functional.adaptive_max_pool2d(image, 5)
        return (
            self.last(functional.adaptive_avg_pool2d(image, 3).flatten(1)) + lined * deep + adaptive
        )  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Views of one projection, dropout of scores, and the embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed, self.norm = (
            nn.Embedding(24, 24),
            nn.Linear(24, 72),
            nn.LayerNorm(24),
        )
        self.head = nn.Linear(24, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, value: Tensor) -> Tensor:
        tokens = self.table(value.flatten(1).abs().mul(7).long() % 24)[:, :12]
        query, key, given = self.mixed(tokens).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, given, dropout_p=0.2)
        tokens = tokens + functional.dropout(mixed.transpose(1, 2).flatten(2), 0.1)
        return self.head(self.norm(tokens)) * tokens.transpose(1, 2).mean() + value.mean()  # type: ignore[no-any-return]


class Writes(nn.Module):
    """Writes in place to views, before and after they are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        value[..., 4:].mul_(self.first.bias[4:])
        value[..., :4].relu_()
        return self.second(
            functional.dropout(value.transpose(-1, -2), 0.4).transpose(-1, -2)
        ).relu_()


class Checkpointed(nn.Module):
    """A recomputed region between other nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value = functional.dropout(self.before(value).relu(), 0.3)
        value = checkpoint(
            lambda x: functional.dropout(self.inside(x).relu(), 0.3), value, use_reentrant=False
        )
        return self.after(value).relu()


SAVING_MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(
        ConvolutionBlock(3, 8, inplace=True),
        ConvolutionBlock(8, 8, inplace=False),
        nn.Dropout2d(0.2),
    ),
    "channels last": lambda: ConvolutionBlock(3, 8, inplace=False).to(
        memory_format=torch.channels_last
    ),  # type: ignore[call-overload]
    "pools": Pools,
    "attention": Attention,
    "writes": Writes,
    "checkpointed": Checkpointed,
}


def seeded_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return SAVING_MODELS[name]()


def state_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def saving_model(
    model: nn.Module, *encodings: Any, storages: EncodedStorages | None = None
) -> nn.Module:
    """Return `model` with a forward whose saved tensors are encoded by `encodings`."""
    forward, storages = model.forward, storages or EncodedStorages()

    def encoded_forward(*values: Any) -> Any:
        with encode_saved_tensors(
            *encodings, storages=storages, exempt=[*state_of(model), *values]
        ) as note_results:
            return note_results(forward(*values))

    model.forward = encoded_forward  # type: ignore[method-assign]
    return model


class SaveArguments(torch.autograd.Function):
    """Saves its arguments."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *values: Tensor) -> Tensor:
        ctx.save_for_backward(*values)
        return anchor * 1


def saved_and_restored(
    encoding: Any, *values: Tensor, storages: EncodedStorages | None = None
) -> tuple[Tensor, ...]:
    """Return `values` as a backward gets them, after they were saved under `encoding`."""
    with encode_saved_tensors(encoding, storages=storages or EncodedStorages(), exempt=()):
        result = SaveArguments.apply(torch.ones(1, requires_grad=True), *values)
    return result.grad_fn.saved_tensors  # type: ignore[no-any-return]


def bytes_of(value: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes, to compare them whatever they stand for."""
    return torch.empty(value.numel(), dtype=value.dtype).copy_(value.flatten()).view(torch.uint8)
