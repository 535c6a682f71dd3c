"""Groups that are asked for, on top of those of a cost graph."""

from __future__ import annotations

from itertools import pairwise

import pytest
from cuts import chain, letter_graph
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.partition.groups import grouped, nodes_within

NAMES = "abcdef"
GROUPS = st.lists(st.lists(st.sampled_from(NAMES), min_size=1, unique=True), max_size=4)


def _sets(names: str, groups: dict[str, str | None]) -> set[frozenset[str]]:
    known = {group for group in groups.values() if group is not None}
    return {frozenset(n for n in names if groups[n] == group) for group in known}


@given(GROUPS, GROUPS)
def test_groups_are_joined_where_they_share_nodes(
    first: list[list[str]], second: list[list[str]]
) -> None:
    graph = letter_graph(NAMES, " ".join(map("".join, pairwise(NAMES))))
    result = grouped(grouped(graph, first), second)
    # Sets that share a node are joined, one pair at a time, until no two do.
    sets = [set(names) for names in (*first, *second)]
    while pair := next(((a, b) for a in sets for b in sets if a is not b and a & b), None):
        sets = [each for each in sets if each is not pair[1]]
        pair[0].update(pair[1])
    expected = {frozenset(each) for each in sets if len(each) > 1}
    assert _sets(NAMES, {node.name: node.group for node in result.nodes}) == expected
    assert all(node.group in (None, min(node.group or "", node.name)) for node in result.nodes)
    assert grouped(graph, []) == graph


def test_the_ends_of_a_model_keep_their_names() -> None:
    graph = letter_graph("abcd", "ab bc cd", groups={"b": "inputs", "c": "outputs"})
    assert [node.group for node in grouped(graph, [["a", "b"]]).nodes] == [
        "inputs", "inputs", None, None
    ]  # fmt: skip


def test_nodes_are_named_by_themselves_and_by_their_modules() -> None:
    graph = chain([1, 1, 1, 1])
    modules = ("h.0", "h.0.mlp", "h.00", "")
    nodes = [replace(n, module=m) for n, m in zip(graph.nodes, modules, strict=True)]
    graph = replace(graph, nodes=tuple(nodes))
    assert nodes_within(graph, ["h.0"]) == ["n0", "n1"]
    assert nodes_within(graph, ["n3", "h.0.mlp"]) == ["n1", "n3"]
    with pytest.raises(InputError, match=r"of the cost graph is called 'h\.1'"):
        nodes_within(graph, ["h.1"])
