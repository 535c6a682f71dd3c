"""Which options need not be tried: no cut and no order under them has a shorter step than one that
is known. Needs no PyTorch.

The bound needs the times of the nodes alone, so it costs nothing beside a cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.plan import Options
from pipecompile.schedule.named_orders import MAY_SPLIT

if TYPE_CHECKING:  # it needs numpy, which reading and checking a plan does not
    from pipecompile.planner.least_recompute import Reachability

__all__ = ["REGIONS", "StepBounds", "recomputed_share"]

REGIONS = ("block", "sqrt")
"""Policies that recompute as part of each backward."""


class _NodeTimes(NamedTuple):
    """The times of a node in ns: its forward, and its backward whole or in halves, whichever is
    shorter.
    """

    forward_ns: int
    backward_ns: int

    @property
    def load_ns(self) -> int:
        return self.forward_ns + self.backward_ns


@dataclass(frozen=True)
class StepBounds:
    """What steps of a graph take at least on one placement of its stages.

    Transfers are free here, and memory is not looked at. With p ranks, M microbatches and the load
    L of a rank (forward and backward of one microbatch, F and B), a rank computes M·L, so that
    p·S ≥ M·ΣL for each step S. What a policy recomputes adds to it, except in the last stage. There
    lies no node behind which more lies than a rank computes in the step.

    Under `1f1b` and `gpipe` each rank waits as well, for its first backward, which comes through
    all later ranks, and after its last one for those of the ranks before it. While it waits for the
    first, `1f1b` has it do w forwards at most, of the microbatches that it has in flight. `gpipe`
    does all before it waits. With T = ΣL, and R for what a rank recomputes of a microbatch:

        1f1b     S ≥ T + (M − 1)·L + M·R − (w − 1)·F − w·R
        gpipe    S ≥ T + (M − 1)·L

    On the last rank w is 1 and R is 0. The sum of these over the ranks bounds p·S. Regions are
    recomputed in backwards: with them R is a part of L and of T, and no other R is left.
    """

    graph: CostGraph
    placement: Sequence[int]

    def rule_out(self, options: Options, step_ns: int) -> bool:
        """Return whether no step under the options is shorter than `step_ns`."""
        # Times are whole, so a shorter step takes at most this. All below asks whether one could.
        shortest = step_ns - 1
        may_split = options.schedule in MAY_SPLIT
        times = [_times(node, may_split) for node in self.graph.nodes]
        ranks, microbatches = max(self.placement) + 1, options.microbatches
        # No rank computes more of a microbatch than this, so none has a longer forward.
        most_load = Fraction(shortest, microbatches)
        recomputed = self._least_recomputed(options, times, most_load)
        total = Fraction(sum(t.load_ns for t in times))
        if microbatches * (total + recomputed) > ranks * shortest:
            return True
        if options.schedule not in ("1f1b", "gpipe") or ranks < len(self.placement):
            return False
        share = recomputed_share(options)
        if options.recompute in REGIONS:
            total, recomputed = total + recomputed, Fraction(0)
        # The inequalities of the docstring, summed over the ranks: ranks × (S − T) ≥ waits.
        # Where a step shorter than the known one leaves less than that, there is none.
        waits = Fraction((microbatches - 1) * total)
        if options.schedule == "1f1b":
            in_flight = [min(ranks - rank, microbatches) for rank in range(ranks)]
            spared = [(1 + share) * count - 1 for count in in_flight[:-1]]
            waits += microbatches * recomputed - _most_spared(spared, times, most_load)
        return ranks * (shortest - total) < waits

    def _least_recomputed(
        self, options: Options, times: Sequence[_NodeTimes], most_load: Fraction
    ) -> Fraction:
        """Return what all ranks recompute at least of a microbatch, on average over a step, if the
        last stage computes no more than `most_load` of it.
        """
        if options.recompute == "none":
            return Fraction(0)
        # The last stage recomputes nothing, so the most that may lie in it is taken off: of
        # nodes behind which no more lies than a rank computes, since all that comes with them.
        values, spared = [Fraction(t.forward_ns) for t in times], 0
        if options.recompute in REGIONS:
            guarded = self._reachability.guarded
            values = [Fraction(ns) for ns in guarded.ns]
            spared = guarded.spared_ns * (len(self.placement) - 1)
        else:
            values = [recomputed_share(options) * value for value in values]
        behind = self._loads_behind[options.schedule in MAY_SPLIT]
        in_last = (
            (value, times[place].load_ns)
            for place, value in enumerate(values)
            if behind[place] <= most_load
        )
        return max(Fraction(0), sum(values, Fraction(0)) - _most(in_last, most_load) - spared)

    @cached_property
    def _reachability(self) -> Reachability:
        from pipecompile.planner.least_recompute import Reachability

        return Reachability(self.graph)

    @cached_property
    def _loads_behind(self) -> dict[bool, list[int]]:
        """The load of each node and of all that lie behind it, by whether backwards may be split.

        A copied node is in several stages, and counts in none.
        """
        nodes, copied = self.graph.nodes, self.graph.copied_set

        def sums(may_split: bool) -> list[int]:
            loads = [_times(node, may_split).load_ns * (node.name not in copied) for node in nodes]
            return self._reachability.sums_behind(loads)

        return {may_split: sums(may_split) for may_split in (False, True)}


def _times(node: Node, may_split: bool) -> _NodeTimes:
    first_ns, second_ns, backward_ns = (
        node.backward_input_ns,
        node.backward_weight_ns,
        node.backward_ns,
    )
    if may_split and first_ns is not None and second_ns is not None:
        backward_ns = min(backward_ns, first_ns + second_ns)
    return _NodeTimes(node.forward_ns, backward_ns)


def recomputed_share(options: Options) -> Fraction:
    """Return the least share of the microbatches that each stage but the last one recomputes.

    If three of four microbatches recompute, a stage pays 3 / 4 of its forward on average.
    """
    if options.recompute == "stage":
        return Fraction(1)
    if options.recompute == "except-last":
        return Fraction(options.microbatches - 1, options.microbatches)
    return Fraction(0)


def _most_spared(
    factors: Iterable[Fraction], times: Sequence[_NodeTimes], most_load: Fraction
) -> Fraction:
    """Return the most that Σ factor · F is over the ranks, one factor for each.

    Their forwards add up to all of it, and each is at most the longest within `most_load`.
    """
    # Forwards of 12 in all, no rank's above 8, and factors 3 and 1: at most 3 × 8 + 1 × 4 = 28.
    longest = _most(((Fraction(t.forward_ns), t.load_ns) for t in times), most_load)
    left, spared = Fraction(sum(t.forward_ns for t in times)), Fraction(0)
    for factor in sorted(factors, reverse=True):
        forward = min(left, longest)
        spared += factor * forward
        left -= forward
    return spared


def _most(values: Iterable[tuple[Fraction, int]], most_load: Fraction) -> Fraction:
    """Return the largest sum of values, each with its load, whose loads add up to at most
    `most_load`; parts of them too.
    """
    left, most = most_load, Fraction(0)
    # What takes no time has no value either.
    # The fractional knapsack: values 6, 4 and 1 with loads 3, 4 and 2 within a load
    # of 5 give 6 and half of 4. No choice of whole ones is worth more than these 8.
    by_share = sorted((value / load, load) for value, load in values if load)
    for share, load in reversed(by_share):
        taken = min(left, Fraction(load))
        most += share * taken
        left -= taken
        if not left:
            break
    return most
