from __future__ import annotations

import networkx as nx
from cuts import letter_graph
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.partition.units import units


def _units(*arguments: object) -> list[str]:
    return ["".join(unit) for unit in units(letter_graph(*arguments))]  # type: ignore[arg-type]


def test_units_follow_the_order_of_theletter_graph() -> None:
    assert _units("abcd", "ac ad bd") == ["a", "b", "c", "d"]
    assert _units("abcd", "da db") == ["c", "d", "a", "b"]


def test_a_group_is_one_unit_and_its_members_keep_their_order() -> None:
    assert _units("abcd", "ab cd", {"a": "g", "d": "g", "b": "h"}) == ["c", "ad", "b"]


def test_what_lies_between_two_members_of_a_group_joins_it() -> None:
    assert _units("abcde", "ab bc cd de", {"a": "g", "c": "g"}) == ["abc", "d", "e"]


def test_groups_that_feed_each_other_are_one_unit() -> None:
    assert _units("abcd", "ab cd", {"a": "g", "d": "g", "b": "h", "c": "h"}) == ["abcd"]


def test_inputs_come_first_and_outputs_last() -> None:
    assert _units("ioab", "ia ao", {"i": "inputs", "o": "outputs"}) == ["i", "a", "b", "o"]


@given(
    st.integers(1, 9),
    st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=14),
    st.data(),
)
def test_units_are_a_topological_order_of_the_mergedletter_graph(
    size: int, pairs: set[tuple[int, int]], data: st.DataObject
) -> None:
    names = "abcdefghi"[:size]
    edges = " ".join(
        f"{names[a]}{names[b]}" for a, b in sorted(pairs) if a < size and b < size and a != b
    )
    groups = {
        name: group
        for name in names
        if (group := data.draw(st.sampled_from(["", "", "", "g", "h"])))
    }
    graph = letter_graph(names, edges, groups)
    merged = units(graph)
    position = {name: index for index, unit in enumerate(merged) for name in unit}
    assert sorted(position) == list(names)
    assert all(
        position[t.producer] <= position[name] for t in graph.tensors for name in t.consumers
    )
    assert all(list(unit) == sorted(unit) for unit in merged)
    together = nx.DiGraph([(t.producer, name) for t in graph.tensors for name in t.consumers])
    together.add_nodes_from(names)
    together.add_edges_from((a, b) for a in groups for b in groups if groups[a] == groups[b])
    assert {frozenset(unit) for unit in merged} == {
        frozenset(c) for c in nx.strongly_connected_components(together)
    }
    assert units(graph) == merged
