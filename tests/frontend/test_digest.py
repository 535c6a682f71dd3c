from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from zoo import MODELS, ROOT, captured, example, first

from pipecompile.frontend.capture import capture
from pipecompile.frontend.digest import digest, node_digests

CODE = """
import sys
from zoo import captured, example, first
from pipecompile.frontend.capture import capture
from pipecompile.frontend.digest import digest
for name in sys.argv[1:]:
    target = example(name)
    call = first(4, target.call)
    print(digest(capture(target.model, call).instantiate(call)))
"""
NAMES = ("unet", "bert")


def of(*layers: nn.Module, batch: int = 4) -> str:
    return digest(captured(nn.Sequential(*layers), torch.randn(batch, 6))[1])


def of_example(name: str) -> str:
    target = example(name)
    call = first(4, target.call)
    return digest(capture(target.model, call).instantiate(call))


@pytest.mark.sweep
def test_it_is_the_same_in_another_process() -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", CODE, *NAMES]
    other = subprocess.run(
        command, env=environment, cwd=MODELS.parent, check=True, capture_output=True, text=True
    )
    assert other.stdout.split() == [of_example(name) for name in NAMES]


def test_weights_do_not_matter() -> None:
    assert of(nn.Linear(6, 6), nn.ReLU()) == of(nn.Linear(6, 6), nn.ReLU())


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Halve(Double):
    pass


BASE = (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 6))


@pytest.mark.parametrize(
    "layers",
    [
        (nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1), nn.Linear(6, 6)),
        (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 6)),
        (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 6, bias=False)),
        (nn.Linear(6, 7), nn.ReLU(), nn.Dropout(0.1), nn.Linear(7, 6)),
        (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1).eval(), nn.Linear(6, 6)),
        (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 6), nn.Identity()),
        (nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 6).requires_grad_(False)),
    ],
    ids=["activation", "rate", "bias", "width", "mode", "layer", "frozen"],
)
def test_a_layer_that_changes_changes_it(layers: tuple[nn.Module, ...]) -> None:
    assert of(*layers) != of(*BASE)


class SelfAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, heads)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


def test_settings_that_no_repr_shows_change_it() -> None:
    def attended(heads: int) -> str:
        return digest(captured(SelfAttention(heads), torch.randn(3, 2, 64))[1])

    assert attended(1) == attended(1) != attended(32)


def test_settings_of_parts_of_a_layer_change_it() -> None:
    def encoded(**settings: Any) -> str:
        layer = nn.Sequential(nn.TransformerEncoderLayer(6, 2, 8, **settings))
        return digest(captured(layer, torch.randn(3, 2, 6))[1])

    assert (
        len({encoded(), encoded(dropout=0.2), encoded(norm_first=True), encoded(activation="gelu")})
        == 4
    )


@pytest.mark.parametrize("which", ["input", "parameters"])
def test_layouts_change_it(which: str) -> None:
    def convolved(layout: torch.memory_format) -> str:
        model, sample = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
        model = model.to(memory_format=layout) if which == "parameters" else model
        sample = sample.to(memory_format=layout) if which == "input" else sample
        return digest(captured(nn.Sequential(model), sample)[1])

    assert convolved(torch.contiguous_format) != convolved(torch.channels_last)


def test_the_stride_of_a_dimension_of_one_does_not_matter() -> None:
    model = nn.Sequential(nn.Linear(6, 6))
    one, other = torch.randn(1, 6), torch.randn(6).as_strided((1, 6), (100, 1))
    assert digest(captured(model, one)[1]) == digest(captured(model, other)[1])


def test_another_batch_size_changes_it() -> None:
    assert of(*BASE) != of(*BASE, batch=5)


def test_custom_functions_differ() -> None:
    class Model(nn.Module):
        def __init__(self, function: type[torch.autograd.Function]) -> None:
            super().__init__()
            self.linear, self.function = nn.Linear(6, 6), function

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.function.apply(self.linear(x))

    assert of(Model(Double)) == of(Model(Double)) != of(Model(Halve))


def test_functions_and_their_arguments_count() -> None:
    class Power(nn.Module):
        def __init__(self, exponent: float) -> None:
            super().__init__()
            self.linear, self.exponent = nn.Linear(6, 6), exponent

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) ** self.exponent

    assert of(Power(2.0)) == of(Power(2.0)) != of(Power(3.0))


def by_name(*layers: nn.Module) -> dict[str, str]:
    return node_digests(captured(nn.Sequential(*layers), torch.randn(4, 6))[1])


def test_a_change_of_a_node_is_in_its_own_digest_only() -> None:
    base = by_name(*BASE)
    dropped = by_name(BASE[0], BASE[1], nn.Dropout(0.2), BASE[3])
    assert [name for name in base if base[name] != dropped[name]] == ["_2"]
    wider = by_name(nn.Linear(6, 7), BASE[1], BASE[2], nn.Linear(7, 6))
    # The Linears have other parameters, and what lies between other shapes.
    assert [name for name in base if base[name] != wider[name]] == ["_0", "_1", "_2", "_3"]


def test_a_node_that_is_inserted_changes_no_other_digest() -> None:
    class Sums(nn.Module):
        def __init__(self, extra: bool) -> None:
            super().__init__()
            self.first, self.last, self.extra = nn.Tanh(), nn.Tanh(), extra

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x + 1)
            x = x + 2 if self.extra else x
            return self.last(x)

    short, long = (by_name(Sums(extra), nn.Linear(6, 6)) for extra in (False, True))
    came = set(long) - set(short)
    assert len(came) == 1
    assert {name: digest for name, digest in long.items() if name not in came} == short


def test_what_is_read_within_a_module_is_in_the_digest() -> None:
    class Twice(nn.Module):
        def __init__(self, swapped: bool) -> None:
            super().__init__()
            self.swapped = swapped

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b = x.sin(), x.cos()
            return b - a if self.swapped else a - b

    straight, swapped = (by_name(Twice(each)) for each in (False, True))
    assert [name for name in straight if straight[name] != swapped[name]] == ["sub"]
