"""`pipecompile profile`: a target's cost graph, and where its time and memory go."""

from __future__ import annotations

from collections.abc import Iterable

from pipecompile.api.capture import capture_target
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.target import Target
from pipecompile.ir.graph import CostGraph
from pipecompile.report.profile import Profile, profile_of

__all__ = ["profiled"]


def profiled(
    target: Target,
    *,
    costs: str,
    microbatches: int | None = None,
    optimizer: str | None = None,
    leaf: Iterable[str] = (),
    self_check: bool = True,
) -> tuple[CostGraph, Profile]:
    """The cost graph of one of `microbatches` (default one), measured anew where it is measured, and its summary."""
    options = options_for(
        target, k=1, microbatches=microbatches, costs=costs, optimizer=optimizer, leaf=leaf
    )
    captured = capture_target(target, options, verify=self_check)
    graph = cost_graph(target, costs, options.microbatches, captured, fresh=True)
    return graph, profile_of(graph, costs, verified=captured.verified, optimizer=options.optimizer)
