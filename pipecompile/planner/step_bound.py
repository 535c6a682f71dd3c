"""Which options need not be tried: no cut and no order under them has a shorter step than one that
is known. Needs no PyTorch.

The bound needs the times of the nodes alone, so it costs nothing beside a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.plan import Options
from pipecompile.schedule.named_orders import MAY_SPLIT

__all__ = ["is_no_shorter", "recomputed_share"]


class _NodeTimes(NamedTuple):
    """The times of a node in ns: its forward, and its backward whole or in halves, whichever is
    shorter.
    """

    forward_ns: int
    backward_ns: int

    @property
    def load_ns(self) -> int:
        return self.forward_ns + self.backward_ns


def is_no_shorter(
    graph: CostGraph, options: Options, placement: Sequence[int], step_ns: int
) -> bool:
    """Return whether the bounds say that no step under the options is shorter than `step_ns`.

    Transfers are free here, and memory is not looked at. With p ranks, M microbatches and the load
    L of a rank (forward and backward of one microbatch, F and B), a rank computes M·L, so that
    p·S ≥ M·ΣL for each step S. What a policy recomputes adds to it, except in the last stage.

    Under `1f1b` and `gpipe` each rank waits as well, for its first backward, which comes through
    all later ranks, and after its last one for those of the ranks before it. While it waits for the
    first, `1f1b` has it do w forwards at most, of the microbatches that it has in flight. `gpipe`
    does all before it waits. With T = ΣL, and R for what a rank recomputes of a microbatch:

        1f1b     S ≥ T + (M − 1)·L + M·R − (w − 1)·F − w·R
        gpipe    S ≥ T + (M − 1)·L

    The sum of these over the ranks bounds p·S.
    """
    shortest = step_ns - 1
    times = [_times(node, options.schedule in MAY_SPLIT) for node in graph.nodes]
    ranks, microbatches = max(placement) + 1, options.microbatches
    total, forward = sum(t.load_ns for t in times), sum(t.forward_ns for t in times)
    share = recomputed_share(options)
    # No rank computes more than the step, so none has a longer forward than this.
    most_forward = _most_forward(times, Fraction(shortest, microbatches))
    recomputed = share * max(Fraction(0), forward - most_forward)
    if microbatches * (total + recomputed) > ranks * shortest:
        return True
    if options.schedule not in ("1f1b", "gpipe") or ranks < len(placement):
        return False
    waits = Fraction((microbatches - 1) * total)
    if options.schedule == "1f1b":
        in_flight = [min(ranks - rank, microbatches) for rank in range(ranks)]
        spared = sum((1 + share) * count - 1 for count in in_flight)
        waits += microbatches * recomputed - spared * most_forward
    return ranks * (shortest - total) < waits


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
    """Return of which share of the microbatches at least all but the last stage are recomputed.

    If three of four microbatches recompute, a stage pays 3 / 4 of its forward on average.
    """
    if options.recompute == "stage":
        return Fraction(1)
    if options.recompute == "except-last":
        return Fraction(options.microbatches - 1, options.microbatches)
    return Fraction(0)


def _most_forward(times: Sequence[_NodeTimes], load_ns: Fraction) -> Fraction:
    """Return the longest forward of nodes whose load is at most `load_ns`, parts of nodes too."""
    left, most = load_ns, Fraction(0)
    by_share = (t for t in times if t.load_ns)
    for each in sorted(by_share, key=lambda t: Fraction(t.forward_ns, t.load_ns), reverse=True):
        taken = min(Fraction(1), left / each.load_ns)
        most += taken * each.forward_ns
        left -= taken * each.load_ns
        if not left:
            break
    return most
