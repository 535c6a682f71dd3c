"""Where `explain` and joint searches have the costs of nodes from: a cost graph in a file. Needs no
PyTorch.

What the same is for a model lies in `api/model_costs.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pipecompile.errors import InputError, StalePlanError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options, Plan, Provenance
from pipecompile.partition.groups import grouped, nodes_within

__all__ = ["GraphCosts", "Source", "TargetCosts"]


class Source(NamedTuple):
    """What a plan says of the model that it was made for, as `draft` takes it."""

    graph_digest: str
    capture: Provenance
    microbatch_shapes: tuple[tuple[int, ...], ...]


class TargetCosts(Protocol):
    """The costs of one model, under options that differ from a plan's."""

    def check(self, plan: Plan) -> None:
        """Raise StalePlanError unless the plan was made for this model."""

    def graph(self, options: Options) -> CostGraph:
        """Return the cost graph of a microbatch, with the groups of `options`.

        InputError if these costs cannot be had for the options.
        """

    def source(self, options: Options) -> Source:
        """Return what that graph is of."""


@dataclass(frozen=True)
class GraphCosts:
    """The costs of a graph that was profiled, for microbatches of one size, as `name` has it."""

    plain: CostGraph
    microbatches: int
    name: str = "the cost graph"

    def check(self, plan: Plan) -> None:
        """Raise StalePlanError unless the plan was made for this graph."""
        here, there = self.plain.fingerprint, plan.fingerprint.graph
        # A graph without a fingerprint was written by hand: its nodes are compared.
        is_same = here == there if here else self.plain.by_name.keys() == plan.assignment.keys()
        if not is_same:
            raise StalePlanError(
                f"{self.name} is of another model, or of microbatches of another size, than the "
                f"plan ({here[:12]}… instead of {there[:12]}…); profile with --microbatches "
                f"{plan.microbatches}, or plan again"
            )

    def graph(self, options: Options) -> CostGraph:
        """Return the graph with the groups of `options`."""
        if options.microbatches != self.microbatches:
            raise InputError("a cost graph is of one size of microbatches; name the model instead")
        return grouped(self.plain, [nodes_within(self.plain, names) for names in options.groups])

    def source(self, options: Options) -> Source:
        """Return what a graph in a file tells: nothing of how it came about."""
        # Nobody has compared this graph with a model, as a capture does.
        return Source(self.plain.fingerprint, Provenance(verified=False), ())
