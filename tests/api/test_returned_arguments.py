"""A node that returns its argument as it is: gradients are still summed in the model's order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
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
