"""The scoreboard of published layouts: its models, their costs, and its last run."""

from __future__ import annotations

import json

from benchmarks.layouts import NETWORK, PUBLISHED, RESULT, audit_of, model_graph
from pipecompile.layouts.grains import sections_by_node

SIZES = {
    "layers": 3,
    "dense_layers": 1,
    "hidden": 64,
    "dense_intermediate": 128,
    "expert_intermediate": 32,
    "experts": 16,
    "experts_per_token": 2,
    "shared_experts": 1,
    "heads": 4,
    "q_lora": 32,
    "kv_lora": 16,
    "qk_nope": 16,
    "qk_rope": 8,
    "v_head": 16,
    "vocabulary": 128,
    "mtp_layers": 1,
    "sequence": 32,
}
ENTRY = {"model": "small", "layout": "Et|tt|mL", "pp": 3, "vp": 1, "device": "h100", "tp": 2}


def test_a_model_of_experts_has_all_parts_and_the_time_of_its_messages() -> None:
    entry = {**ENTRY, "ep": 16}
    graph = model_graph(entry, SIZES)
    sections = [str(section) for section in sections_by_node(graph, "halves") if section]
    assert {"the attention of layer 2", "the MLP of layer 0", "MTP layer 0"} <= {*sections}
    sent = [node for node in graph.nodes if node.module == "layers.1.mlp.dispatch"]
    # Of two nodes a token with two experts reaches 1.5, and half of these are others.
    assert sum(node.forward_ns for node in sent) == round(16 * 0.75 * 64 * 2 / NETWORK * 1e9)
    assert not any("dispatch" in node.module for node in graph.nodes if "layers.0" in node.module)
    # A rank's part: one expert, and half of the queries.
    sizes = {parameter.name: parameter.shape for parameter in graph.parameters}
    assert sizes["layers.1.mlp.gate"] == (1, 64, 32)
    assert sizes["layers.0.attention.query_up.weight"] == (2 * 24, 32)
    audit = audit_of(entry, graph)
    assert [cut.grain for cut in audit.cuts] == [None, "layers", "halves", "operators"]


def test_the_last_run_confirms_what_is_known_of_three_layouts() -> None:
    rows = {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]}
    assert list(rows) == [each["name"] for each in json.loads(PUBLISHED.read_text())["layouts"]]
    cuts = {name: {cut["cut"]: cut for cut in row["cuts"]} for name, row in rows.items()}
    for name in ("llama3-405b-paper", "llama3-70b-h100-fp8"):
        assert cuts[name]["hand"]["proven"]
    best = cuts["llama3-70b-h100-fp8"]
    assert best["halves"]["heaviest_ns"] < 0.95 * best["hand"]["heaviest_ns"]
    best = cuts["deepseek-v3-h100"]
    assert best["layers"]["heaviest_ns"] < best["hand"]["heaviest_ns"]
