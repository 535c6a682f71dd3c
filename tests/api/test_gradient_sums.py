"""Gradients are summed in the model's order, also where nodes return or repeat what they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import steps_alike
from torch import Tensor, nn

from pipecompile.cost_models.flops import Flops
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.partition.summation import gradient_sum_order
from pipecompile.profiling.profile import profile

WIDTH = 32
BATCHES = [torch.randn(4, 16, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(2)]

RETURNING: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "identity": nn.Identity,
    "dropout of 0": lambda: nn.Dropout(0.0),
    "flatten of one dimension": lambda: nn.Flatten(2),
    "to": lambda: lambda value: value.to(value.dtype),
    "contiguous": lambda: Tensor.contiguous,
    "functional dropout": lambda: lambda value: nn.functional.dropout(value, 0.0),
    "at least 2 dimensions": lambda: torch.atleast_2d,
    "a collection": lambda: lambda value: torch.atleast_1d(value, value)[1],
}


class Adapter(nn.Module):
    """A frozen layer, and beside it two small ones behind what returns its argument."""

    def __init__(self, returning: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.returning = returning
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (…, WIDTH) to the same shape."""
        return self.layer(value) + self.up(self.down(self.returning(value)))


class Block(nn.Module):
    """Attention: one value is read for queries, keys and values, some of it through adapters."""

    def __init__(self, make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query, self.key = Adapter(make()), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = Adapter(make()), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (rows, tokens, WIDTH) to the same shape."""
        normed = self.norm(value)
        heads = (
            reader(normed).unflatten(-1, (4, WIDTH // 4)).transpose(1, 2)
            for reader in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(*heads)
        return value + self.out(mixed.transpose(1, 2).flatten(2))


class Shared(nn.Module):
    """A layer that several blocks call, with its weight converted to the type that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (…, WIDTH) to the same shape."""
        return (value @ self.weight.to(value.dtype)).tanh() + value @ self.weight


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", RETURNING)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_gradients_are_equal_bit_for_bit(name: str, k: int) -> None:
    torch.manual_seed(0)
    steps_alike(nn.Sequential(*[Block(RETURNING[name]) for _ in range(2)]), BATCHES, k=k)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_so_are_those_of_a_shared_parameter(k: int) -> None:
    torch.manual_seed(0)
    shared = Shared()
    steps_alike(
        nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared, shared, shared), BATCHES, k=k
    )


class Gated(nn.Module):
    """Its gate is `h * h`, which is made early and read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        layers = [(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
        self.body = nn.Sequential(*[part for layer in layers for part in layer])

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (…, WIDTH) to the same shape."""
        hidden = self.first(value)
        gate = hidden * hidden
        return self.last(self.body(hidden) * gate)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_so_are_those_of_what_a_node_reads_twice(k: int) -> None:
    torch.manual_seed(0)
    steps_alike(Gated(), BATCHES, k=k)


class Mixing(nn.Module):
    """A value is read as it lies, and transposed; behind it a bias sums over its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(24))
        self.mix, self.last = nn.Linear(64, 64), nn.Linear(24, 24)
        layers = [(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)) for _ in range(6)]
        self.body = nn.Sequential(*[part for layer in layers for part in layer])

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (rows, 64, 24) to the same shape."""
        hidden = value + self.bias
        mixed = self.mix(hidden.transpose(1, 2))
        return self.last(self.body(hidden) * mixed.transpose(1, 2))


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_so_are_those_of_a_value_whose_readers_lay_gradients_out_otherwise(k: int) -> None:
    torch.manual_seed(0)
    steps_alike(Mixing(), [torch.randn(4, 64, 24)], k=k)


@pytest.mark.parametrize("blocks", [2, 9])
def test_a_chain_of_them_has_one_sum(blocks: int) -> None:
    """Nine equal blocks are observed by a few of them."""
    sample = Arguments((BATCHES[0],), {})
    model = nn.Sequential(*[Block(nn.Identity) for _ in range(blocks)])
    graph = profile(capture(model, sample).instantiate(sample), sample.args, Flops())
    last = [t for t in graph.tensors if t.producer.startswith(f"_{blocks - 1}_")]
    norm = f"_{blocks - 1}_norm"
    returning = [each.producer for each in last if each.sums_with == norm]
    assert returning == [f"_{blocks - 1}_{each}_returning" for each in ("query", "value")]
    pairs = set(gradient_sum_order(graph))
    first, second = returning
    assert (f"_{blocks - 1}_query_layer", first) in pairs
    assert (f"_{blocks - 1}_key", second) in pairs


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Operations, each with two values before it that it may read."""
    count = draw(st.integers(4, 14))
    return [
        (
            draw(st.sampled_from(sorted(OPERATIONS))),
            draw(st.integers(max(0, index - 5), index)),
            draw(st.integers(0, index)),
        )
        for index in range(count)
    ]


OPERATIONS: dict[str, Callable[[nn.Linear, Tensor, Tensor], Tensor]] = {
    "layer": lambda layer, one, _: layer(one),
    "square": lambda _, one, __: one * one,
    "sum": lambda _, one, other: one + other,
    "several": lambda _, one, other: torch.cat([one, one, other], -1)[..., 16 : 16 + WIDTH],
    "to": lambda _, one, __: one.to(one.dtype),
    "type as": lambda _, one, other: one.type_as(other),
    "without gradient": lambda _, one, other: one + other.detach(),
    "parts": lambda _, one, __: torch.cat(one.chunk(2, -1)[::-1], -1),
    "in place": lambda _, one, other: (one * 2).add_(other),
    "mean": lambda _, one, other: one + other.mean(-1, keepdim=True),
    "tied": lambda layer, one, _: one @ layer.shared,  # type: ignore[operator]
}


class Program(nn.Module):
    """Operations one after the other, each on values that were there before."""

    def __init__(self, operations: list[tuple[str, int, int]]) -> None:
        super().__init__()
        self.operations = operations
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in operations])
        shared = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        for layer in self.layers:
            layer.shared = shared
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (…, WIDTH) to the same shape."""
        values = [value]
        for (name, one, other), layer in zip(self.operations, self.layers, strict=True):
            values.append(OPERATIONS[name](layer, values[one], values[other]))
        result = values[-1]
        for each in values[1:-1:2]:
            result = result + each / 2
        return self.last(result)


@settings(max_examples=25, deadline=None)
@given(programs(), st.integers(2, 5))
def test_gradients_of_any_graph_are_summed_in_its_order(
    operations: list[tuple[str, int, int]], k: int
) -> None:
    torch.manual_seed(0)
    steps_alike(Program(operations), BATCHES[:1], k=k)
