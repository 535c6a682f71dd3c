"""What ranks do with models that were built on the meta device; each runs on every rank."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import reference_for
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.training.pipeline import Pipeline
from tests.device import DEVICE
from tests.distributed.training_jobs import Mixture, mixture, token_loss


class Residual(nn.Module):
    """A module that sets something of its own, and changes what a part of it has set."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(16))
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin small."""
        self.scale.fill_(2.0)
        self.last.weight.div_(100)
        self.last.bias.zero_()

    def forward(self, value: Tensor) -> Tensor:
        """From and to a tensor of shape (N, 6, 16)."""
        output: Tensor = self.last(torch.tanh(self.first(value * self.scale)))
        return output


class Tied(nn.Module):
    """Layers that can all set themselves, with a table that is read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16), *(Residual() for _ in range(3))])
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of shape (N, 6) to logits of shape (N, 6, 11)."""
        value = self.table(tokens)
        for layer in self.layers:
            value = torch.tanh(layer(value)) + value
        value = self.attention(value, value, value, need_weights=False)[0]
        return self.head(self.norm(value))


def tokens_of(samples: int) -> Tensor:
    """The same tokens in every process."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 11, (samples, 6), generator=generator).to(DEVICE)


def on_meta(kind: type[nn.Module], **options: Any) -> Pipeline:
    """A pipeline of a model that nobody has in memory."""
    with torch.device("meta"):
        model = kind().double()
    tokens = tokens_of(16)
    options = {"costs": "flops", "microbatches": 4, "ranks": dist.get_world_size(), **options}
    return pipecompile(model, tokens, loss_fn=token_loss, sample_target=tokens, **options)


def set_by_modules() -> tuple[dict[str, Tensor], set[str]]:
    """What modules have set on this rank, and what is still without memory."""
    pipeline = on_meta(Tied, seed=3)
    rest = {n for n, p in pipeline._target.model.named_parameters() if p.is_meta}
    pipeline.step(tokens_of(16), tokens_of(16))
    return pipeline.state_dict(), rest


def from_file(path: str) -> float:
    """How far gradients are from those of the unsplit model, whose weights are in the file."""
    pipeline = on_meta(Mixture, weights=path)
    model = mixture(16).model
    target = Target(model, arguments_of(model, tokens_of(16)), token_loss, tokens_of(16))
    reference = reference_for(target, pipeline.plan)
    reference.step(target, 4, seed=pipeline.seed)
    pipeline.step(tokens_of(16), tokens_of(16))
    output = pipeline.evaluate(tokens_of(16))
    assert (output is None) == (dist.get_rank() != dist.get_world_size() - 1)
    wanted = dict(reference.model.named_parameters())
    return max(
        (parameter.grad - wanted[name].grad).abs().max().item()
        for name, parameter in pipeline.named_parameters()
    )


def from_checkpoint(path: str, ranks: int) -> tuple[dict[str, Tensor], set[str]]:
    """The state that this rank has from a checkpoint, and the names that it has no memory for."""
    pipeline = on_meta(Mixture, weights=path, ranks=ranks)
    rest = {n for n, p in pipeline._target.model.named_parameters() if p.is_meta}
    return pipeline.state_dict(), rest


class Masked(nn.Module):
    """A buffer whose values are those that mark what nothing has set, and a weight with a NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 11)
        self.register_buffer("mask", torch.zeros(6, dtype=torch.uint8))

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens of shape (N, 6) to logits of shape (N, 11)."""
        output: Tensor = self.last(self.first(tokens.double()).masked_fill(self.mask > 0, 0.0))
        return output


def values_from_file(path: str) -> dict[str, Tensor]:
    """What this rank has of the model whose weights are in the file."""
    return on_meta(Masked, weights=path).state_dict()


def without_a_value() -> str:
    """What is said of a parameter that no module sets."""
    try:
        on_meta(Mixture)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


WIDTH, LAYERS = 4096, 8
LAYER_BYTES = 4 * (WIDTH + 1) * WIDTH


def write_layers(file: Path, kind: str) -> None:
    """Write weights for the model of `peak_growth`."""
    shapes = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}
    layers = range(LAYERS)
    state = {f"{i}.{n}": torch.zeros(s) for i in layers for n, s in shapes.items()}
    if kind == "safetensors":
        save_file(state, file)
    else:
        run = {"steps": 0, "seed": 0} if kind == "a run's checkpoint" else {}
        dcp.save({"model": state, **run}, checkpoint_id=file, no_dist=True)


def peak_growth(weights: str | None = None) -> tuple[int, int]:
    """By how many bytes this process grew at most, and the bytes of its stage."""
    on_meta(Tied)  # the first pipeline of a process imports what takes memory too
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    batch = torch.randn(4, WIDTH)
    gc.collect()  # what earlier jobs of this process have left would be freed meanwhile
    _forget_peak()
    before = _peak_bytes()
    pipeline = pipecompile(
        model,
        batch,
        ranks=dist.get_world_size(),
        costs="flops",
        loss_fn=functional.mse_loss,
        sample_target=batch,
        microbatches=dist.get_world_size(),
        weights=weights,
    )
    grown = _peak_bytes() - before
    return grown, sum(parameter.nbytes for parameter in pipeline.parameters())


def _forget_peak() -> None:
    """Let the kernel measure the peak of this process anew; it has that of its parent."""
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
