"""What is kept in another form for the backward: the gradients are the same bit for bit, and memory is what is said."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from allocations import allocations
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from stages import loss_of
from zoo import example, first, same

from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.passes.seed import Moment
from pipecompile.runtime.encodings import half, mask, narrow, pack_bits, sign, unpack_bits
from pipecompile.runtime.saving import POLICIES, Shelf, saving
from pipecompile.runtime.saving_costs import SavedStorage, SavingCost, Use, saving_cost
from pipecompile.runtime.stage import EagerStage

EXACT = tuple(policy for policy in POLICIES if policy != "half")
MIXES = (*((policy,) for policy in EXACT), ("mask", "relu", "pool"), EXACT)
Step = Callable[[], Any]


class Block(nn.Module):
    """As in a convolutional network's first layers."""

    def __init__(self, inputs: int, outputs: int, *, inplace: bool) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.relu, self.pool = nn.ReLU(inplace=inplace), nn.MaxPool2d(3, 2, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        return self.pool(self.relu(self.norm(self.convolution(image))))  # type: ignore[no-any-return]


class Pools(nn.Module):
    """Every kind of pooling, and ReLU on what others keep and what they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 6, 3), nn.Linear(6 * 3 * 3, 5)

    def forward(self, image: Tensor) -> Tensor:
        image = self.first(image).relu()
        lined = functional.max_pool1d(image.flatten(2), 3).sum()
        image = functional.max_pool2d(image * image, 2, ceil_mode=True).relu_()
        deep = functional.max_pool3d(image[:, None], 2).sum() + functional.avg_pool3d(image[:, None], 2).sum()
        image = functional.avg_pool2d(image.to(memory_format=torch.channels_last), 3, stride=1, padding=1)
        adaptive = functional.adaptive_max_pool3d(image[:, None], (2, 3, 3)).sum()
        image = functional.adaptive_max_pool2d(image, 5)
        return self.last(functional.adaptive_avg_pool2d(image, 3).flatten(1)) + lined * deep + adaptive  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Views of one projection, dropout of scores, and the table of the embedding once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mixed, self.norm = nn.Embedding(24, 24), nn.Linear(24, 72), nn.LayerNorm(24)
        self.head = nn.Linear(24, 24, bias=False)
        self.head.weight = self.table.weight

    def forward(self, value: Tensor) -> Tensor:
        tokens = self.table(value.flatten(1).abs().mul(7).long() % 24)[:, :12]
        query, key, given = self.mixed(tokens).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, given, dropout_p=0.2)
        tokens = tokens + functional.dropout(mixed.transpose(1, 2).flatten(2), 0.1)
        return self.head(self.norm(tokens)) * tokens.transpose(1, 2).mean() + value.mean()  # type: ignore[no-any-return]


class Writes(nn.Module):
    """In place, on views, before and after they are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        value[..., 4:].mul_(self.first.bias[4:])
        value[..., :4].relu_()
        return self.second(functional.dropout(value.transpose(-1, -2), 0.4).transpose(-1, -2)).relu_()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(Block(3, 8, inplace=True), Block(8, 8, inplace=False), nn.Dropout2d(0.2)),
    "channels last": lambda: Block(3, 8, inplace=False).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "pools": Pools,
    "attention": Attention,
    "writes": Writes,
    "checkpointed": lambda: Checkpointed(),
}


class Checkpointed(nn.Module):
    """With a region that is computed again, between others."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inside, self.after = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value = functional.dropout(self.before(value).relu(), 0.3)
        value = checkpoint(lambda x: functional.dropout(self.inside(x).relu(), 0.3), value, use_reentrant=False)
        return self.after(value).relu()


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def images(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(2, 3, 16, 8, generator=generator) for _ in range(count))


def state(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def kept_by(model: nn.Module, *policies: Any, shelf: Shelf | None = None) -> nn.Module:
    """The same model; its forward keeps by `policies`."""
    keeper = saving(*policies, shelf=shelf or Shelf(), spared=state(model))
    model.forward = keeper(model.forward)  # type: ignore[method-assign]
    return model


def trained(model: nn.Module, inputs: Sequence[Sequence[Tensor]], *, halves: bool = False) -> list[Any]:
    """The gradients of `inputs`, each of a microbatch, and parameters; all microbatches are in flight at once."""
    carries = tuple(value.is_floating_point() for value in inputs[0])
    stage = EagerStage(model, gradient_inputs=carries, loss=lambda outputs, _: outputs[0].square().mean())
    forward = model.forward
    model.forward = lambda *args: (forward(*args),)  # type: ignore[method-assign]
    saved, found = [], []
    for microbatch, values in enumerate(inputs):
        torch.manual_seed(microbatch)
        saved.append(stage.forward(values, Moment(0, 0, microbatch))[1])
    for one in saved:
        if halves:
            gradients, live = stage.backward_input(one, ())
            stage.backward_weight(live, {})
        else:
            gradients = stage.backward(one, (), {})
        found += gradients
    return [*found, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("policies", MIXES, ids="+".join)
@pytest.mark.parametrize("name", MODELS)
def test_the_backward_is_the_same(name: str, policies: Sequence[str]) -> None:
    inputs = [(image,) for image in images(3)]
    shelf = Shelf()
    got = trained(kept_by(made(name), *policies, shelf=shelf), inputs)
    assert same(got, trained(made(name), inputs))
    if "offload" in policies:
        assert 0 < shelf.traffic.back_bytes <= shelf.traffic.out_bytes  # not all that is saved is read


@pytest.mark.parametrize("name", MODELS)
def test_so_are_its_halves(name: str) -> None:
    inputs = [(image,) for image in images(2)]
    got = trained(kept_by(made(name), *EXACT), inputs, halves=True)
    assert same(got, trained(made(name), inputs, halves=True))


@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_an_emitted_stage_runs_with_it(name: str) -> None:
    target = example(name)
    call = first(2, target.call)
    captured = capture(target.model, call)
    shelf = Shelf()

    def gradients(*policies: str) -> list[Tensor | None]:
        target.model.zero_grad()
        module = captured.instantiate(call)
        (stage,) = emit(module, {node.name: 0 for node in module.graph.nodes})
        if policies:
            kept_by(stage.module, *policies, shelf=shelf)
        run = EagerStage(stage.module, gradient_inputs=stage.gradient_inputs, random=stage.random, loss=loss_of)
        values = captured.inputs.flatten(call)
        for one in [run.forward(values, Moment(0, 0, microbatch))[1] for microbatch in range(2)]:
            run.backward(one, (), {})
        return [parameter.grad for parameter in target.model.parameters()]

    plain = gradients()
    assert same(gradients("mask", "relu", "pool", "offload"), plain)
    assert 0 < shelf.traffic.back_bytes <= shelf.traffic.out_bytes
