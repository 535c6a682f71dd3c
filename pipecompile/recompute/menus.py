"""Menus: choices of regions for long stages, joined from those of short segments.

`RegionSearch` grows with the cube of a stage's length. A long stage is therefore cut into segments
of about a block of the model each. The choices of a segment (its menu) depend on nothing outside
but on which tensors that it reads are kept already, so alike blocks share one menu:

    stage      embedding │ block │ block │ block │ block │ head
    menus      A         │ B     │ B     │ B     │ B     │ C        B is solved once

Two neighbours are joined by taking each choice of one with each choice of the other: kept bytes and
times add up, and the peak is that of either, with what the other one holds at that time. In a run
of segments that is joined, the whole run may also be one region.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor
from pipecompile.recompute.pareto_front import ParetoFront, merged
from pipecompile.recompute.region import Region
from pipecompile.recompute.region_search import RegionSearch, State

__all__ = ["Menu", "menu"]

WHOLE = -1
"""In the `left` column of a joined front: all nodes are one region."""

ROWS = 2**32
"""More than any front has rows: `left` of a joined front is pair number × ROWS + left row."""


class _Pair(NamedTuple):
    """Two fronts that were joined, by the states at the end of the left and of the right part."""

    left: State
    right: State


@dataclass(frozen=True)
class Menu:
    """The choices for a problem: a Pareto front for each state at its end.

    A menu is either of one segment (`search`), or joined from a menu of the nodes before `cut`
    (`left`) and menus of those after it (`rights`, one for each state that the left one ends in).
    """

    fronts: dict[State, ParetoFront]
    length: int
    search: RegionSearch | None = None
    left: Menu | None = None
    rights: dict[State, Menu] = field(default_factory=dict)
    pairs: list[_Pair] = field(default_factory=list)
    cut: int = 0

    def regions(self, state: State, row: int) -> tuple[Region, ...]:
        """Return the regions, in order, of a row of the front in `state`."""
        front = self.fronts[state]
        if self.search is not None:
            return self.search.regions(self.length, state, row)
        if front.left[row] == WHOLE:
            return (Region(0, self.length),)
        assert self.left is not None
        number, left_row = divmod(int(front.left[row]), ROWS)
        pair = self.pairs[number]
        on_right = self.rights[pair.left].regions(pair.right, int(front.right[row]))
        shifted = (Region(start + self.cut, stop + self.cut) for start, stop in on_right)
        return (*self.left.regions(pair.left, left_row), *shifted)


@lru_cache(maxsize=4096)
def menu(
    problem: RecomputeProblem, cuts: tuple[int, ...], kept: State, most: int | None, depth: int = 0
) -> Menu:
    """Return the choices for `problem`, cut into segments at `cuts`.

    Bytes are beyond the tensors `kept` before; what is sent counts in every peak. Fronts hold about
    `most` choices each, all if None. `depth` counts how often the stage was cut already.
    """
    length = len(problem.forward_ns)
    # One segment: few enough nodes for the exact search.
    if not cuts:
        search = RegionSearch(problem, 0, length, kept, most)
        return Menu(search.fronts[length], length, search=search)
    cut, cuts_before, cuts_after = _split(cuts, depth)
    left, right = _subproblem(problem, 0, cut), _subproblem(problem, cut, length)
    left_menu = menu(left.problem, cuts_before, left.local(kept), most, depth + 1)
    whole_menu = Menu({}, length, left=left_menu, cut=cut)
    fronts: dict[State, list[ParetoFront]] = {}
    for left_state, left_front in left_menu.fronts.items():
        # What the left part ends with, and what passes by it, is what the right part begins with.
        kept_at_cut = left.outer(left_state) | (kept - left.tensors)
        right_cuts = tuple(each - cut for each in cuts_after)
        right_menu = menu(right.problem, right_cuts, right.local(kept_at_cut), most, depth + 1)
        whole_menu.rights[left_state] = right_menu
        beside = _bytes_beside(problem, left, right, kept, kept_at_cut)
        for right_state, right_front in right_menu.fronts.items():
            kept_at_end = right.outer(right_state) | (kept_at_cut - right.tensors)
            state = kept_at_end & _live(problem, length)
            joined = _joined(left_front, right_front, len(whole_menu.pairs), beside)
            fronts.setdefault(state, []).append(joined)
            whole_menu.pairs.append(_Pair(left_state, right_state))
    # A region over everything crosses the cut, so no pair of choices has it.
    if not problem.excluded:
        state, front = RegionSearch(problem, 0, length, kept).whole()
        marked = replace(front, left=np.full_like(front.left, WHOLE))
        fronts.setdefault(state, []).append(marked)
    whole_menu.fronts.update({state: merged(parts, most) for state, parts in fronts.items()})
    return whole_menu


def _split(cuts: tuple[int, ...], depth: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return where to cut first, and the cuts before and after that.

    The first two cuts take off the last and the first segment: these are the stage's own, and what
    lies between is a run of alike blocks, whose halves are alike and so are solved once.
    """
    # Cuts 1 … 7 of segments A B B B B B B C: at 7 first, at 1 next, and then at 4
    # between the halves B B B and B B B, which the cache takes for one problem.
    index = {0: len(cuts) - 1, 1: 0}.get(depth, len(cuts) // 2)
    return cuts[index], cuts[:index], cuts[index + 1 :]


@dataclass(frozen=True)
class _Subproblem:
    """A run of nodes as a problem of its own; `order` has the indices of its tensors outside."""

    problem: RecomputeProblem
    order: tuple[int, ...]

    @property
    def tensors(self) -> State:
        """The indices outside of all tensors that it has."""
        return frozenset(self.order)

    def local(self, state: State) -> State:
        """Return a state of the outer problem in this one's indices."""
        return frozenset(number for number, index in enumerate(self.order) if index in state)

    def outer(self, state: State) -> State:
        """Return a state of this problem in the outer one's indices."""
        return frozenset(self.order[number] for number in state)


@lru_cache(maxsize=4096)
def _subproblem(problem: RecomputeProblem, start: int, stop: int) -> _Subproblem:
    """Return the nodes from `start` to `stop` with positions from 0.

    Tensors that enter are produced at −1, those that leave are used at its end. Alike blocks give
    equal problems, which is what makes their menus shared.
    """
    order = [i for i, tensor in enumerate(problem.tensors) if _touches(tensor, start, stop)]
    own = slice(start, stop)
    inner = RecomputeProblem(
        forward_ns=problem.forward_ns[own],
        saves_at=problem.saves_at[own],
        forward_peak=problem.forward_peak[own],
        gradients_before=problem.gradients_before[own],
        backward_peak=problem.backward_peak[own],
        gradients_after=problem.gradients_after[own],
        tensors=tuple(_clipped(problem.tensors[index], start, stop) for index in order),
        buffer_copies=problem.buffer_copies[own],
        boundaries=tuple(p - start for p in problem.boundaries if start <= p <= stop),
        excluded=frozenset(p - start for p in problem.excluded if start <= p < stop),
        sent_copies=problem.sent_copies if stop == len(problem.forward_ns) else 0,
    )
    return _Subproblem(inner, tuple(order))


def _touches(tensor: StoredTensor, start: int, stop: int) -> bool:
    """Return whether a node from `start` to `stop` produces, uses, saves or copies the tensor."""
    if tensor.is_sent or start <= tensor.producer < stop:
        return start <= max(0, tensor.producer) < stop
    copied = () if tensor.copied_at is None else (tensor.copied_at,)
    users = (*tensor.uses, *tensor.savers, *copied)
    return tensor.producer < start and any(start <= position < stop for position in users)


def _clipped(tensor: StoredTensor, start: int, stop: int) -> StoredTensor:
    """Return the tensor as the nodes from `start` to `stop` see it."""
    # A tensor of node 2, used at 5 and 9, as nodes 4 … 7 see
    # it: of −1, used at 1 and, across the end, at 4.
    uses = [position - start for position in tensor.uses if start <= position < stop]
    # A use at the very end stands for all uses behind it: the tensor lives across the end.
    if tensor.last_use >= stop:
        uses.append(stop - start)
    return StoredTensor(
        tensor.bytes,
        max(-1, tensor.producer - start),
        tuple(uses),
        tuple(position - start for position in tensor.savers if start <= position < stop),
        tensor.is_sent,
        None if tensor.copied_at is None else min(tensor.copied_at, stop) - start,
    )


def _live(problem: RecomputeProblem, position: int) -> State:
    """Return the tensors that are produced before `position`, used there or later, and not sent."""
    return frozenset(
        index
        for index, tensor in enumerate(problem.tensors)
        if not tensor.is_sent and tensor.producer < position <= tensor.last_use
    )


def _bytes_beside(
    problem: RecomputeProblem, left: _Subproblem, right: _Subproblem, kept: State, at_cut: State
) -> tuple[int, int]:
    """Return the bytes that live beside the left and beside the right part, unknown to each.

    Both sides hold what the other one sends. Beside the left lives also what passes through it
    without being kept; beside the right, what passes from the left to the end without being kept.
    """
    cut, length = len(left.problem.forward_ns), len(problem.forward_ns)
    through_left = _live(problem, 0) - left.tensors - kept
    through_right = (_live(problem, cut) & _live(problem, length)) - right.tensors - at_cut

    def size(state: State) -> int:
        return sum(problem.tensors[index].bytes for index in state)

    return (
        right.problem.sent_bytes + size(through_left),
        left.problem.sent_bytes + size(through_right),
    )


def _joined(
    left: ParetoFront, right: ParetoFront, pair: int, beside: tuple[int, int]
) -> ParetoFront:
    """Return every choice of `left` with every choice of `right`."""
    grid = np.meshgrid(np.arange(len(left)), np.arange(len(right)), indexing="ij")
    first, second = (axis.ravel() for axis in grid)
    # While the right part runs, the microbatch holds what the left one keeps.
    # Left 2 kept and 9 at its peak, right 3 and 7, 1 and 4 beside them:
    # together 5 are kept, and the peak is max(9 + 1, 2 + 7 + 4) = 13.
    peak_on_right = left.kept[first] + right.peak[second] + beside[1]
    return ParetoFront(
        left.kept[first] + right.kept[second],
        np.maximum(left.peak[first] + beside[0], peak_on_right),
        left.ns[first] + right.ns[second],
        pair * ROWS + first,
        second,
    )
