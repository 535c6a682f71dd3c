"""A tiled cost graph is the one that a capture of the deep model gives, up to names."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from benchmarks.gpipe_models import FusedLayer, Transformer, TransformerLayer, token_loss
from benchmarks.tiled_graphs import tile
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph


class Shared(nn.Module):
    """Layers that all read what the first of them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        first = state = self.embedding(tokens)
        for layer in self.layers:
            state = layer(state) * first
        return state


@cache
def captured(
    layers: int,
    layer: type[TransformerLayer] = TransformerLayer,
    dtype: torch.dtype = torch.float32,
) -> CostGraph:
    with torch.device("meta"):
        return costs(Transformer(layers, 64, layer).to(dtype), torch.zeros(4, 16, dtype=torch.long))


def costs(model: nn.Module, tokens: Tensor) -> CostGraph:
    target = Target(model, arguments_of(model, tokens), token_loss, tokens)
    options = options_for(target, k=1, microbatches=2, costs="roofline:h100")
    return cost_graph(target, options.costs, 2, capture_target(target, options, verify=False))


def anonymous(graph: CostGraph) -> CostGraph:
    """Return `graph` without what a capture chooses freely.

    Nodes are named by their position, storages are numbered as they appear, and the digest of the
    capture is left out.
    """
    names = {node.name: f"n{index}" for index, node in enumerate(graph.nodes)}
    known: dict[int, int] = {}

    def number(storage: int) -> int:
        return known.setdefault(storage, len(known))

    def renamed(old: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names[name] for name in old)

    tensors = tuple(
        replace(
            t,
            producer=names[t.producer],
            consumers=renamed(t.consumers),
            storage=None if t.storage is None else number(t.storage),
        )
        for t in graph.tensors
    )
    nodes = tuple(
        replace(
            n,
            name=names[n.name],
            group=names.get(n.group or "", n.group),
            saved=tuple(map(number, n.saved)),
        )
        for n in graph.nodes
    )
    gradients = tuple(
        replace(
            g,
            producer=names[g.producer],
            last=names[g.last],
            readers=renamed(g.readers),
            captured_at=renamed(g.captured_at),
            edges=tuple(renamed(pair) for pair in g.edges),
        )
        for g in graph.gradients
    )
    return replace(
        graph,
        fingerprint="",
        nodes=nodes,
        tensors=tensors,
        gradients=gradients,
        storages=tuple(graph.storages[storage] for storage in known),
        recomputed_together=tuple(map(renamed, graph.recomputed_together)),
    )


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("layer", "dtype"), [(TransformerLayer, torch.float32), (FusedLayer, torch.bfloat16)]
)
@pytest.mark.parametrize(("shallow", "deep"), [(3, 5), (5, 3)])
def test_a_tiled_graph_is_the_captured_one(
    shallow: int, deep: int, layer: type[TransformerLayer], dtype: torch.dtype
) -> None:
    graph = tile(captured(shallow, layer, dtype), deep)
    assert anonymous(graph) == anonymous(captured(deep, layer, dtype))


def test_nodes_are_named_after_their_layer() -> None:
    names = [
        node.name for node in tile(captured(3), 12).nodes if node.module == "layers.10.project"
    ]
    assert names == ["layer_10_project"]


@pytest.mark.parametrize(("shallow", "deep"), [(2, 5), (3, 2)])
def test_too_few_layers_are_refused(shallow: int, deep: int) -> None:
    with pytest.raises(ValueError, match=f"{shallow} layers cannot be tiled to {deep}"):
        tile(captured(shallow), deep)


def test_a_tensor_that_many_layers_read_cannot_be_tiled() -> None:
    with torch.device("meta"):
        graph = costs(Shared(), torch.zeros(4, 8, dtype=torch.long))
    with pytest.raises(ValueError, match="this cannot be tiled"):
        tile(graph, 6)
