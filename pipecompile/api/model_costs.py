"""The costs of a model under other options than a plan's: what `explain` solves again with."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from pipecompile.api.costs import (
    cost_graph,
    interpolated_graph,
    measured_on,
    of_ranks,
    regrouped,
)
from pipecompile.api.options import completed
from pipecompile.api.staleness import check_current
from pipecompile.api.target import load_target, planned_target
from pipecompile.cost_models.measured_sizes import nearest_sizes
from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options, Plan
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.planner.target_costs import Source

__all__ = ["ModelCosts"]

logger = logging.getLogger("pipecompile.api")


@dataclass(frozen=True)
class ModelCosts:
    """The costs of a target, captured as `method` does, for each number of microbatches once,
    and of each kind of device. A capture whose batch size is open serves for several numbers.

    Without a method it is captured by the first one that works. What a plan was verified for is not
    proven again: `check` compares the graphs.

    With `sizes` measured costs are measured only for microbatches of so many samples, two sizes at
    least, and interpolated for others: a search over the number of microbatches measures three
    sizes and not all. Bytes are never interpolated: each size is captured.
    """

    target: Target
    method: str | None = None
    sizes: tuple[int, ...] = ()
    captures: dict[int, Captured] = field(default_factory=dict)
    graphs: dict[tuple[str, int], CostGraph] = field(default_factory=dict)

    def __post_init__(self) -> None:
        uneven = [size for size in self.sizes if size < 1 or self.target.samples % size]
        if uneven or len(self.sizes) == 1:
            raise InputError(
                f"costs of microbatches of {', '.join(map(str, self.sizes))} samples were asked "
                f"for; name two sizes or more that divide the batch of {self.target.samples}"
            )

    @staticmethod
    def of(text: str, plan: Plan) -> ModelCosts:
        """Call the factory that `text` names, for the model of `plan`."""
        if plan.options.costs == "function":
            raise InputError(
                "the plan was made with a cost function, which only its program has; profile the "
                "model with it, and name that cost graph instead of the model"
            )
        return ModelCosts(planned_target(load_target(text), plan), plan.capture.method)

    def check(self, plan: Plan) -> None:
        """Raise StalePlanError unless the plan was made for this model."""
        check_current(plan, self.captured(plan.options))

    def graph(self, options: Options) -> CostGraph:
        """Return the cost graph of a microbatch, with the groups of `options`."""
        captured = self.captured(options)
        # Two tables, by what each thing depends on:
        #     captures    the number of microbatches               (shapes)
        #     graphs      that, and the kind of device             (times of these shapes)
        # Groups are in neither key: they are set anew each time, on what both tables give.
        graph = of_ranks(options.costs, partial(self._of_kind, options, captured))
        # Groups change no cost: the nodes are neither observed nor measured again.
        apply_passes(captured.module.graph, [Group(options.groups)])
        return regrouped(graph, captured.module)

    def _of_kind(self, options: Options, captured: Captured, kind: str) -> CostGraph:
        """Return the cost graph of ranks with costs of one kind."""
        number = options.microbatches
        if (kind, number) not in self.graphs:
            between = self._interpolated(options, captured)
            self.graphs[kind, number] = between or cost_graph(self.target, kind, number, captured)
        return self.graphs[kind, number]

    def _interpolated(self, options: Options, captured: Captured) -> CostGraph | None:
        """Return the cost graph between two measured ones; None if this size is to be measured."""
        samples = self.target.samples
        size = samples // options.microbatches
        is_measured = measured_on(options.costs, self.target) is not None
        if not is_measured or not self.sizes or size in self.sizes:
            return None
        known = {
            each: self.graph(replace(options, microbatches=samples // each))
            # This calls itself for a size that is in `sizes`, which is measured: no deeper than
            # once.
            for each in nearest_sizes(self.sizes, size)
        }
        graph = interpolated_graph(self.target, options.microbatches, captured, known)
        if graph is None:
            logger.info(
                "a microbatch of %d samples has other nodes than those of %s: it is measured",
                *(size, " and ".join(map(str, known))),
            )
        return graph

    def source(self, options: Options) -> Source:
        """Return what the captured graph is of."""
        captured = self.captured(options)
        tensors = captured.capture.inputs.flatten(captured.sample)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        return Source(captured.digest, captured.provenance, shapes)

    def captured(self, options: Options) -> Captured:
        """Return the model captured at the size of a microbatch of `options`."""
        number = options.microbatches
        if number not in self.captures:
            # For its error, if the minibatch has no so many equal parts.
            checked = completed(self.target, options)
            self.captures[number] = capture_target(
                self.target,
                checked,
                verify=False,
                method=self.method,
                # An earlier capture whose batch size is open holds for this number too, without a
                # new one.
                known=[captured.capture for captured in self.captures.values()],
            )
        return self.captures[number]
