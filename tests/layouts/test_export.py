"""Cuts that are exported and read back; cuts that a format cannot say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.plan import LAYOUT_FORMATS, LayoutFormat, Plan
from pipecompile.layouts.assignment import assignment_of, named_nodes
from pipecompile.layouts.export import export_layout
from pipecompile.layouts.layout_text import read_layout
from pipecompile.layouts.megatron import megatron_text
from tests.layouts.models import decoder
from tests.layouts.plans import cuts, planned

GRAPH = decoder(4)


def exported(plan: Plan, form: LayoutFormat) -> str | None:
    """The cut in the words of `form`; None if that cannot say it."""
    try:
        return export_layout(plan, form).text
    except InputError:
        return None


@pytest.mark.parametrize("form", LAYOUT_FORMATS)
@given(data=st.data())
def test_any_cut_that_a_format_can_say_is_read_back(
    form: LayoutFormat, data: st.DataObject
) -> None:
    assignment = data.draw(cuts(GRAPH))
    plan = planned(GRAPH, assignment)
    text = exported(plan, form)
    if text is None:
        return
    layout = read_layout(text, form)
    assert layout.k == plan.k
    named = named_nodes(layout, GRAPH)
    if form == "json":
        assert named == assignment
    if form != "split-spec":  # whose points part all nodes, also those between modules
        assert named == {name: assignment[name] for name in named}
    parametrised = [node.name for node in GRAPH.nodes if node.parameters]
    again = assignment_of(layout, GRAPH)
    assert [again[name] for name in parametrised] == [assignment[name] for name in parametrised]


@given(data=st.data())
def test_a_string_of_symbols_is_read_planned_and_exported_as_it_was(data: st.DataObject) -> None:
    layers, mtp = data.draw(st.integers(1, 6)), data.draw(st.integers(0, 2))
    graph = decoder(layers, mtp=mtp)
    symbols = ["E", *"t" * layers, *"m" * mtp, "L"]
    begins = sorted(data.draw(st.sets(st.integers(1, len(symbols) - 1), max_size=5)))
    stages = [symbols[a:b] for a, b in zip([0, *begins], [*begins, None], strict=True)]
    text = megatron_text(stages)
    assignment = assignment_of(read_layout(text), graph)
    plan = planned(graph, assignment)
    assert plan.assignment == assignment
    assert export_layout(plan, "megatron").text == text
    for form in LAYOUT_FORMATS:
        again = exported(plan, form)
        if again is not None:  # vLLM has no word for an embedding on a rank of its own
            read_back = assignment_of(read_layout(again, form), graph)
            # Split points part the forward in two: the mask is made before the first layer.
            moved = {name for name in assignment if read_back[name] != assignment[name]}
            assert moved <= ({"mask"} if form == "split-spec" else set()), form


@pytest.mark.parametrize("form", [form for form in LAYOUT_FORMATS if form != "json"])
@given(data=st.data())
def test_rounded_cuts_are_read_back_and_their_cost_is_that_of_the_stages(
    form: LayoutFormat, data: st.DataObject
) -> None:
    assignment = data.draw(cuts(GRAPH))
    plan = planned(GRAPH, assignment)
    try:
        rounded = export_layout(plan, form, rounded=True)
    except InputError:
        return  # a stage lies within one layer
    again = assignment_of(read_layout(rounded.text, form), GRAPH)
    assert max(again.values()) == plan.k - 1
    if rounded.moved:
        loads = [0] * plan.k
        for node in GRAPH.nodes:
            loads[assignment[node.name]] += node.forward_ns + node.backward_ns
        assert rounded.heaviest_ns == max(loads)


INSIDE = assignment_of(read_layout("*-*|-*-*-"), GRAPH)  # the cut lies in layer 1


def test_a_cut_inside_a_layer_is_refused_with_who_can_say_it() -> None:
    with pytest.raises(InputError) as refusal:
        export_layout(planned(GRAPH, INSIDE), "megatron")
    assert str(refusal.value) == (
        "a layout for megatron cannot say this cut: layer 1 lies in stages 0 and 1; export to "
        "megatron-hybrid or split-spec or device-map or json, or round it (--round)"
    )


def test_rounding_moves_the_divided_layer_where_the_heaviest_stage_is_lightest() -> None:
    exported = export_layout(planned(GRAPH, INSIDE), "megatron", rounded=True)
    assert exported.text == "Ett|ttL"
    assert exported.moved == ("layer 1 to stage 0",)
    # Stage 1 had all of the head, and half a layer more than it has now.
    assert (exported.heaviest_ns, exported.rounded_heaviest_ns) == (662, 558)


def test_stages_within_one_layer_cannot_be_rounded_away() -> None:
    order = [node.name for node in GRAPH.nodes]
    begins = [order.index(f"layers_1_{part}") for part in ("attention1", "norm23", "mlp4")]
    assignment = {name: sum(at <= place for at in begins) for place, name in enumerate(order)}
    with pytest.raises(InputError, match="a stage would be empty if the cut was rounded"):
        export_layout(planned(GRAPH, assignment), "megatron", rounded=True)


TEXTS = {
    "megatron": "Ett|ttL",
    "megatron-hybrid": "*-*-|*-*-",
    "vllm": "VLLM_PP_LAYER_PARTITION=2,2",
    "sglang": "SGLANG_PP_LAYER_PARTITION=2,2",
    "torchtitan": 'module_fqns_per_model_part=[["embed", "layers.0", "layers.1"],\n '
    '["layers.2", "layers.3", "norm", "head"]]',
    "split-spec": '{"layers.2": SplitPoint.BEGINNING}',
    "device-map": '{"embed": 0,\n "layers.0": 0,\n "layers.1": 0,\n "layers.2": 1,\n '
    '"layers.3": 1,\n "norm": 1,\n "head": 1}',
    "json": '[["embed", "layers.0", "layers.1", "%tokens", "%mask", "%drop"],\n '
    '["layers.2", "layers.3", "norm", "head", "%loss", "%output"]]',
}


@pytest.mark.parametrize("form", LAYOUT_FORMATS)
def test_one_cut_in_the_words_of_each_format(form: LayoutFormat) -> None:
    plan = planned(GRAPH, assignment_of(read_layout("Ett|ttL"), GRAPH))
    assert export_layout(plan, form).text == TEXTS[form]


def test_a_plan_without_modules_is_to_be_made_anew() -> None:
    plan = planned(GRAPH, INSIDE)
    old = replace(plan, stages=tuple(replace(s, module_runs=()) for s in plan.stages))
    with pytest.raises(InputError, match="made by an older version; plan again"):
        export_layout(old, "json")
