"""A cost graph that was made of a few equal blocks is the one of all of them, in every field."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from pipecompile.cost_models.roofline import Roofline
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.ir.graph import CostGraph
from pipecompile.profiling import profile as profiling
from pipecompile.profiling.folds import folds_of
from pipecompile.profiling.workload import Workload

WIDTH = 8


class Block(nn.Module):
    """Two products, a mask and a residual; `other` is what all blocks read."""

    def __init__(self, width: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        inner = torch.nn.functional.gelu(self.up(self.norm(x)))
        y = x + self.drop(self.down(inner))
        return y if other is None else y * other


class InPlace(Block):
    """Writes to its input, and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.norm(x).relu_()
        x += self.down(self.up(x))
        return x


class Stack(nn.Module):
    """Blocks in a list, between an embedding and a head."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class AllReadOne(Stack):
    """Every block reads what the first one does, whose gradient is a sum over blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.first(x)
        for layer in self.layers:
            x = layer(x, first)
        return self.head(x)


class AllAreRead(Stack):
    """The head reads the sum of all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        outputs = [self.first(x)]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        return self.head(torch.stack(outputs).sum(0))


class EncoderDecoder(nn.Module):
    """Blocks that read the output of other blocks, as a decoder that of an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Block() for _ in range(6))
        self.decoder = nn.ModuleList(Block() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return x


def tied() -> Stack:
    blocks = [Block() for _ in range(6)]
    for block in blocks[1:]:
        block.up.weight = blocks[0].up.weight
    return Stack(*blocks)


def frozen() -> Stack:
    stack = Stack(*(Block() for _ in range(7)))
    stack.layers[3].up.weight.requires_grad_(False)
    return stack


def with_own_setting() -> Stack:
    stack = Stack(*(Block() for _ in range(7)))
    stack.layers[3].norm.eps = 1e-3
    return stack


MODELS = {
    # The numbers of equal blocks that are observed once for all.
    "plain": (Stack(*(Block() for _ in range(7))), [7]),
    "one module, called again": (Stack(*[Block()] * 6), []),
    "tied": (tied(), [6]),
    "in place": (Stack(*(InPlace() for _ in range(6))), [6]),
    "all read one": (AllReadOne(*(Block() for _ in range(6))), [6]),
    "all are read": (AllAreRead(*(Block() for _ in range(6))), []),
    # The decoder's first block reads the input, which is not where an earlier block would end.
    "encoder and decoder": (EncoderDecoder(), [6, 5]),
    "two widths": (Stack(*(Block() for _ in range(5)), *(Block(8) for _ in range(6))), [6, 5]),
    "one is frozen": (frozen(), []),
    "one has its own setting": (with_own_setting(), []),
    "four": (Stack(*(Block() for _ in range(4))), []),
}


def captured(model: nn.Module) -> tuple[fx.GraphModule, list[Tensor]]:
    inputs = [torch.zeros(4, WIDTH)]
    call = arguments_of(model, inputs[0])
    return capture(model, call).instantiate(call), inputs


def costs(module: fx.GraphModule, inputs: list[Tensor]) -> CostGraph:
    return profiling.profile(module, inputs, Roofline.of("h100"))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", MODELS)
def test_the_costs_are_those_of_all_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, counts = MODELS[name]
    module, inputs = captured(model)
    workload = Workload(module, module.graph, tuple(inputs), None, ())
    assert [fold.blocks.count for fold in folds_of(workload)] == counts
    folded = costs(module, inputs)
    monkeypatch.setattr(profiling, "folds_of", lambda workload: [])
    assert costs(module, inputs) == folded


def test_blocks_that_look_alike_and_are_not_are_all_observed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, inputs = captured(MODELS["plain"][0])
    expected, observe = costs(module, inputs), profiling.observe
    runs: list[int] = []

    def other_peak(workload: Workload, workspace: object) -> object:
        """Return an observation in which the last block but one takes a byte more."""
        seen = observe(workload, workspace)  # type: ignore[arg-type]
        runs.append(len(seen.nodes))
        if len(runs) == 1:
            name = next(n for n in seen.nodes if n.startswith("layers_5"))
            object.__setattr__(seen.nodes[name], "backward_peak", 10**9)
        return seen

    monkeypatch.setattr(profiling, "observe", other_peak)
    assert costs(module, inputs) == expected
    assert runs[0] < runs[1] == len(expected.nodes)
