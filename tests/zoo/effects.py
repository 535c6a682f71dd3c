"""Small modules with side effects, data dependence, autograd contexts, hooks or pytrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .modules import TOKENS, WIDTH, Block, normal, regression


class Gate(nn.Module):
    """Runs one of its two layers, depending on the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.positive = nn.Linear(WIDTH, WIDTH)
        self.negative = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return torch.relu(self.positive(x))
        return torch.tanh(self.negative(x))


def data_branch() -> dict[str, Any]:
    """A module in the middle that branches on its input's values."""
    return regression(
        lambda: nn.Sequential(Block(), Gate(), Block(), Gate(), Block(), nn.Linear(WIDTH, 4))
    )


class BatchBranch(nn.Module):
    """Large batches are normed over their samples, small ones over their features."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        dimension = 0 if x.shape[0] > 3 else 1
        x = self.blocks[1](x - x.mean(dim=dimension, keepdim=True))
        return self.head(self.blocks[2](x))


def batch_branch() -> dict[str, Any]:
    """Batches of four and more are computed in another way than smaller ones."""
    return regression(BatchBranch)


class Rounding(torch.autograd.Function):
    """Rounds; the gradient passes straight through where the input was small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.limit = limit
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < ctx.limit), None


class Quantized(nn.Module):
    """Rounds between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Rounding.apply(block(x), 1.5)
        return self.head(x)


def custom_function() -> dict[str, Any]:
    """An autograd.Function whose backward is not the derivative of its forward."""
    return regression(Quantized)


class Checkpointed(nn.Module):
    """Recomputes blocks with dropout, in turns in the newer way and in the reentrant one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=index % 2 == 1)
        return self.head(x)


def checkpointed() -> dict[str, Any]:
    """torch.utils.checkpoint in both its ways."""
    return regression(Checkpointed)


class Autocast(nn.Module):
    """Two blocks in bfloat16, within them a sum in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            x = self.blocks[0](x)
            with torch.autocast(x.device.type, enabled=False):
                x = x / (1 + x.float().square().sum(dim=-1, keepdim=True).sqrt())
            x = self.blocks[1](x)
        return self.head(x.float())


def autocast() -> dict[str, Any]:
    """A region under bfloat16 with a region under float32 in it, each long enough to be cut in."""
    return regression(Autocast)


class WithoutGradient(nn.Module):
    """A frozen teacher in a no_grad region, a statistic in an inference_mode region."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Block()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        with torch.no_grad():
            lesson = self.teacher(x).tanh()
        x = self.blocks[1](x + lesson)
        with torch.inference_mode():
            level = x.abs().mean(dim=-1, keepdim=True) + 1
        return self.head(self.blocks[2](x / level.clone()))


def no_grad() -> dict[str, Any]:
    """Regions under no_grad, whose parameters get no gradient, and under inference_mode."""
    return regression(WithoutGradient)


class InPlace(nn.Module):
    """Writes into results, into views of them and into a tensor that it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).relu_()
        features = self.layers[1](x)
        left = features[:, : WIDTH // 2]
        left.add_(1).unsqueeze(1).mul_(2)
        x = self.layers[2](self.relu(features))
        x[:, 0] = 0.5
        x[:, 1] = x[:, 2].tanh()
        x += features
        joined = torch.zeros_like(x)
        joined[:, ::2] = self.layers[3](x)[:, ::2]
        joined[:, 1::2].copy_(x[:, 1::2])
        return self.head(joined)


def in_place() -> dict[str, Any]:
    """In-place methods, views that are written through, index assignment, augmented assignment."""
    return regression(InPlace)


class Averages(nn.Module):
    """Keeps averages of what it sees: one written in place, one replaced; and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("ema", torch.ones(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().mean(dim=(0, 1)), alpha=0.1)
            self.ema = 0.9 * self.ema + 0.1 * x.detach().square().mean(dim=(0, 1))
            self.steps += 1
        return torch.relu((x - self.mean) / self.ema.sqrt() + 1 / (1 + self.steps))


def buffers() -> dict[str, Any]:
    """Batch normalisation, averages updated in place and replaced, a counter; all are read."""

    def model() -> nn.Module:
        return nn.Sequential(Averages(), Averages(), Averages(), nn.Linear(WIDTH, 4))

    return regression(model, normal(TOKENS, WIDTH), outputs=(TOKENS, 4))


class Writer(nn.Module):
    """Leaves a tensor and a number in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gate: Tensor | None = None
        self.width = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.gate, self.width = torch.sigmoid(x), x.shape[-1]
        return torch.relu(x)


class Reader(nn.Module):
    """Reads what `writer` left."""

    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.writer = [writer]  # in a list, so that it is not a submodule

    def forward(self, x: Tensor) -> Tensor:
        writer = self.writer[0]
        return self.linear(x) * writer.gate / writer.width**0.5


def attributes() -> dict[str, Any]:
    """A module leaves values in its attributes, two blocks later another module reads them."""

    def model() -> nn.Module:
        writer = Writer()
        return nn.Sequential(writer, Block(), Block(), Reader(writer), Block(), nn.Linear(WIDTH, 4))

    return regression(model)


def _doubled(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (inputs[0] * 2,)


def _shifted(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output + inputs[0].mean(dim=-1, keepdim=True)


def _halved(gradient: Tensor) -> Tensor:
    return gradient / 2


class Hooked(nn.Module):
    """Hooks on a module of torch's, on a block, and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        self.blocks[0].register_forward_hook(_shifted)
        self.blocks[1].expand.register_forward_pre_hook(_doubled)
        self.head.register_forward_hook(_shifted)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        if x.requires_grad:
            x.register_hook(_halved)
        return self.head(self.blocks[2](x))


def hooks() -> dict[str, Any]:
    """Hooks that change an input, an output and a gradient."""
    return regression(Hooked)


@dataclass
class Answer:
    """A result with tensors at many places."""

    value: Tensor
    parts: list[Tensor]
    named: dict[str, Any]


pytree.register_dataclass(Answer)


def answer_loss(answer: Answer, target: Tensor) -> Tensor:
    """The squared error of the value, with a part of each other tensor's square."""
    others = [*answer.parts, answer.named["left"], *answer.named["pair"]]
    return nn.functional.mse_loss(answer.value, target) + sum(
        0.1 * other.square().mean() for other in others
    )


class Nested(nn.Module):
    """Takes and returns trees of tensors, constants and None."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Block()
        self.right = Block()
        self.both = Block(2 * WIDTH)
        self.head = nn.Linear(2 * WIDTH, 4)

    def forward(
        self,
        x: Tensor,
        more: Mapping[str, Any],
        /,
        scale: float,
        *,
        mask: Tensor | None = None,
        kind: str = "mean",
    ) -> Answer:
        left = self.left(x + more["left"])
        right = self.right(x - scale * more["pair"][0] * more["pair"][1])
        if mask is not None:
            right = right.masked_fill(mask, 0)
        both = self.both(torch.cat([left, right], dim=-1))
        level = both.mean(dim=-1) if kind == "mean" else both.amax(dim=-1)
        named = {"left": left, "pair": (right, level), "missing": more["missing"], "kind": kind}
        return Answer(self.head(both), [level, both], named)


def nested() -> dict[str, Any]:
    """Nested arguments and results, with None, a number and a string among the tensors."""
    more = {
        "left": normal(WIDTH, seed=3),
        "pair": [normal(WIDTH, seed=4), normal(1, seed=5)],
        "missing": None,
    }
    target = regression(Nested, (normal(WIDTH), more, 0.5))
    return {
        **target,
        "sample_kwargs": {"mask": normal(WIDTH, seed=6) > 1, "kind": "mean"},
        "loss_fn": answer_loss,
    }


class KeywordsOnly(nn.Module):
    """A query looks into a context."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.block = Block()
        self.head = nn.Linear(WIDTH, 4)

    def forward(
        self, *, query: Tensor, context: Tensor, mask: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        scores = scale * self.key(context) @ self.query(query)[..., None]
        if mask is not None:
            scores = scores.masked_fill(mask[..., None], float("-inf"))
        return self.head(self.block((scores.softmax(dim=1) * self.value(context)).sum(dim=1)))


def kwargs_only() -> dict[str, Any]:
    """Keyword-only arguments, passed in another order than declared; two keep their defaults."""
    return regression(
        KeywordsOnly, {"context": normal(TOKENS, WIDTH, seed=3), "query": normal(WIDTH)}
    )


EFFECTS: dict[str, Callable[[], Any]] = {
    factory.__name__: factory
    for factory in (
        data_branch, batch_branch, custom_function, checkpointed, autocast, no_grad, in_place,
        buffers, attributes, hooks, nested, kwargs_only,
    )
}  # fmt: skip
