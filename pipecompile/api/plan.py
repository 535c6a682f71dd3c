"""From a captured target to its plan: costs, cut and schedule, and whole stages measured where
costs are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
from torch import fx

from pipecompile.api.costs import cost_graph, measured_on
from pipecompile.cost_models.device import devices_of, load_device
from pipecompile.errors import InfeasibleError
from pipecompile.frontend.digest import node_digests
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured
from pipecompile.graph.autograd_context import shared_cast_readers
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import FREE, Links
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.size import option_text, size_text
from pipecompile.ir.stage import Stage
from pipecompile.planner.draft import draft
from pipecompile.profiling.stage_correction import Draft, correct_stages
from pipecompile.training.stage_timer import StageTimer

__all__ = ["assist", "finished", "make_plan", "with_digests", "with_target"]

logger = logging.getLogger("pipecompile.api")


def make_plan(
    target: Target,
    options: Options,
    captured: Captured,
    links: Links = FREE,
    *,
    assignment: Mapping[str, int] | None = None,
    reference: Options | None = None,
) -> Plan:
    """Return the plan for a captured target; InfeasibleError says which constraint cannot be met.

    `assignment` is a feasible cut (node to stage) that is to be kept. Where costs are measured,
    whole stages are measured too, by all ranks: the others call `assist` meanwhile. Then stages
    under `reference` are measured as well, and of the two plans that with the shorter step is
    returned.
    """
    # Here and in `assist`: rank 0 and the others must measure the same stages, with or without a
    # loss.
    target = _counted_target(target, options)
    tensors = captured.capture.inputs.flatten(captured.sample)
    plan_for = partial(
        draft,
        graph_digest=captured.digest,
        capture=captured.provenance,
        microbatch_shapes=[tuple(tensor.shape) for tensor in tensors],
        links=links,
        assignment=assignment,
    )
    # From here on the other ranks wait in `assist`: whatever happens, they must be dismissed.
    timer = _stage_timer(target, options, captured)
    try:
        graph = cost_graph(target, options.costs, options.microbatches, captured)
        # Measured whole stages are not the sum of measured nodes, so the times of nodes are
        # corrected by them, and the cut is made again: a few rounds of plan, measure, correct.
        plan = _planned(partial(plan_for, options=options), graph, timer)
        if timer is not None and reference not in (None, options):
            plan = _no_longer(plan, partial(plan_for, options=reference), graph, timer)
    except InfeasibleError as error:
        raise InfeasibleError(f"{error}{_explain_casts(captured.module.graph)}") from None
    finally:
        if timer is not None:
            timer.dismiss()
    return finished(plan, captured)


def _planned(plan_for: Draft, graph: CostGraph, timer: StageTimer | None) -> Plan:
    return plan_for(graph) if timer is None else correct_stages(graph, plan_for, timer)


def _no_longer(plan: Plan, plan_for_reference: Draft, graph: CostGraph, timer: StageTimer) -> Plan:
    """Return the plan, or that of the reference if it fits and its step is shorter."""
    with suppress(InfeasibleError):
        reference = _planned(plan_for_reference, graph, timer)
        if reference.prediction.step_ns < plan.prediction.step_ns:
            logger.info(
                "by whole stages %s takes longer than %s, which is planned",
                plan.schedule.name,
                reference.schedule.name,
            )
            return reference
    return plan


def finished(plan: Plan, captured: Captured) -> Plan:
    """Return a plan of a captured target with the digests of its nodes; a warning says if ranks may
    not fit the named device.
    """
    _warn_if_too_large(plan)
    return with_digests(plan, captured)


def with_target(plan: Plan, text: str) -> Plan:
    """Return the plan under the target that was written on the command line."""
    # A plan is the same on every machine: of /home/ann/nets.py:unet it has nets.py:unet.
    name = Path(text).name if Path(text).is_absolute() else text
    capture = msgspec.structs.replace(plan.capture, target=name)
    return msgspec.structs.replace(plan, capture=capture)


def with_digests(plan: Plan, captured: Captured) -> Plan:
    """Return the plan with the digest of each node, by which a later check finds what changed."""
    digests = node_digests(captured.module)
    return msgspec.structs.replace(
        plan, stages=tuple(_stage_with_digests(each, digests) for each in plan.stages)
    )


def _stage_with_digests(stage: Stage, digests: Mapping[str, str]) -> Stage:
    # A stage lists its nodes once, and the modules that they are of as runs of so many nodes:
    #     own_nodes    a b c d e        module_runs    (embed, 2) (block.0, 3)
    #     digests                                      [a, b]     [c, d, e]
    # One iterator walks through both lists: each run takes its share from where the last one ended.
    names = iter(stage.own_nodes)
    runs = (
        msgspec.structs.replace(
            run, digests=tuple(digests[name] for name in islice(names, run.nodes))
        )
        for run in stage.module_runs
    )
    return msgspec.structs.replace(stage, module_runs=tuple(runs))


def assist(target: Target, options: Options, captured: Captured) -> None:
    """Measure the stages of this rank when rank 0, which makes the plan, asks for it."""
    timer = _stage_timer(_counted_target(target, options), options, captured)
    if timer is not None:
        timer.assist()


def _counted_target(target: Target, options: Options) -> Target:
    """Return what a plan counts of a target: for inference no loss of the user's."""
    return replace(target, loss_fn=None, targets=None) if options.is_inference else target


def _stage_timer(target: Target, options: Options, captured: Captured) -> StageTimer | None:
    """Return what measures whole stages; None if costs are not measured."""
    device = measured_on(options.costs, target)
    return None if device is None else StageTimer(target, captured, device)


def _explain_casts(graph: fx.Graph) -> str:
    """Return why readers of a weight share a stage, and what to do; "" if not for autocast.

    Autocast keeps a weight that it has cast for all readers, so that its gradients are summed as
    cast: in two stages they would be cast first and summed afterwards, which rounds differently.
    """
    readers = [[node.name for node in nodes] for nodes in shared_cast_readers(graph.nodes)]
    shortened = (names if len(names) < 5 else [*names[:3], "…", names[-1]] for names in readers)
    groups = dict.fromkeys(", ".join(names) for names in shortened)
    if not groups:
        return ""
    return (
        "; autocast casts a weight once and sums its gradients as cast, so its readers share a "
        f"stage ({'; '.join(islice(groups, 3))}): to part them, call them outside autocast, or "
        "enter it with cache_enabled=False"
    )


def _warn_if_too_large(plan: Plan) -> None:
    """Warn if ranks may not fit the named device, and no cap was given."""
    kind, _, text = plan.options.costs.partition(":")
    if kind != "roofline" or plan.options.memory_bytes is not None:
        return
    # `roofline:DEVICE` names the device that the plan is for, so its memory is known.
    names = devices_of(text)
    # The rank that exceeds its device by the most is named, with the cap to give; of several
    # kinds of devices that need not be the rank that holds most.
    devices = names * plan.ranks if len(names) == 1 else names
    needs = [rank.total.bound for rank in plan.prediction.memory]
    sizes = [load_device(name).memory_bytes for name in devices]
    needed, there, device = max(
        zip(needs, sizes, devices, strict=True), key=lambda rank: rank[0] - rank[1]
    )
    if needed > there:
        logger.warning(
            "a rank may need %s, but %s has %s: give --memory %s (in Python memory=%r) to have it "
            "cut otherwise",
            *(size_text(needed), device, size_text(there), option_text(there), option_text(there)),
        )
