"""Where time and memory go, against graphs whose sums are counted here again."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.graph import CostGraph, Node, Parameter
from pipecompile.report.profile import Profile, large_rows, profile_figures, profile_of
from pipecompile.report.profile_page import profile_page
from pipecompile.report.profile_text import profile_text
from tests.report.pages import Page

LAYERS = 3


def node(
    name: str,
    module: str,
    *,
    time: int = 1,
    operator: str = "torch.matmul",
    reads: tuple[str, ...] = (),
) -> Node:
    return Node(
        name=name,
        forward_ns=time,
        backward_ns=2 * time,
        backward_input_ns=time,
        backward_weight_ns=time,
        parameter_bytes=0,
        saved_bytes=10 * time,
        group=None,
        parameters=reads,
        module=module,
        operator=operator,
        source=f"models/gpt.py:{time}",
    )


def transformer() -> CostGraph:
    """Embedding, three like blocks, one that differs, and a head tied to the embedding."""
    nodes = [
        node("tokens", "", operator="placeholder"),
        node("embed", "model.embed", reads=("embed.weight",)),
    ]
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        nodes.append(
            node(
                f"attention_{layer}",
                f"{block}.attention.query",
                time=100,
                reads=(f"{layer}.query",),
            )
        )
        nodes.append(node(f"mlp_{layer}", f"{block}.mlp", time=300, operator="torch.nn.Linear"))
        nodes.append(node(f"add_{layer}", block, operator="operator.add"))
    nodes.append(node("last", f"model.layers.{LAYERS}.attention", time=7))
    nodes.append(
        node("head", "head", time=1000, operator="torch.nn.Linear", reads=("embed.weight",))
    )
    return CostGraph(
        nodes=tuple(nodes),
        tensors=(),
        parameters=(
            Parameter(name="embed.weight", bytes=4000, trainable=True, shape=(10, 100)),
            *(
                Parameter(name=f"{i}.query", bytes=400, trainable=i > 0, shape=(100,))
                for i in range(LAYERS)
            ),
        ),
    )


def profiled(graph: CostGraph, optimizer: str | None = None) -> Profile:
    return profile_of(graph, "flops", verified=True, optimizer=optimizer)


def test_like_blocks_are_one_row_with_its_parts() -> None:
    rows = [
        (row.depth, row.name, row.nodes, row.forward_ns) for row in profiled(transformer()).modules
    ]
    assert rows == [
        (0, "(outside of modules)", 1, 1),
        (0, "model", 11, 1 + 3 * 401 + 7),
        (1, "embed", 1, 1),
        (1, "layers.0-2", 9, 3 * 401),
        (2, "attention", 3, 300),
        (2, "mlp", 3, 900),
        (2, "(itself)", 3, 3),
        (1, "layers.3", 1, 7),
        (0, "head", 1, 1000),
    ]


def test_the_loss_is_called_that_by_module_and_by_operator() -> None:
    timed = node("output", "", time=50, operator="output")
    graph = CostGraph(nodes=(node("only", "a", time=100), timed), tensors=())
    assert [row.name for row in profiled(graph).modules] == ["a", "(loss)"]
    assert [row.name for row in profiled(graph).operators][1:] == ["loss"]
    # Without a target the output takes no time: it is then no loss.
    free = msgspec.structs.replace(timed, forward_ns=0, backward_ns=0)
    graph = msgspec.structs.replace(graph, nodes=(graph.nodes[0], free))
    assert [row.name for row in profiled(graph).modules] == ["a", "(outside of modules)"]


def test_one_small_row_is_one_other() -> None:
    nodes = (
        node("large", "a", time=10_000, operator="b"),
        node("small", "a", time=0, operator="c"),
    )
    profile = profiled(CostGraph(nodes=nodes, tensors=()))
    assert [row.name for row in large_rows(profile.operators, profile.total)] == ["b", "1 other"]


def test_operators_begin_with_the_one_that_takes_most() -> None:
    rows = [(row.name, row.time_ns) for row in profiled(transformer()).operators]
    assert rows[:2] == [("torch.nn.Linear", 3 * 1900), ("torch.matmul", 3 * 308)]


def test_nodes_that_are_alike_are_one_of_the_heaviest() -> None:
    heaviest = [(nodes[0].name, len(nodes)) for nodes in profiled(transformer()).heaviest]
    assert heaviest[:4] == [("head", 1), ("mlp_0", 3), ("attention_0", 3), ("last", 1)]


def test_a_parameter_that_several_read_counts_once_in_each_row() -> None:
    profile = profiled(transformer())
    held = {row.name: row.parameter_bytes for row in profile.modules}
    assert profile.total.parameter_bytes == 4000 + 3 * 400
    assert held["embed"] == held["head"] == 4000
    assert held["layers.0-2"] == held["attention"] == 1200
    assert profile.gradient_bytes == 4000 + 2 * 400


def test_the_state_of_an_optimizer_is_asked_for_by_name() -> None:
    assert profiled(transformer()).optimizer_bytes == 0
    assert (
        profiled(transformer(), "adamw").optimizer_bytes == 2 * 4800 + 3 * 4
    )  # two copies, and a counter each
    with pytest.raises(InputError, match="adamw"):
        profiled(transformer(), "adamm")


def test_a_graph_from_elsewhere_has_no_modules_and_no_halves() -> None:
    plain = Node(
        name="a", forward_ns=1, backward_ns=2, parameter_bytes=8, saved_bytes=4, group=None
    )
    profile = profiled(CostGraph(nodes=(plain,), tensors=()))
    assert (
        profile.total.parameter_bytes,
        profile.backward_input_ns,
        profile.operators[0].name,
    ) == (8, None, "a")
    assert "inputs alone ?" in profile_text(profile)


names = st.text(min_size=1, max_size=60)


@given(
    st.lists(
        st.tuples(names, names, names, st.integers(0, 10**9)),
        min_size=1,
        max_size=12,
        unique_by=lambda t: t[0],
    )
)
def test_rows_add_up_and_the_page_is_whole(parts: list[tuple[str, str, str, int]]) -> None:
    graph = CostGraph(
        nodes=tuple(node(a, b, operator=c, time=t) for a, b, c, t in parts), tensors=()
    )
    profile = profiled(graph)
    whole = sum(3 * time for *_, time in parts)
    assert (
        sum(row.time_ns for row in profile.modules if not row.depth)
        == whole
        == profile.total.time_ns
    )
    assert sum(row.time_ns for row in profile.operators) == whole
    assert sum(row.nodes for row in profile.operators) == len(parts)
    page = Page()
    page.feed(profile_page("a <title> & more", profile))
    assert page.open == []
    assert {"script", "link", "img"}.isdisjoint(page.seen)


def test_names_are_escaped_in_the_page() -> None:
    hostile = "<script>alert('1')</script>"
    page = profile_page(
        hostile, profiled(CostGraph(nodes=(node(hostile, hostile, operator=hostile),), tensors=()))
    )
    assert "<script" not in page
    assert (
        page.count("&lt;script&gt;") == 6
    )  # title, heading, module, operator, and the node's name and operator


def test_text_fits_in_100_columns_and_says_what_it_is() -> None:
    text = profile_text(profiled(transformer(), "adamw"))
    assert max(map(len, text.splitlines())) <= 100
    assert "one microbatch, costs flops, capture verified against the model" in text
    assert "unverified capture" in profile_text(profile_of(transformer(), "flops", verified=False))


def test_figures_for_scripts_hold_the_rows() -> None:
    figures = profile_figures(profiled(transformer()))
    assert figures["total"]["forward_ns"] == 2 + 3 * 401 + 7 + 1000
    assert [row["name"] for row in figures["modules"]][3] == "layers.0-2"


@pytest.mark.parametrize(
    ("modules", "rows"),
    [
        (["a.b.c", "a.b.d"], ["a.b", "  c", "  d"]),
        (["a.b", "a.c", "a"], ["a", "  b", "  c", "  (itself)"]),
        (["0", "1", "1"], ["0", "1"]),
        (["0.1", "0.2.x", "0.2.y"], ["0", "  1", "  2"]),
        (["a.0.b", "a.1.b", "c.0.b"], ["a.0-1", "c.0"]),
        (["", ""], ["(outside of modules)"]),
    ],
)
def test_modules_nest_alike(modules: list[str], rows: list[str]) -> None:
    nodes = tuple(node(f"n{index}", module) for index, module in enumerate(modules))
    profile = profiled(CostGraph(nodes=nodes, tensors=()))
    assert ["  " * row.depth + row.name for row in profile.modules] == rows


def test_relative_times_are_said_to_be_no_seconds() -> None:
    graph = msgspec.structs.replace(transformer(), time_unit="relative")
    text, page = profile_text(profiled(graph)), profile_page("gpt", profiled(graph))
    for told in (text, page):
        assert "costs flops (times are relative units, not seconds)" in told
        assert "2.2 k units" in told
        assert not re.search(r"\d (ns|µs|ms)\b", told)
