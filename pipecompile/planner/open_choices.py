"""What options leave open: the orders of a search and the policies of `auto`, as options that name
one of them. Needs no PyTorch.

A search promises a step no longer than that of any named order under the same options, and `auto`
one no longer than that of any policy. So a draft tries them all, except those that are ruled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import RECOMPUTES, Options, Plan
from pipecompile.planner.option_conflicts import check_together
from pipecompile.planner.step_bound import StepBounds
from pipecompile.schedule.named_orders import SPLIT, fitting_names
from pipecompile.schedule.selection import representative_schedule

__all__ = ["Drafter", "OpenChoices", "named_orders", "named_policies"]


IDLE_SHARE = 1 / 3  # of a step, from which on it may be worth its time to recompute


def named_orders(graph: CostGraph, options: Options, placement: Sequence[int]) -> list[Options]:
    """Return the options with each named order that trains on the placement; none unless they ask
    for a search.

    Where every order has the same cut, the search that finds it compares them already.
    """
    # Only caps, and steps that are simulated, make a cut depend on the order.
    is_same_cut = options.memory_bytes is None and options.objective != "step-time"
    if options.schedule != "search" or is_same_cut:
        return []
    names = fitting_names(placement, options.microbatches)
    known = (name for name in names if name not in SPLIT or _can_split(graph))
    return list(_possible(replace(options, schedule=name) for name in known))


def named_policies(options: Options) -> list[Options]:
    """Return the options with each policy in place of `auto`; none unless they ask for `auto`."""
    if options.recompute != "auto":
        return []
    policies = (policy for policy in RECOMPUTES if policy != "auto")
    return list(_possible(replace(options, recompute=policy) for policy in policies))


def _can_split(graph: CostGraph) -> bool:
    """Return whether it is known how long the halves of all backwards take."""
    return all(
        node.backward_input_ns is not None and node.backward_weight_ns is not None
        for node in graph.nodes
    )


def _possible(choices: Iterable[Options]) -> Iterator[Options]:
    """Yield the options that may be given together."""
    for options in choices:
        with suppress(InputError):
            check_together(options)
            yield options


class Drafter(Protocol):
    """What makes plans on one placement. Each method raises InfeasibleError where nothing fits."""

    @property
    def explains(self) -> bool:
        """Whether a refusal may say what would fit."""

    def planned(self, options: Options, *, explained: bool) -> Plan:
        """Return the plan of the best cut, with copies of cheap nodes or without; a refusal says
        what would fit if it is `explained`.
        """

    def explained(self, options: Options) -> Plan:
        """Return what a short search finds where longer ones found nothing; a refusal says what is
        in the way.
        """

    def with_stages(self, plan: Plan, options: Options) -> Plan:
        """Return the plan with what its stages recompute, and their order, chosen by `options`."""

    def with_order(self, plan: Plan, options: Options) -> Plan:
        """Return the plan with the order of its stages chosen by `options`."""

    def adopted(self, plan: Plan, options: Options, own: Plan | None) -> Plan:
        """Return the plan of any choice as the plan of `options`; `own` is that of their cut."""


@dataclass(frozen=True)
class OpenChoices:
    """The plans on one placement of all that the options leave open."""

    graph: CostGraph
    options: Options
    placement: tuple[int, ...]
    drafter: Drafter

    def shortest(self) -> Plan:
        """Return the plan with the shortest step; InfeasibleError says why there is none."""
        policies = named_policies(self.options)
        if not policies and not named_orders(self.graph, self.options, self.placement):
            return self.drafter.planned(self.options, explained=True)
        own, refusal = None, None
        try:
            own = self.drafter.planned(self.options, explained=False)
        except InfeasibleError as error:
            refusal = error
        # `auto` itself comes first, since its plan may rule policies out.
        plans = self._ordered(self.options, own).plans
        for options in policies:
            if not self._is_ruled_out(options, plans):
                plans += self._of_policy(options)
        if not plans:
            if refusal is not None and not self.drafter.explains:
                raise refusal
            # Only now the reason is worth its time.
            return self.drafter.explained(self.options)
        return self._with_hint(self.drafter.adopted(min(plans, key=_step_ns), self.options, own))

    def _with_hint(self, plan: Plan) -> Plan:
        """Return the plan; if memory may keep its ranks idle, with the step that recompute gives.

        Whole stages take the least memory, and `auto` is never longer than they are.
        """
        ordering = plan.ordering
        is_capped = self.options.memory_bytes is not None and self.options.recompute == "none"
        if ordering is None or not is_capped or plan.prediction.bubble < IDLE_SHARE:
            return plan
        name = representative_schedule(self.options, self.placement)
        if name in SPLIT and not _can_split(self.graph):
            return plan
        # A named order, not a search: the hint needs a step that can be had, not the shortest one.
        other = self._planned(replace(self.options, schedule=name, recompute="stage"))
        if other is None or _step_ns(other) >= _step_ns(plan):
            return plan
        return replace(plan, ordering=replace(ordering, recomputed_ns=_step_ns(other)))

    def _of_policy(self, options: Options) -> Iterator[Plan]:
        """Yield the plans of a policy, and those with their cuts in which each stage may differ.

        A search promises no longer step than a named order with `auto`, which goes on from its own
        cut under the policy: so these cuts count under their own orders too.
        """
        ordered = self._ordered(options, self._planned(options))
        for plan in ordered.plans:
            yield plan
            with suppress(InfeasibleError):
                yield self.drafter.with_stages(plan, self.options)
        own_orders = list(self._with_own_orders(ordered.named))
        if own_orders:
            yield self.drafter.with_order(min(own_orders, key=_step_ns), self.options)

    def _with_own_orders(self, named: Iterable[Plan]) -> Iterator[Plan]:
        """Yield the plans of named orders, with what stages recompute chosen under their order."""
        for plan in named:
            options = replace(self.options, schedule=plan.options.schedule)
            with suppress(InfeasibleError):
                yield self.drafter.with_stages(plan, options)

    def _ordered(self, options: Options, own: Plan | None) -> _Ordered:
        """Return the plans among which the shortest one is, of the best cut and of a search, and
        those of the named orders.

        A search goes on from the best cut of the named orders, if that is another one.
        """
        plans = [] if own is None else [own]
        for choice in named_orders(self.graph, options, self.placement):
            # By what `auto` may make of its cut, where that is what is looked for.
            least = replace(choice, recompute=self.options.recompute)
            if not self._is_ruled_out(least, plans):
                plan = self._planned(choice)
                plans += [] if plan is None else [plan]
        named = [plan for plan in plans if plan is not own]
        found = [] if own is None else [own]
        if named:
            # The search gets the cut, and not only the order, of the best named one:
            # a cut that was judged by one order may be a bad one for the others.
            start = min(named, key=_step_ns)
            if own is None or own.stages != start.stages:
                found.append(self.drafter.with_order(start, options))
        return _Ordered(found, named)

    def _planned(self, options: Options) -> Plan | None:
        with suppress(InfeasibleError):
            return self.drafter.planned(options, explained=False)
        return None

    def _is_ruled_out(self, options: Options, plans: Iterable[Plan]) -> bool:
        """Return whether no step under the options is shorter than that of the best plan."""
        shortest = min(map(_step_ns, plans), default=None)
        return shortest is not None and self._bounds.rule_out(options, shortest)

    @cached_property
    def _bounds(self) -> StepBounds:
        return StepBounds(self.graph, self.placement)


class _Ordered(NamedTuple):
    """The plans of one policy: those that may be the shortest, and those of named orders."""

    plans: list[Plan]
    named: list[Plan]


def _step_ns(plan: Plan) -> int:
    return plan.prediction.step_ns
