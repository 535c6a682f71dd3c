"""Which nodes or modules lie in other stages than in an older plan, as ranges of neighbours."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from pipecompile.ir.plan import Plan
from pipecompile.ir.stage import Stage

__all__ = ["StageMove", "move_text", "moved_modules", "moved_nodes", "moves"]

Places = Mapping[str, tuple[int, ...]]
"""Names in the order of the forward, each with the stages in which it lies."""


@dataclass(frozen=True)
class StageMove:
    """Neighbours that lie in other stages than before: `first`, `last` and all between them.

    They are neighbours in the old plan's order, or in the new plan's if only that one has them. Of
    a plan that does not have them, the stages are ().
    """

    first: str
    last: str
    before: tuple[int, ...]
    after: tuple[int, ...]


def moves(old: Places, new: Places) -> list[StageMove]:
    """Return the moves that make `new` out of `old`, each as long as it can be.

    Of layers 0 to 3 in stages 0 0 1 1 that then lie in 0 1 1 1, layer 1 moves from 0 to 1.
    """
    gone_or_moved = ((name, stages, new.get(name, ())) for name, stages in old.items())
    # Names that both plans have are listed here too, as equal: they end a range of added ones.
    added = ((name, () if name not in old else stages, stages) for name, stages in new.items())
    return [*_ranges(gone_or_moved), *_ranges(added)]


def _ranges(rows: Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> Iterator[StageMove]:
    """Yield a move for each run of rows that have the same stages before and after."""
    for (before, after), run in groupby(rows, key=lambda row: row[1:]):
        names = [row[0] for row in run]
        if before != after:
            yield StageMove(names[0], names[-1], before, after)


def moved_nodes(old: Plan, new: Plan) -> list[StageMove]:
    """Return the nodes that lie in another stage; both plans must have the same nodes."""
    return moves(_node_places(old), _node_places(new))


def _node_places(plan: Plan) -> Places:
    return {name: (stage,) for name, stage in plan.assignment.items()}


def moved_modules(old: Plan, new: Plan) -> list[StageMove] | None:
    """Return the modules that lie in other stages, were added or are gone; None if the plans share
    none.
    """
    before, after = _module_places(old), _module_places(new)
    return moves(before, after) if before.keys() & after.keys() else None


def _module_places(plan: Plan) -> Places:
    """Return the stages of each block of the model; one that is cut lies in several."""
    places: dict[str, tuple[int, ...]] = {}
    for index, stage in enumerate(plan.stages):
        for block in _expanded(stage.modules):
            places[block] = (*places.get(block, ()), index)
    return places


def _expanded(modules: Sequence[str]) -> list[str]:
    """Return the blocks of ranges of modules: h.0, h.1, h.2 and ln_f for h.0-2 and ln_f."""
    blocks: list[str] = []
    for module in modules:
        if match := re.fullmatch(r"(.+)\.(\d+)-(\d+)", module):
            first, last = int(match[2]), int(match[3])
            # A decoder may run its blocks backwards: up.3-0.
            step = 1 if last >= first else -1
            blocks += (f"{match[1]}.{number}" for number in range(first, last + step, step))
        else:
            blocks.append(module)
    return list(dict.fromkeys(blocks))


def move_text(move: StageMove, plan: Plan) -> str:
    """Return which nodes of `plan` move: by the modules that they make up, as far as these are
    known, and by nodes where a module is cut.
    """
    block_of_node = _blocks_by_node(plan)
    ends = _ends_of_blocks(block_of_node)
    first, last = block_of_node.get(move.first), block_of_node.get(move.last)
    if first is not None and first == last:
        # All of a block is called by its name alone: h.3, and not "h.3_norm … h.3_add".
        if ends[first] == (move.first, move.last):
            return first
        return f"{first} ({_range_text(move.first, move.last)})"
    start, end = move.first, move.last
    if first is not None:
        start = first if ends[first][0] == move.first else f"{first} (from {move.first})"
    if last is not None:
        end = last if ends[last][1] == move.last else f"{last} (to {move.last})"
    return _range_text(start, end)


def _range_text(first: str, last: str) -> str:
    return first if first == last else f"{first} … {last}"


def _ends_of_blocks(block_of_node: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the first and the last node of each block."""
    ends: dict[str, tuple[str, str]] = {}
    for node, block in block_of_node.items():
        ends[block] = (ends.get(block, (node, node))[0], node)
    return ends


def _blocks_by_node(plan: Plan) -> dict[str, str]:
    """Return the block of each node for which it is known, in the order of the forward.

    A plan lists the blocks of a stage, and its nodes in runs of one block each, but not which run
    lies in which block.
    """
    block_of_node: dict[str, str] = {}
    for stage in plan.stages:
        for run, block in zip(stage.blocks, _blocks_by_run(stage), strict=True):
            if block is not None:
                block_of_node |= dict.fromkeys(run, block)
    return block_of_node


def _blocks_by_run(stage: Stage) -> list[str | None]:
    """Return the block of each run of a stage; None for a run where it is not certain."""
    blocks = _expanded(stage.modules)
    # Each block has a run at least: if there are no others, the runs are in the blocks' order.
    if len(blocks) == len(stage.blocks):
        return list(blocks)
    runs = [_named_block(run, blocks) for run in stage.blocks]
    # Between two runs whose blocks are known the same holds:  h.0  ?  h.2  becomes  h.0  h.1  h.2,
    # but of  h.0  ?  ?  h.2  one run lies in no block.
    known = [(index, blocks.index(block)) for index, block in enumerate(runs) if block is not None]
    bounds = chain([(-1, -1)], known, [(len(runs), len(blocks))])
    start, place = next(bounds)
    for end, next_place in bounds:
        if end - start == next_place - place:
            runs[start + 1 : end] = blocks[place + 1 : next_place]
        start, place = end, max(place, next_place)
    return runs


def _named_block(run: Sequence[str], blocks: Sequence[str]) -> str | None:
    """Return the block after which a node of a run is named, as layers_0_norm is after layers.0."""
    spelled = {block.replace(".", "_"): block for block in blocks}
    found = [
        spelling
        for spelling in spelled
        if any(node == spelling or node.startswith(f"{spelling}_") for node in run)
    ]
    return spelled[max(found, key=len)] if found else None
