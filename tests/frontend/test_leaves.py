"""Modules of torch.nn, their subclasses and what `leaf` names are one node each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo import called
from zoo.exact import exact

from pipecompile.errors import InputError
from pipecompile.frontend.leaves import is_torch_leaf, leaf_paths

WIDTH = 8
X = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """Two layers, recorded inside unless `leaf` names the module."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)).exp()


class Scaled(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class Stack(nn.Sequential):
    """A subclass of a container."""


def model() -> nn.Module:
    return nn.Sequential(Block(), Scaled(WIDTH, WIDTH), Stack(Block(), nn.ReLU()))


WHOLE = ["0.linear", "0.norm", "exp", "1", "2.0.linear", "2.0.norm", "exp", "2.1"]


def test_subclasses_of_torchs_modules_are_one_node_and_containers_are_recorded_inside() -> None:
    assert called(exact(model(), X).graph) == WHOLE


@pytest.mark.parametrize(
    ("leaf", "nodes"),
    [
        (["0"], ["0", *WHOLE[3:]]),
        (["Block"], ["0", "1", "2.0", "2.1"]),
        ([f"{__name__}.Block"], ["0", "1", "2.0", "2.1"]),
        (["2"], [*WHOLE[:4], "2"]),
        (["Stack", "0"], ["0", "1", "2"]),
    ],
    ids=["path", "class", "full name of a class", "container", "both"],
)
def test_named_modules_are_one_node(leaf: list[str], nodes: list[str]) -> None:
    assert called(exact(model(), X, leaf=leaf).graph) == nodes


def test_paths_of_named_modules() -> None:
    assert leaf_paths(model(), []) == frozenset()
    assert leaf_paths(model(), ["Block", "2.1"]) == {"0", "2.0", "2.1"}


@pytest.mark.parametrize("name", ["3", "Blok", ""])
def test_a_name_that_is_not_there_is_an_error(name: str) -> None:
    with pytest.raises(InputError, match=f"leaf='{name}' is no module of Sequential; give a path"):
        leaf_paths(model(), [name])


def test_torch_leaves() -> None:
    assert all(map(is_torch_leaf, (nn.Linear(1, 1), Scaled(1, 1), nn.LSTM(1, 1))))
    assert not any(
        map(is_torch_leaf, (Block(), Stack(), nn.Sequential(), nn.TransformerEncoderLayer(8, 2)))
    )
