"""How good are the pipeline layouts that large training runs were made with, and what beats them?

    python -m benchmarks.layouts [NAME …]

Audits the layouts of published_layouts.json (all, or those of these names). Models are built on
the meta device from their published sizes, as one rank of tensor and expert parallelism has them
(`published_models`), captured whole, and costed by the roofline of the device that an entry names.
Two costs are set otherwise:

- an all-to-all of experts takes what its tokens take over a rank's network link (NETWORK): each
  token goes once to each other node where it has an expert, in bfloat16, and its gradient back;
- an RMSNorm is one kernel, which reads and writes the tensor in its forward, and reads two and
  writes one in its backward: PyTorch on a CPU, where fake tensors are, takes it apart.

Schedules are interleaved 1F1B (1F1B where a rank has one stage), with two microbatches a rank; the
heaviest rank does not depend on it. Optimizer states are not counted.

Prints the heaviest rank of the layout, of the best cuts that were found, and their lower bounds;
writes results/layouts.json, where other entries stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.command_line import chosen_names
from benchmarks.published_models import PUBLISHED, TRAVELS, Sizes, published_model
from pipecompile.api.audit import audit_graph
from pipecompile.api.choices import requested_options
from pipecompile.api.profile import costs_of
from pipecompile.cost_models.device import load_device
from pipecompile.frontend.target import Target
from pipecompile.ir.audit import Audit, AuditedCut
from pipecompile.ir.graph import CostGraph, Node

RESULT = Path(__file__).parent / "results" / "layouts.json"
NETWORK = 50_000_000_000  # bytes per second of a GPU: 400 Gbit/s, as nodes of eight H100 have
GPUS_PER_NODE = 8
# Of DeepSeek-V3's tokens each goes to at most four nodes (arXiv 2412.19437, section 2.1.2).
MOST_NODES = {"deepseek-v3": 4}
BYTES = 2  # of an element in bfloat16
NORM_MOVES = (2, 3)  # tensors that a fused RMSNorm reads or writes, forward and backward


def main() -> None:
    """Print and write the table."""
    torch.set_num_threads(1)
    published = json.loads(PUBLISHED.read_text())
    names = chosen_names(__doc__, "name", [entry["name"] for entry in published["layouts"]])
    rows = {row["name"]: row for row in _written()}
    print(f"{'layout':26} {'cut':10} {'heaviest':>10} {'at least':>10} {'of mean':>8} {'step':>9}")
    for entry in published["layouts"]:
        if not names or entry["name"] in names:
            rows[entry["name"]] = measure(entry, published["models"][entry["model"]])
            ordered = [rows[e["name"]] for e in published["layouts"] if e["name"] in rows]
            result = {"torch": torch.__version__, "costs": "roofline:h100", "rows": ordered}
            RESULT.write_text(json.dumps(result, indent=1) + "\n")


def _written() -> list[dict[str, Any]]:
    """Return the rows of an earlier run; none if there was no run."""
    return json.loads(RESULT.read_text())["rows"] if RESULT.is_file() else []


def measure(entry: dict[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Return the row of one layout, and print its lines."""
    graph = model_graph(entry, sizes)
    audit = audit_of(entry, graph)
    row = {
        "name": entry["name"],
        "layout": entry["layout"],
        "nodes": len(graph.nodes),
        "microbatches": audit.microbatches,
        "cuts": [_cut_row(cut) for cut in audit.cuts],
        "parts": [
            {name: getattr(part, name) for name in part.__struct_fields__} for part in audit.parts
        ],
    }
    for cut in row["cuts"]:
        print(
            f"{entry['name']:26} {cut['cut']:10} {cut['heaviest_ns'] / 1e6:7.2f} ms "
            f"{cut['bound_ns'] / 1e6:7.2f} ms {cut['imbalance']:8.3f} {cut['step_ns'] / 1e9:7.2f} s"
            f"  {'proven' if cut['proven'] else ''}",
            flush=True,
        )
    return row


def _cut_row(cut: AuditedCut) -> dict[str, Any]:
    return {
        "cut": cut.grain or "hand",
        "heaviest_ns": cut.heaviest_ns,
        "heaviest_rank": cut.heaviest_rank,
        "on_it": cut.parts,
        "bound_ns": cut.bound_ns,
        "proven": cut.proven,
        "imbalance": round(cut.imbalance, 4),
        "step_ns": cut.step_ns,
        "form": cut.form,
        "text": cut.text,
    }


def audit_of(entry: dict[str, Any], graph: CostGraph) -> Audit:
    """Return the audit of an entry of the published layouts on the costs of its model."""
    several = {"schedule": "interleaved-1f1b", "stages_per_rank": entry["vp"]}
    options = requested_options(
        layout=entry["layout"],
        microbatches=2 * entry["pp"],
        costs=f"roofline:{entry['device']}",
        **(several if entry["vp"] > 1 else {}),
    )
    return audit_graph(graph, options)


def model_graph(entry: dict[str, Any], sizes: Sizes) -> CostGraph:
    """Return the costs of one microbatch of an entry's model on one rank of its parallelism."""
    target = Target.of(
        published_model(sizes, tp=entry["tp"], ep=entry.get("ep", 1)), entry["model"]
    )
    options = requested_options(k=1, costs=f"roofline:{entry['device']}")
    graph, _ = costs_of(target, options, self_check=False)
    travel_ns = _travel_ns(entry, sizes) if "ep" in entry else 0
    nodes = _as_kernels(_with_travel(graph.nodes, travel_ns), graph, entry["device"])
    return replace(graph, nodes=tuple(nodes))


def _travel_ns(entry: dict[str, Any], sizes: Sizes) -> int:
    """Return the time of one all-to-all of a layer's tokens, in one direction."""
    nodes = max(1, entry["ep"] // GPUS_PER_NODE)
    # How many nodes have one of a token's experts, if these are anywhere.
    reached = nodes * (1 - (1 - 1 / nodes) ** sizes["experts_per_token"])
    remote = min(reached, MOST_NODES.get(entry["model"], nodes)) * (nodes - 1) / nodes
    tokens = sizes["sequence"] // entry["tp"]
    return round(tokens * remote * sizes["hidden"] * BYTES / NETWORK * 1e9)


def _with_travel(nodes: tuple[Node, ...], travel_ns: int) -> Iterator[Node]:
    """Yield the nodes with the time of an all-to-all at the first node of each."""
    seen = set[str]()
    for node in nodes:
        if node.module.rpartition(".")[2] not in TRAVELS:
            yield node
            continue
        ns = 0 if node.module in seen else travel_ns
        seen.add(node.module)
        yield _timed(node, ns, ns)


def _as_kernels(nodes: Iterator[Node], graph: CostGraph, device: str) -> Iterator[Node]:
    """Yield the nodes with each RMSNorm as one kernel."""
    there = load_device(device)
    bandwidth = there.bandwidth_bytes_per_s * there.bandwidth_permille / 1000
    sizes = {tensor.producer: tensor.bytes for tensor in graph.tensors}
    for node in nodes:
        if node.operator.endswith("RMSNorm"):
            ns = (round(moves * sizes[node.name] / bandwidth * 1e9) for moves in NORM_MOVES)
            yield _timed(node, *ns)
        else:
            yield node


def _timed(node: Node, forward_ns: int, backward_ns: int) -> Node:
    return replace(
        node,
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        backward_input_ns=None,
        backward_weight_ns=None,
    )


if __name__ == "__main__":
    main()
