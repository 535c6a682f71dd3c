"""Leaves of pytrees with where they are, also in kinds of nodes that torch has no keys of."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pipecompile.api.compilation import pipecompile
from pipecompile.graph.pytrees import leaves_with_paths

Pair = namedtuple("Pair", ["first", "second"])


class Keyless(OrderedDict[str, Any]):
    """Registered as diffusers registers its outputs, without keys."""


pytree.register_pytree_node(
    Keyless,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Keyless(zip(keys, values, strict=True)),
)

TREES = st.recursive(
    st.none() | st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab", max_size=2), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@given(TREES)
def test_they_are_those_of_torch(tree: Any) -> None:
    paths, _ = pytree.tree_flatten_with_path(tree)
    assert list(leaves_with_paths(tree)) == paths


@given(TREES)
def test_items_without_keys_are_numbered(tree: Any) -> None:
    found = list(leaves_with_paths({"x": [Keyless(first=1, second=tree)]}))
    (first, one), *others = found
    assert (pytree.keystr(first), one) == ("['x'][0][0]", 1)
    assert [leaf for _, leaf in others] == pytree.tree_leaves(tree)
    assert all(pytree.keystr(path).startswith("['x'][0][1]") for path, _ in others)


class ReturnsKeyless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Keyless) -> Keyless:
        """A value of shape (N, 4) to the same shape."""
        return Keyless(sample=self.layer(inputs["x"]), scale=2.0)


def test_a_model_may_take_and_return_them_and_be_given_them_as_target() -> None:
    batch, target = Keyless(x=torch.randn(4, 4)), Keyless(y=torch.randn(4, 4), weight=2.0)

    def loss_fn(output: Keyless, wanted: Keyless) -> torch.Tensor:
        return wanted["weight"] * nn.functional.mse_loss(output["sample"], wanted["y"])

    model = ReturnsKeyless()
    pipeline = pipecompile(
        model, (batch,), k=1, microbatches=2, costs="flops", loss_fn=loss_fn, sample_target=target
    )
    loss = pipeline.step((batch,), target)
    rows = zip(batch["x"].chunk(2), target["y"].chunk(2), strict=True)
    losses = [loss_fn(model(Keyless(x=x)), Keyless(y=y, weight=2.0)) for x, y in rows]
    assert torch.equal(loss, torch.stack(losses).mean())
