"""AmoebaNet-D (Real et al., arXiv 1802.01548), the convolutional network of the GPipe paper.

A cell combines the states of the two cells before it by five sums of two operations each; a
reduction cell also halves the image. With L normal cells the network is

    stem   reduction reduction   L/3 normal   reduction   L/3 normal   reduction   L/3 normal   head

`benchmarks.gpipe_models` and `benchmarks.gpipe_memory` plan it; it is never trained here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Operation = Callable[[int, int], nn.Module]


def convolution(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1
) -> nn.Sequential:
    """Return a ReLU, a convolution and a batch normalisation."""
    sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (sizes[0] // 2, sizes[1] // 2)
    layer = nn.Conv2d(inputs, outputs, sizes, stride, padding, bias=False)
    return nn.Sequential(nn.ReLU(), layer, nn.BatchNorm2d(outputs))


def identity(width: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Reduce(width, width)


def narrow(width: int, stride: int) -> nn.Module:
    """Return 1×7 and 7×1 convolutions at a quarter of the width."""
    quarter = width // 4
    return nn.Sequential(
        convolution(width, quarter, 1),
        convolution(quarter, quarter, (1, 7), stride),
        convolution(quarter, quarter, (7, 1)),
        convolution(quarter, width, 1),
    )


def square(width: int, stride: int) -> nn.Module:
    """Return a 3×3 convolution at a quarter of the width."""
    quarter = width // 4
    return nn.Sequential(
        convolution(width, quarter, 1),
        convolution(quarter, quarter, 3, stride),
        convolution(quarter, width, 1),
    )


def point(width: int, stride: int) -> nn.Module:
    return convolution(width, width, 1, stride)


def average(width: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, 1, count_include_pad=False)


def largest(width: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, 1)


def largest_of_four(width: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


# The genes of a cell are (state, operation), and each pair of them is one sum. States 0 and 1 are
# the results of the last cell and of the one before it; sum i adds state 2 + i. So the normal cell
# begins with state 2 = convolution of state 1 + max pooling of state 1.
NORMAL: tuple[tuple[int, Operation], ...] = (
    (1, point),
    (1, largest),
    (1, identity),
    (0, narrow),
    (0, point),
    (0, narrow),
    (2, largest),
    (2, identity),
    (1, average),
    (5, point),
)
REDUCTION: tuple[tuple[int, Operation], ...] = (
    (0, largest_of_four),
    (0, largest),
    (2, identity),
    (1, square),
    (2, narrow),
    (2, largest),
    (3, identity),
    (1, largest_of_four),
    (2, average),
    (3, point),
)
# The output of a cell joins the states that none of its sums reads.
NORMAL_OUTPUT, REDUCTION_OUTPUT = (0, 3, 4, 6), (4, 5, 6)


class Reduce(nn.Module):
    """Two strided 1×1 convolutions that halve the image, the second one shifted by a pixel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.even = nn.Conv2d(inputs, outputs // 2, 1, 2, bias=False)
        self.odd = nn.Conv2d(inputs, outputs - outputs // 2, 1, 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, state: Tensor) -> Tensor:
        state = torch.relu(state)
        shifted = nn.functional.pad(state, (0, 1, 0, 1))[:, :, 1:, 1:]
        reduced: Tensor = self.norm(torch.cat([self.even(state), self.odd(shifted)], 1))
        return reduced


class Cell(nn.Module):
    """Maps the states of the two cells before it to (the last state, its own state)."""

    def __init__(
        self, before: int, last: int, width: int, *, reduces: bool, was_reduced: bool
    ) -> None:
        super().__init__()
        genes, self.output = (REDUCTION, REDUCTION_OUTPUT) if reduces else (NORMAL, NORMAL_OUTPUT)
        self.fit_last = convolution(last, width, 1)
        self.fit_before = Reduce(before, width) if was_reduced else convolution(before, width, 1)
        self.sources = [source for source, _ in genes]
        # Only operations on the states of earlier cells halve the image; the others read its half.
        self.operations = nn.ModuleList(
            operation(width, 2 if reduces and source < 2 else 1) for source, operation in genes
        )
        self.width = len(self.output) * width

    def forward(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        before, last = states
        inner = [self.fit_last(last), self.fit_before(before)]
        genes = list(zip(self.sources, self.operations, strict=True))
        for (left, first), (right, second) in zip(genes[::2], genes[1::2], strict=True):
            inner.append(first(inner[left]) + second(inner[right]))
        return last, torch.cat([inner[index] for index in self.output], 1)


class AmoebaNet(nn.Module):
    """AmoebaNet-D (L, D) for images of 224 × 224: L = `normal_cells`, D = `filters`."""

    def __init__(self, normal_cells: int, filters: int, classes: int = 1000) -> None:
        super().__init__()
        width = filters // 4
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        cells: list[Cell] = []
        before = last = width
        was_reduced = False
        normal = [False] * (normal_cells // 3)
        for reduces in (True, True, *normal, True, *normal, True, *normal):
            width = width * 2 if reduces else width
            cells.append(Cell(before, last, width, reduces=reduces, was_reduced=was_reduced))
            before, last, was_reduced = last, cells[-1].width, reduces
        self.cells = nn.ModuleList(cells)
        self.head = nn.Linear(last, classes)

    def forward(self, image: Tensor) -> Tensor:
        state = self.stem_norm(self.stem(image))
        states = (state, state)
        for cell in self.cells:
            states = cell(states)
        logits: Tensor = self.head(states[1].mean((2, 3)))
        return logits
