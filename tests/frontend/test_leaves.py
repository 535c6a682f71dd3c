"""Modules of torch.nn, their subclasses and what `leaf` names are one node each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from zoo import called, captured
from zoo.exact import exact

from pipecompile.errors import CaptureError, InputError
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


class Frozen(nn.Module):
    """An encoder in eval mode whose gradients nobody needs, below a head."""

    def __init__(self, nested: bool, no_grad: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
        self.encoder.requires_grad_(no_grad)
        self.no_grad, self.head = no_grad, nn.Linear(8, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """A tensor of shape (N, 5, 8) and a mask of shape (N, 5) to a tensor of shape (N, 5, 4)."""
        with torch.set_grad_enabled(not self.no_grad):
            hidden = self.encoder(x, src_key_padding_mask=mask)
        return self.head(hidden)


PADDED = torch.arange(5)[None] >= torch.tensor([5, 3, 4, 2])[:, None]


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_an_encoder_that_torch_fuses_is_exact(no_grad: bool, padded: bool) -> None:
    x = torch.randn(4, 5, 8)
    exact(Frozen(not padded, no_grad), *((x, PADDED) if padded else (x,)), batches=(4, 2))


@pytest.mark.parametrize("no_grad", [False, True])
def test_nested_tensors_of_padding_are_refused(no_grad: bool) -> None:
    with pytest.raises(CaptureError, match="make it with enable_nested_tensor=False"):
        captured(Frozen(True, no_grad), torch.randn(4, 5, 8), PADDED)
    assert torch.is_grad_enabled()
