from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipecompile.errors import FormatError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.serialization import decode, encode, read

PLACEMENT = Path(__file__).resolve().parents[3] / "shared" / "instances" / "placement"


def _document() -> dict[str, Any]:
    node = {
        "forward_ns": 1,
        "backward_ns": 2,
        "parameter_bytes": 3,
        "saved_bytes": 4,
        "group": None,
    }
    return {
        "schema": "pipecompile/cost-graph/1",
        "nodes": [{"name": "a", **node}, {"name": "b", **node, "saved": [0], "parameters": ["w"]}],
        "tensors": [{"producer": "a", "consumers": ["b"], "bytes": 5, "gradient_bytes": 6}],
        "storages": [7],
        "parameters": [{"name": "w", "bytes": 3, "trainable": True}],
    }


def _read(document: object) -> CostGraph:
    return decode(json.dumps(document).encode(), CostGraph, origin="graph.json")


def test_a_graph_is_read_and_written() -> None:
    graph = _read(_document())
    assert graph.by_name["b"].saved == (0,)
    assert graph.parameter_by_name["w"].bytes == 3
    assert decode(encode(graph), CostGraph, origin="again") == graph


def test_the_fields_that_a_hand_written_graph_may_leave_out() -> None:
    document = _document()
    del document["storages"], document["parameters"]
    document["nodes"].pop()
    document["tensors"] = []
    assert _read(document).nodes[0].workspace_bytes == 0


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", 0, "forward_ns"), -1, r"\$\.nodes\[0\]\.forward_ns"),
        (("nodes", 1, "forward_ns"), 1.5, r"\$\.nodes\[1\]\.forward_ns"),
        (("nodes", 0, "group"), 3, r"\$\.nodes\[0\]\.group"),
        (("nodes", 0, "colour"), "red", r"unknown field `colour` - at `\$\.nodes\[0\]`"),
        (("tensors", 0, "consumers"), "b", r"\$\.tensors\[0\]\.consumers"),
        (("schema",), "pipecompile/cost-graph/2", "is a cost graph of version 2"),
        (("schema",), "pipecompile/cost-graph/0", r"\$\.schema"),
        (("nodes", 1, "name"), "a", "node 'a' appears 2 times"),
        (("tensors", 0, "producer"), "z", "tensor of 'z' names 'z', which is not a node"),
        (("tensors", 0, "consumers"), ["z"], "tensor of 'a' names 'z', which is not a node"),
        (("tensors", 0, "storage"), 1, "tensor of 'a' names storage 1, but there are 1"),
        (("nodes", 1, "saved"), [1], "node 'b' names storage 1, but there are 1"),
        (("nodes", 1, "uses"), [["relu"], ["other"]], "node 'b' saves 1 storages, but has 2 uses"),
        (("nodes", 1, "uses"), [["sigmoid"]], r"\$\.nodes\[1\]\.uses"),
        (("contents",), [None, None], "there are 1 storages, but contents of 2"),
        (("contents",), [{"dtype": "float4"}], "contents of 'float4' are not known"),
        (
            ("gradients",),
            [
                {"producer": "b", "last": "a", "bytes": 1},
                {"producer": "b", "last": "a", "bytes": 1, "continues": 0},
            ],
            "gradient 1 continues 0, which does not end where it begins",
        ),
        (
            ("gradients",),
            [{"producer": "b", "last": "a", "bytes": 1, "readers": ["z"]}],
            "a gradient names 'z'",
        ),
        (
            ("nodes", 1, "view_gradients"),
            ["v"],
            "node 'b' gives a gradient for 'v', which it does not read",
        ),
        (("tensors", 0, "gradient_expanded_by"), "z", "is expanded by 'z', not a consumer"),
        (
            ("nodes", 1, "parameters"),
            ["v"],
            "node 'b' reads 'v', which is not among the parameters",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(
    path: tuple[str | int, ...], value: object, message: str
) -> None:
    document: Any = _document()
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(FormatError, match=r"^graph\.json: .*" + message):
        _read(document)


def test_a_missing_field_is_named_with_its_place() -> None:
    document = _document()
    del document["nodes"][1]["backward_ns"]
    with pytest.raises(
        FormatError, match=r"missing required field `backward_ns` - at `\$\.nodes\[1\]`"
    ):
        _read(document)


@pytest.mark.skipif(
    not PLACEMENT.is_dir(), reason="the published instances lie beside the repository, not in it"
)
def test_published_instances_are_read() -> None:
    paths = [path for path in sorted(PLACEMENT.glob("*.json")) if path.name != "best_known.json"]
    assert paths
    for path in paths:
        graph = read(path, CostGraph)
        assert decode(encode(graph), CostGraph, origin=path.name) == graph
