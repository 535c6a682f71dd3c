"""AmoebaNet-D (Real et al., arXiv 1802.01548), the convnet of the GPipe paper: L normal cells, D filters.

A cell combines the states of the two cells before it by five sums of two operations each; reduction cells halve the
image. Normal cells come in three groups with a reduction before the second and the third, after a stem of a
convolution and two reductions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Operation = Callable[[int, int], nn.Module]


def convolution(
    inputs: int, outputs: int, kernel: int | tuple[int, int], stride: int = 1
) -> nn.Sequential:
    """ReLU, convolution, batch normalisation."""
    sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = (sizes[0] // 2, sizes[1] // 2)
    layer = nn.Conv2d(inputs, outputs, sizes, stride, padding, bias=False)
    return nn.Sequential(nn.ReLU(), layer, nn.BatchNorm2d(outputs))


def identity(width: int, stride: int) -> nn.Module:
    return nn.Identity() if stride == 1 else Reduce(width, width)


def narrow(width: int, stride: int) -> nn.Module:
    """1×7 and 7×1 at a quarter of the width."""
    quarter = width // 4
    return nn.Sequential(
        convolution(width, quarter, 1),
        convolution(quarter, quarter, (1, 7), stride),
        convolution(quarter, quarter, (7, 1)),
        convolution(quarter, width, 1),
    )


def square(width: int, stride: int) -> nn.Module:
    """3×3 at a quarter of the width."""
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


# (state, operation) two by two; states 0 and 1 are those of the cells before. What no sum reads is the output.
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
NORMAL_OUTPUT, REDUCTION_OUTPUT = (0, 3, 4, 6), (4, 5, 6)


class Reduce(nn.Module):
    """Halves the image by two strided 1×1 convolutions, one of them a pixel further."""

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
    """From the states of the two cells before to (the state before, the own)."""

    def __init__(
        self, before: int, last: int, width: int, *, reduces: bool, was_reduced: bool
    ) -> None:
        super().__init__()
        genes, self.output = (REDUCTION, REDUCTION_OUTPUT) if reduces else (NORMAL, NORMAL_OUTPUT)
        self.fit_last = convolution(last, width, 1)
        self.fit_before = Reduce(before, width) if was_reduced else convolution(before, width, 1)
        self.places = [place for place, _ in genes]
        self.operations = nn.ModuleList(
            make(width, 2 if reduces and place < 2 else 1) for place, make in genes
        )
        self.width = len(self.output) * width

    def forward(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        before, last = states
        found = [self.fit_last(last), self.fit_before(before)]
        values = [
            (place, operation)
            for place, operation in zip(self.places, self.operations, strict=True)
        ]
        for (left, first), (right, second) in zip(values[::2], values[1::2], strict=True):
            found.append(first(found[left]) + second(found[right]))
        return last, torch.cat([found[place] for place in self.output], 1)


class AmoebaNet(nn.Module):
    """AmoebaNet-D (L, D): `cells` normal cells, `filters` filters, 1000 classes, images of 224 × 224."""

    def __init__(self, cells: int, filters: int, classes: int = 1000) -> None:
        super().__init__()
        width = filters // 4
        self.stem = nn.Conv2d(3, width, 3, 2, 1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        made: list[Cell] = []
        before = last = width
        was_reduced = False
        for reduces in (
            True,
            True,
            *([False] * (cells // 3) + [True]) * 2,
            *[False] * (cells // 3),
        ):
            width = width * 2 if reduces else width
            made.append(Cell(before, last, width, reduces=reduces, was_reduced=was_reduced))
            before, last, was_reduced = last, made[-1].width, reduces
        self.cells = nn.ModuleList(made)
        self.head = nn.Linear(last, classes)

    def forward(self, image: Tensor) -> Tensor:
        state = self.stem_norm(self.stem(image))
        states = (state, state)
        for cell in self.cells:
            states = cell(states)
        logits: Tensor = self.head(states[1].mean((2, 3)))
        return logits
