"""Layouts and models: which node lies where, and what does not match."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.graph import CostGraph
from pipecompile.layouts.assignment import assignment_of, layers_of
from pipecompile.layouts.layout_text import layout_text, read_layout
from tests.layouts.models import decoder

GRAPH = decoder(4)


def modules(given: object, graph: CostGraph = GRAPH, layers: str | None = None) -> list[set[str]]:
    """The nodes of each stage."""
    layout = read_layout(layout_text(given))
    assignment = assignment_of(layout, graph, layers)
    return [{name for name, at in assignment.items() if at == stage} for stage in range(layout.k)]


def within(stages: list[set[str]], *parts: str) -> bool:
    """Whether each of the `parts`, a beginning of names, lies in the stage of its place."""
    return all(
        any(name.startswith(start) for name in stage)
        for stage, starts in zip(stages, parts, strict=True)
        for start in starts.split()
    )


WAYS = [
    "Et|tt|tL",
    [["embedding", "decoder"], ["decoder", "decoder"], ["decoder", "loss"]],
    "*-|*-*-|*-",
    "1,2,1",
    [["embed", "layers.0"], ["layers.1", "layers.2"], ["layers.3", "norm", "head"]],
    {"layers.1": "BEGINNING", "layers.2": "END"},
    {"embed": 0, "layers.0": 0, "layers": 1, "layers.3": 2, "norm": 2, "head": 2},
]


@pytest.mark.parametrize("given", WAYS, ids=str)
def test_one_cut_in_the_words_of_each_format(given: object) -> None:
    stages = modules(given)
    assert within(stages, "tokens embed drop layers_0", "layers_1 layers_2", "layers_3 norm output")
    assert sum(map(len, stages)) == len(GRAPH.nodes)


def test_halves_of_a_layer_lie_apart() -> None:
    first, second = modules("*-*|-*-*-")
    assert {"layers_1_attention1", "layers_1_add2"} <= first
    assert {"layers_1_norm23", "layers_1_mlp4"} <= second
    assert modules('[["embed", "layers.0"], ["layers", "norm", "head"]]')[1] >= {"loss"}


def test_embedding_head_and_mtp_layers_have_stages_of_their_own() -> None:
    stages = modules("E|tt|tt|m|L", decoder(4, mtp=1))
    assert within(stages, "embed drop", "layers_0 layers_1", "layers_2 layers_3", "mtp_0", "norm")


def test_a_node_can_be_named_and_wins_over_its_module() -> None:
    first, _ = modules([["embed", "layers", "norm", "%layers_3_mlp4"], ["head"]])
    assert "layers_3_add5" in first
    with pytest.raises(InputError, match="against the data flow"):
        modules([["embed", "layers.0"], ["layers", "norm", "%layers_0_mlp4", "head"]])


MISMATCHES = [
    ("Et|tt|ttL", r"the layout has 5 layers, but the model has 4 \(layers.0-3\)"),
    ("Et|tt|tmL", r"the layout has 1 MTP layers \(m\), but the model has 0"),
    ("t|tt|tL", r"has 0 × E, but the model has an embedding"),
    ("Et|Ett|tL", r"has 2 × E, but the model has an embedding"),
    ("1,2,2", "the layout has 5 layers, but the model has 4"),
    ("*-|*-|*-", "the layout has 3 layers, but the model has 4"),
    ("Et||tttL", "no node of the model lies in stage 1: it has nothing"),
    ([["embed", "layer.0"], ["layers", "norm", "head"]], r"unknown module 'layer.0'; did you mean"),
    ([["embed", "layers"], ["layers", "norm", "head"]], "names 'layers' twice, in stages 0 and 1"),
    ([["embed", "layers"], ["norm"]], "no stage for the module 'head', which has parameters"),
    ([["layers"], ["embed", "norm", "head"]], r"layers.0.* in stage 0 reads what .* in stage 1"),
    ({"layers.1": "BEGINNING", "layers.0": "END"}, "cuts twice at the same place"),
    ({"layers.9": "BEGINNING"}, "unknown module 'layers.9'"),
]


@pytest.mark.parametrize(
    ("given", "message"), MISMATCHES, ids=[str(each[0]) for each in MISMATCHES]
)
def test_what_does_not_match_the_model_shows_both_sides(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        modules(given)


def test_nodes_that_must_share_a_stage_are_not_parted() -> None:
    graph = decoder(2)
    nodes = tuple(
        replace(node, group="inputs") if "mlp4" in node.name else node for node in graph.nodes
    )
    with pytest.raises(InputError, match=r"parts nodes that must share a stage \(group inputs\)"):
        modules("Et|tL", replace(graph, nodes=nodes))


def test_layers_are_found_or_given() -> None:
    graph = decoder(3, container="model.blocks")
    assert str(layers_of(graph)) == "model.blocks.0-2"
    assert str(layers_of(graph, "model.blocks")) == "model.blocks.0-2"
    with pytest.raises(InputError, match=r"no module is numbered there; choose from model.blocks"):
        layers_of(graph, "model")
