"""Transfer of stages, copied nodes, regions and encoded runs to another graph of the same model.

A plan is made for the training graph. The graph of the evaluation, for example, has no dropout, so
its nodes differ a little. `training/programs.py` calls this when the model runs in another mode, or
on batches of another shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher

from torch import fx

from pipecompile.codegen.regions import EncodedRuns, Regions, region_error, stage_order
from pipecompile.errors import CaptureError
from pipecompile.graph.copied_nodes import is_copyable, stages_of_copies
from pipecompile.graph.recomputability import recompute_limits
from pipecompile.graph.ties import names_of_read_state
from pipecompile.ir.encodings import Encoding

__all__ = ["transfer", "transfer_copied", "transfer_encodings", "transfer_regions"]

FOR_THIS_ONE = "compile the model in this mode or with this shape"
NodeKey = tuple[str, str, str]
"""The kind of a node, what it calls, and the path of the module that contains it."""


def transfer(
    assignment: Mapping[str, int],
    source: fx.Graph,
    module: fx.GraphModule,
    holders: Mapping[str, tuple[int, ...]],
) -> dict[str, int]:
    """Return a stage for each node of `module`, after the stages `assignment` of `source`.

    Nodes that correspond to each other get the same stage, and other nodes follow their inputs.
    `holders` maps each parameter to the stages that hold it. Raise CaptureError if a node would
    have to run in a stage without its parameters, or if a stage has nothing to run.

        source      linear 0   dropout 0   linear 1        holders: linear → 0, linear_1 → 1
        module      linear                 linear   add
        stages      0                      1        1 (follows its inputs)
    """
    old = [node for node in source.nodes if node.op != "get_attr"]
    new = [node for node in module.graph.nodes if node.op != "get_attr"]
    planned_stages = {
        node: assignment[counterpart.name] for node, counterpart in _counterparts(old, new).items()
    }
    latest = _latest_stages(module, new, holders)
    stages: dict[fx.Node, int] = {}
    for node in new:
        # No node runs before its inputs.
        input_stages = [stages[value] for value in node.all_input_nodes if value in stages]
        # A node without a counterpart begins at 0, and its inputs move it on.
        planned = min(planned_stages.get(node, 0), latest.get(node, len(assignment)))
        earliest = max([planned, *input_stages])
        stages[node] = _first_possible_stage(module, node, earliest, holders)
    _unite_groups(stages, module, holders)
    # Every rank runs its part of the schedule, so no stage may be without nodes.
    empty = sorted(set(assignment.values()) - set(stages.values()))
    if empty:
        raise CaptureError(
            f"in this mode or shape stage {empty[0]} has nothing to run, since the forward leaves "
            f"its modules out; use fewer stages, or {FOR_THIS_ONE}"
        )
    return {node.name: stage for node, stage in stages.items()}


def _latest_stages(
    module: fx.GraphModule, nodes: Sequence[fx.Node], holders: Mapping[str, tuple[int, ...]]
) -> dict[fx.Node, int]:
    """Return the last stage for each node from which all that follows it can read what it needs;
    none where nothing that follows needs anything.

    The graph in training may send a copy of a buffer that it writes to on to a later stage. In
    another graph the same nodes read the buffer itself, and so must lie where it is.
    """
    latest: dict[fx.Node, int] = {}
    for node in reversed(nodes):
        bounds = [latest[user] for user in node.users if user in latest]
        allowed = _holding_stages(module, node, holders)
        # From the end back: relu → linear, where the linear's weight lies in stage 1, gives both
        # the bound 1. A relu behind it that nothing follows has none.
        possible = [stage for stage in allowed or () if all(stage <= bound for bound in bounds)]
        if bounds or possible:
            latest[node] = max(possible) if possible else min(bounds)
    return latest


def _first_possible_stage(
    module: fx.GraphModule,
    node: fx.Node,
    earliest: int,
    holders: Mapping[str, tuple[int, ...]],
) -> int:
    """Return the first stage from `earliest` on that holds all that `node` reads."""
    allowed = _holding_stages(module, node, holders)
    if allowed is None:
        return earliest
    for stage in sorted(allowed):
        if stage >= earliest:
            return stage
    raise CaptureError(
        f"in this mode or shape {node.name} ({node.meta['source']}) runs in stage {earliest} or "
        f"later, but its parameters lie in {sorted(allowed)}; keep its module on one stage with "
        f"those that run before it here (no_split=), or {FOR_THIS_ONE}"
    )


def transfer_copied(
    copied: Collection[str],
    source: fx.Graph,
    module: fx.GraphModule,
    assignment: Mapping[str, int],
    holders: Mapping[str, tuple[int, ...]],
) -> frozenset[str]:
    """Return the nodes of `module`, whose nodes have the stages `assignment`, that correspond to
    those of `source` that are `copied`.

    A node is left out, and so relayed, if a stage that reads it does not hold the buffers that it
    needs, or if it does here what no copy may.
    """
    old = [node for node in source.nodes if node.op != "get_attr"]
    new = [node for node in module.graph.nodes if node.op != "get_attr"]
    pairs = _counterparts(old, new).items() if copied else ()
    found = {
        node.name: node
        for node, counterpart in pairs
        if counterpart.name in copied and node.meta["group"] is None and is_copyable(node)
    }
    # One that is left out may be read in fewer stages, and with it what only it reads.
    while True:
        stages = stages_of_copies(module.graph, assignment, found)
        unheld = [name for name in found if not _all_hold(module, found[name], stages, holders)]
        if not unheld:
            return frozenset(found)
        for name in unheld:
            del found[name]


def _all_hold(
    module: fx.GraphModule,
    node: fx.Node,
    stages: Mapping[str, Collection[int]],
    holders: Mapping[str, tuple[int, ...]],
) -> bool:
    """Return whether all stages that are to run a copy hold the buffers that it reads."""
    holder_stages = _holding_stages(module, node, holders)
    return holder_stages is None or holder_stages.issuperset(stages[node.name])


def transfer_regions(
    regions: Regions,
    source: fx.Graph,
    module: fx.GraphModule,
    assignment: Mapping[str, int],
    copied: Collection[str] = (),
) -> dict[int, list[list[str]]]:
    """Return regions for `module`, whose nodes have the stages `assignment`; those of `copied` are
    in each stage that reads them.

    Each goes from the first to the last node that corresponds to one of the source's region. It is
    left out if it is not possible in `module`: its nodes then keep what they save. Requires groups
    (`meta["group"]`).
    """
    limits = recompute_limits(module)
    old = [node for node in source.nodes if node.op != "get_attr"]
    new = [node for node in module.graph.nodes if node.op != "get_attr"]
    old_names = {
        node.name: counterpart.name for node, counterpart in _counterparts(old, new).items()
    }
    transferred: dict[int, list[list[str]]] = {}
    for stage, stage_regions in regions.items():
        order = stage_order(module.graph, assignment, stage, copied)
        for region in map(frozenset, stage_regions):
            # Nodes in between that only this graph has become a part of the region.
            positions = [p for p, name in enumerate(order) if old_names.get(name) in region]
            names = order[positions[0] : positions[-1] + 1] if positions else []
            # Two regions of the source that differ in nodes which this graph lacks are one here.
            is_new = names not in transferred.get(stage, ())
            if is_new and region_error(limits, order, names) is None:
                transferred.setdefault(stage, []).append(names)
    return transferred


def transfer_encodings(
    encoded_runs: EncodedRuns,
    source: fx.Graph,
    module: fx.GraphModule,
    assignment: Mapping[str, int],
    copied: Collection[str] = (),
) -> dict[int, list[tuple[Sequence[str], tuple[Encoding, ...]]]]:
    """Return encoded runs for `module`, transferred as `transfer_regions` transfers regions."""
    transferred: dict[int, list[tuple[Sequence[str], tuple[Encoding, ...]]]] = {}
    all_runs = [run for runs in encoded_runs.values() for run in runs]
    for encodings in dict.fromkeys(encodings for _, encodings in all_runs):
        same_encodings = {
            stage: [names for names, run_encodings in runs if run_encodings == encodings]
            for stage, runs in encoded_runs.items()
        }
        regions = transfer_regions(same_encodings, source, module, assignment, copied)
        for stage, stage_regions in regions.items():
            transferred.setdefault(stage, []).extend((names, encodings) for names in stage_regions)
    return transferred


def _counterparts(old: Sequence[fx.Node], new: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the nodes of `new` that call the same at the same place as a node of `old`, with it.

    The place is found as `diff` finds equal lines, by matching blocks of equal keys.
    """
    # Without `autojunk`, which leaves out of long sequences what is frequent: nearly all
    # operators are.
    matcher = SequenceMatcher(None, list(map(_key, old)), list(map(_key, new)), autojunk=False)
    return {
        new[block.b + offset]: old[block.a + offset]
        for block in matcher.get_matching_blocks()
        for offset in range(block.size)
    }


def _unite_groups(
    stages: dict[fx.Node, int], module: fx.GraphModule, holders: Mapping[str, tuple[int, ...]]
) -> None:
    """Move nodes in `stages` to later stages until each group is on one stage.

    Raise CaptureError if the parameters or inputs of a moved node are not in its new stage.
    """
    groups: dict[str, list[fx.Node]] = {}
    for node in stages:
        groups.setdefault(node.meta.get("group") or node.name, []).append(node)
    # A move can pull later groups along, so this repeats until nothing moves. Stages only grow.
    has_moved = True
    while has_moved:
        has_moved = False
        for members in groups.values():
            inputs = [
                value for node in members for value in node.all_input_nodes if value in stages
            ]
            # Later and never earlier: inputs of a node that moves are there all the same.
            latest = max(stages[node] for node in (*members, *inputs))
            has_moved = has_moved or any(stages[node] < latest for node in members)
            stages.update(dict.fromkeys(members, latest))
    for node, stage in stages.items():
        allowed = {0} if node.op == "placeholder" else _holding_stages(module, node, holders)
        if allowed is not None and stage not in allowed:
            raise CaptureError(
                f"in this mode or shape {node.name} ({node.meta['source'] or 'an input'}) must be "
                f"in stage {stage} with other nodes, but what it needs lies in {sorted(allowed)}; "
                f"keep these modules on one stage (no_split=), or {FOR_THIS_ONE}"
            )


def _key(node: fx.Node) -> NodeKey:
    target = node.target
    if not isinstance(target, str):
        target = getattr(target, "__qualname__", repr(target))
    return node.op, target, node.meta["module"]


def _holding_stages(
    module: fx.GraphModule, node: fx.Node, holders: Mapping[str, tuple[int, ...]]
) -> set[int] | None:
    """Return the stages that hold all parameters that `node` reads; None if it reads none."""
    readers = [node, *(source for source in node.all_input_nodes if source.op == "get_attr")]
    names = [name for reader in readers for name in names_of_read_state(module, reader)]
    stage_sets = [set(holders[name]) for name in names if name in holders]
    return set.intersection(*stage_sets) if stage_sets else None
