"""The plan of a request: what a user left open is chosen by a small joint search over one replica.

The step is never longer than that of the plain defaults: they are planned as well, or their lower
bound is above the step. Where costs are measured, whole stages are measured afterwards, those of
the plain defaults too, and the shorter step is taken.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from pipecompile.api.costs import measured_on
from pipecompile.api.model_costs import ModelCosts
from pipecompile.api.options import completed
from pipecompile.api.plan import finished, make_plan
from pipecompile.api.plan_request import PlanRequest
from pipecompile.cost_models.measured_sizes import sizes_to_measure
from pipecompile.errors import CaptureError, InfeasibleError, InputError
from pipecompile.frontend.capture import normalises_batches
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.setting import Setting
from pipecompile.partition.budget import QUICK
from pipecompile.planner.draft import check_stages, draft
from pipecompile.planner.joint_search import JointLimits, joint_plan
from pipecompile.planner.setting_space import SettingSpace
from pipecompile.planner.target_costs import Source

__all__ = ["chosen_plan", "plan_of", "plan_with_choice", "target_options"]

logger = logging.getLogger("pipecompile.api")

EXPLAINED = QUICK._replace(is_explained=True)  # where longer searches were in vain, or not worth it


def plan_of(target: Target, request: PlanRequest, links: Links, *, self_check: bool = True) -> Plan:
    """Return the plan for a target, which is captured, and proven with `self_check`."""
    chosen = chosen_plan(target, request, links)
    options = target_options(target, request) if chosen is None else chosen.options
    captured = capture_target(target, options, verify=self_check)
    return plan_with_choice(target, request, captured, links, chosen)


def target_options(target: Target, request: PlanRequest) -> Options:
    """Return the options for a target, with the plain defaults of what is open."""
    return completed(target, request.for_batch(target.samples).options)


def chosen_plan(target: Target, request: PlanRequest, links: Links) -> Plan | None:
    """Return the plan with the shortest step of what is open; None if nothing is to be chosen.

    The captured graph is not proven yet, and whole stages are not measured. InfeasibleError says
    what is in the way under the setting that needs the least memory.
    """
    options = target_options(target, request)
    request = PlanRequest(options, request.left_open)
    if not request.has_choice:
        return None
    # Smaller microbatches would be normalised by themselves: that is another model.
    is_same_model = options.batch_norm == "minibatch" or not normalises_batches(target.model)
    # Measured times of small kernels say too little of whole stages to compare sizes by them.
    is_measured = measured_on(options.costs, target) is not None
    may_change_sizes = is_same_model and not is_measured
    space = request.space(target.samples, may_change_sizes=may_change_sizes)
    try:
        settings = space.settings()
        if settings == (request.setting,):
            return None
        return _best_plan(target, request, space, links)
    except (CaptureError, InputError) as error:
        # Perhaps the model does not run on so small a microbatch. If nothing else is possible
        # either, the plain defaults say what is in the way.
        logger.debug("the plain defaults are planned, since of other settings %s", error)
        return None


def _best_plan(target: Target, request: PlanRequest, space: SettingSpace, links: Links) -> Plan:
    """Return the best plan of a space of settings; InfeasibleError as `chosen_plan` has it."""
    settings = space.settings()
    sizes = sizes_to_measure({target.samples // each.microbatches for each in settings})
    whole = ModelCosts(target, sizes=sizes if len(sizes) > 1 else ())
    costs = _ReplicaCosts(whole, request.options.replicas)
    try:
        plan = joint_plan(space, costs, links, "", JointLimits(reference=request.setting))
        # As the user gave it: the schedule implies the number.
        options = replace(plan.options, stages_per_rank=request.options.stages_per_rank)
        return replace(plan, options=options)
    except InfeasibleError as error:
        return _explained_plan(space, costs, links, settings, error)


def _explained_plan(
    space: SettingSpace,
    costs: _ReplicaCosts,
    links: Links,
    settings: tuple[Setting, ...],
    error: InfeasibleError,
) -> Plan:
    """Return the plan of the smallest microbatches; InfeasibleError says what is in its way, what
    would fit and what memory would do, or that k is too large under any setting.
    """
    # More microbatches are smaller ones, and recompute holds less again: what this cannot fit, no
    # other of the settings is likely to.
    setting = max(settings, key=lambda each: (each.microbatches, each.recompute == "auto"))
    options = space.options(setting)
    sized = replace(options, microbatches=setting.parts)
    check_stages(costs.graph(sized), options, links)
    make = partial(draft, costs.graph(sized), options, **costs.source(sized)._asdict(), links=links)
    try:
        make(effort=EXPLAINED)
        return make()
    except InfeasibleError as reason:
        # Without a cap no setting matters: what is in the way, such as pins, is so under all.
        if options.memory_bytes is None:
            raise
        others = f"none of {len(settings)} settings fits, this is of {setting}"
        raise InfeasibleError(f"{reason} ({others})", error.advice) from error


def plan_with_choice(
    target: Target, request: PlanRequest, captured: Captured, links: Links, chosen: Plan | None
) -> Plan:
    """Return the plan for a captured target: the chosen one, if it is for this graph and its costs
    are final.

    Where whole stages are measured, all ranks measure them: the others call `assist` meanwhile.
    Then the plain defaults are planned if their stages make a shorter step.
    """
    plain = target_options(target, request)
    is_measured = measured_on(plain.costs, target) is not None
    if chosen is None:
        return make_plan(target, plain, captured, links)
    if not is_measured and captured.digest == chosen.fingerprint.graph:
        return finished(replace(chosen, capture=captured.provenance), captured)
    # The choice was made on an unproven capture. If the proof led to another graph, only its
    # options are kept, and the plan is made for the graph that will run.
    plan = make_plan(target, chosen.options, captured, links, reference=plain)
    is_chosen = is_measured and plan.options == chosen.options
    return replace(plan, joint=chosen.joint) if is_chosen else plan


@dataclass(frozen=True)
class _ReplicaCosts:
    """The costs of one replica's share, for a search that counts the parts of all replicas."""

    costs: ModelCosts
    replicas: int

    def check(self, plan: Plan) -> None:
        """Raise StalePlanError unless the plan was made for this model."""
        self.costs.check(plan)

    def graph(self, options: Options) -> CostGraph:
        """Return the cost graph of a microbatch."""
        return self.costs.graph(self._of_one(options))

    def source(self, options: Options) -> Source:
        """Return what that graph is of."""
        return self.costs.source(self._of_one(options))

    def _of_one(self, options: Options) -> Options:
        return replace(options, microbatches=options.microbatches // self.replicas)
