"""The best plan of a model for given devices: captures, costs and searches."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pipecompile.api.joint_request import JointRequest
from pipecompile.api.model_costs import ModelCosts
from pipecompile.api.options import completed
from pipecompile.api.plan import with_digests
from pipecompile.api.target import planned_target
from pipecompile.cost_models.measured_sizes import sizes_to_measure
from pipecompile.errors import CaptureError
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.plan import Plan
from pipecompile.planner.joint_search import joint_plan

__all__ = ["joint_plan_of"]


def joint_plan_of(target: Target, request: JointRequest, *, self_check: bool = True) -> Plan:
    """Return the plan with the shortest step that is found for the minibatch of `target` on the
    devices of a request.

    The graph is proven with `self_check`, at the size of the microbatches that were chosen.
    InfeasibleError if nothing fits, with what was in the way.
    """
    request = replace(request, base=completed(target, request.base))
    space = request.space(target.samples)
    sizes = sizes_to_measure({target.samples // each.parts for each in space.settings()})
    # Between two sizes one can interpolate; a single one is simply measured.
    sizes = sizes if len(sizes) > 1 else ()
    # The search captures without a proof, since each of its sizes would take one. So the winner is
    # proven, and if the proof takes another way to capture it, all is searched again in that way:
    #     [None]         plan in the first way that works; the proof takes way B
    #     [None, "B"]    plan in way B; the proof takes it too: done
    # Each round adds a new method, of which there are a few, so the loop ends.
    methods: list[str | None] = [None]
    while True:
        costs = ModelCosts(target, methods[-1], sizes)
        plan = joint_plan(space, costs, request.links, request.cluster.text, request.limits)
        part = planned_target(target, plan)
        captured = searched = costs.captured(
            # The search counts the microbatches of all replicas, the plan those of one.
            msgspec.structs.replace(plan.options, microbatches=plan.replicas * plan.microbatches)
        )
        if self_check and target.has_values:
            captured = capture_target(part, plan.options, verify=True)
        method = captured.capture.method
        # If the way to capture it that was tried first is not the model, another graph is planned.
        if captured.digest == searched.digest or method == methods[-1]:
            proven = msgspec.structs.replace(plan, capture=captured.provenance)
            return with_digests(proven, captured)
        if method in methods:
            raise CaptureError(
                f"microbatches of {part.samples // plan.microbatches} samples are captured in "
                f"another way ({method}) than the sizes that were planned by it; give microbatches"
            )
        methods.append(method)
