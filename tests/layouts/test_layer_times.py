"""Tables of layer times, as the cost graphs of chains."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipecompile.errors import FormatError, InputError
from pipecompile.layouts.assignment import assignment_of
from pipecompile.layouts.layer_times import layer_times, read_layer_times
from pipecompile.layouts.layout_text import layout_text, read_layout

TABLE = """\
part,forward_ms,backward_ms,parameters,saved
# timed on two cards
E,0.2,0.3,2GB,64MiB
t*2,1,2,300MB,1GiB
attention*2,0.5,1,100MB,
mlp*2,1.5,2.5,200MB,
m,1,2,,
L,2,4,2GB,1KiB
"""


def test_a_table_is_a_chain_of_modules_with_times_and_sizes() -> None:
    graph = layer_times(TABLE)
    assert [node.module for node in graph.nodes] == [
        "embedding",
        "layers.0",
        "layers.1",
        "layers.2.attention",
        "layers.2.mlp",
        "layers.3.attention",
        "layers.3.mlp",
        "mtp.0",
        "head",
    ]
    assert [node.forward_ns for node in graph.nodes[:4]] == [200_000, 10**6, 10**6, 500_000]
    assert graph.nodes[-1].backward_ns == 4 * 10**6
    assert graph.storages[:4] == (64 << 20, 1 << 30, 1 << 30, 0)
    assert sum(each.bytes for each in graph.parameters) == 4 * 10**9 + 2 * (3 + 1 + 2) * 10**8
    assert [(t.producer, t.consumers) for t in graph.tensors][-1] == ("mtp_0", ("head",))


@pytest.mark.parametrize("given", ["Ett|ttmL", "*-*|-*-*-", "2,2"])
def test_layouts_match_it(given: str) -> None:
    layout = read_layout(layout_text(given))
    graph = layer_times("part,forward_ms,backward_ms\nE,1,1\nattention*4,1,2\nmlp*4,3,6\nL,2,2")
    if "m" in given:
        graph = layer_times(TABLE)
    stages = assignment_of(layout, graph)
    assert sorted(set(stages.values())) == [0, 1]


WRONG = [
    ("part,ms\nt,1", r"has the columns part, ms; write part,forward_ms,backward_ms"),
    ("", "has the columns none"),
    ("part,forward_ms,backward_ms\nx*2,1,2", r"line 2 of the table .*'x\*2' is no part"),
    ("part,forward_ms,backward_ms\nt*0,1,2", r"'t\*0' is no part"),
    ("part,forward_ms,backward_ms\nt,one,2", "line 2 .*forward_ms is 'one'; write a time in ms"),
    ("part,forward_ms,backward_ms\nt,1", "line 2 .*backward_ms is ''; write a time"),
    ("part,forward_ms,backward_ms\nt,-1,2", "forward_ms is '-1'; write a time"),
    ("part,forward_ms,backward_ms\nt,1,inf", "backward_ms is 'inf'; write a time"),
    ("part,forward_ms,backward_ms\nt,1,2,3GB", "'t,1,2,3GB': it has more values than the header"),
    ("part,forward_ms,backward_ms\nL*2,1,2", r"'L\*2': there is one L"),
    ("part,forward_ms,backward_ms\nE,1,2", "the table has no layer"),
    ("part,forward_ms,backward_ms\nmlp,1,2", "mlp needs attention before it"),
    ("part,forward_ms,backward_ms\nattention*2,1,2\nmlp,1,2", r"followed by mlp\*1; write mlp\*2"),
    ("part,forward_ms,backward_ms\nt,1,2\nattention,1,2", "ends with attention; add mlp"),
]


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_what_is_no_table_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        layer_times(text)


def test_a_file_is_named_in_its_error(tmp_path: Path) -> None:
    path = tmp_path / "times.csv"
    with pytest.raises(FormatError, match=r"times.csv: there is no such file"):
        read_layer_times(path)
    path.write_text("part,ms\n")
    with pytest.raises(FormatError, match=r"times.csv: the table of layer times has the columns"):
        read_layer_times(path)
    path.write_text(TABLE)
    assert read_layer_times(path) == layer_times(TABLE)
    path.write_text(TABLE, encoding="utf-8-sig")
    assert read_layer_times(path) == layer_times(TABLE)
