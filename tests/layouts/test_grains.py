"""Graphs in which cuts keep layers or their halves whole, and tensors that layers share."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pipecompile.ir.audit import Grain
from pipecompile.ir.graph import Tensor
from pipecompile.layouts.assignment import assignment_of
from pipecompile.layouts.grains import kept_whole, sections_by_node
from pipecompile.layouts.layout_text import layout_text, read_layout
from pipecompile.layouts.shared_state import shared_tensors
from pipecompile.partition.units import units
from tests.layouts.models import decoder

GRAPH = decoder(4, mtp=1)


@pytest.mark.parametrize("grain", ["layers", "halves"])
def test_the_nodes_of_a_section_are_one_unit(grain: Grain) -> None:
    sections = sections_by_node(GRAPH, grain)
    section_of = dict(zip([node.name for node in GRAPH.nodes], sections, strict=True))
    found = [
        {section_of[name] for name in unit} - {None} for unit in units(kept_whole(GRAPH, sections))
    ]
    # Each section in one unit, and no unit of two.
    assert sorted(map(len, found))[-1] == 1
    whole = [section for unit in found for section in unit]
    assert len(whole) == len(set(whole)) == len({*sections} - {None})


def test_groups_that_are_there_stay_together() -> None:
    tied = tuple(
        replace(node, group="tied") if node.name in ("layers_0_mlp4", "layers_1_norm10") else node
        for node in GRAPH.nodes
    )
    graph = replace(GRAPH, nodes=tied)
    whole = kept_whole(graph, sections_by_node(graph, "layers"))
    both = next(unit for unit in units(whole) if "layers_0_norm10" in unit)
    assert {"layers_0_mlp4", "layers_1_norm10", "layers_1_add5"} <= set(both)
    assert whole.by_name["tokens"].group == "inputs"


def test_tensors_that_layers_share_are_found_where_a_cut_sends_them() -> None:
    # An index that layer 0 makes and that layers 1 and 2 read, beside the mask for all.
    index = Tensor(
        producer="layers_0_norm10",
        consumers=("layers_0_attention1", "layers_1_attention1", "layers_2_attention1"),
        bytes=100,
        gradient_bytes=50,
    )
    others = [tensor for tensor in GRAPH.tensors if tensor.producer != index.producer]
    graph = replace(GRAPH, tensors=(*others, index))
    sections = sections_by_node(graph, "layers")

    def shared(layout: str) -> list[tuple[str, int, int, tuple[int, ...], bool]]:
        assignment = assignment_of(read_layout(layout_text(layout)), graph)
        found = shared_tensors(graph, sections, assignment)
        return [(t.name, t.first, t.last, t.before, t.spans_all) for t in found]

    # The tokens are read by the loss too.
    everywhere = [("tokens", -1, 4, (1,), True), ("mask", -1, 4, (1,), True)]
    assert shared("Et|tttmL") == [("layers_0_norm10", 0, 2, (1,), False), *everywhere]
    assert shared("Ettt|tmL") == everywhere
    assert shared("Et|t|t|tmL")[0][3] == (1, 2)
