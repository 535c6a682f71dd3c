"""`pipecompile profile`: a target's cost graph, and where its time and memory go."""

from __future__ import annotations

from pipecompile.api.costs import cost_graph, kinds_of
from pipecompile.api.options import completed
from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options
from pipecompile.report.profile import Profile, profile_of

__all__ = ["costs_of", "profiled"]


def profiled(
    target: Target, requested: Options, *, self_check: bool = True
) -> tuple[CostGraph, Profile]:
    """Return the cost graph of one microbatch, and its summary. Measured costs are not taken from
    the cache.

    Of the options only costs, microbatches, optimizer and leaf matter.
    """
    options = completed(target, requested)
    if len(kinds_of(options.costs)) > 1:
        raise InputError(
            f"costs={options.costs!r} lists several devices, but a profile is of one; name it alone"
        )
    captured = capture_target(target, options, verify=self_check)
    # Fresh: who profiles wants to see what is so now, perhaps because the cache is doubted.
    graph = cost_graph(target, options.costs, options.microbatches, captured, fresh=True)
    profile = profile_of(
        graph, options.costs, verified=captured.verified, optimizer=options.optimizer
    )
    return graph, profile


def costs_of(
    target: Target, requested: Options, *, self_check: bool = True
) -> tuple[CostGraph, Options]:
    """Return the cost graph of one microbatch, and the options with what the target says."""
    options = completed(target, requested)
    captured = capture_target(target, options, verify=self_check)
    return cost_graph(target, options.costs, options.microbatches, captured), options
