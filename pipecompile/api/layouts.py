"""The cut or the schedule of a plan in the words of another framework. Needs no PyTorch."""

from __future__ import annotations

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.option_names import known_name
from pipecompile.ir.plan import LAYOUT_FORMATS, Plan
from pipecompile.ir.schedule import Schedule
from pipecompile.layouts.export import Exported, export_layout
from pipecompile.schedule.torch_csv import write_csv

__all__ = ["EXPORTS", "cost_text", "export_of"]

TORCH_CSV = "torch-csv"
EXPORTS: tuple[str, ...] = (*LAYOUT_FORMATS, TORCH_CSV)


def export_of(plan: Plan, to: str, layers: str | None = None, *, rounded: bool = False) -> Exported:
    """Return the cut of a plan in the format `to`, or its schedule as torch's CSV.

    InputError if the format cannot say it; a cut may be `rounded` to what it can say. `layers` is
    the path of the list of layers, which is that of the plan's options or found unless given.
    """
    to = known_name("format", to, EXPORTS)
    if to == TORCH_CSV:
        order = plan.schedule
        # torch adds transfers and reductions by itself.
        compute = Schedule.of(order.name, order.microbatches, order.placement, order.compute)
        return Exported(write_csv(compute))
    # The same text as `to`, but with the type of a format, which `known_name` cannot give.
    form = next(form for form in LAYOUT_FORMATS if form == to)
    return export_layout(plan, form, layers or plan.options.layers, rounded=rounded)


def cost_text(plan: Plan, exported: Exported) -> str:
    """Return what rounding moved, and what that costs; "" if nothing was rounded."""
    if not exported.moved:
        return ""
    work = "forwards" if plan.options.is_inference else "forward and backward"
    before, after = exported.heaviest_ns, exported.rounded_heaviest_ns
    change = after / before - 1 if before else 0.0
    return (
        f"rounded: {', '.join(exported.moved)}; {work} of a microbatch in the heaviest stage take "
        f"{time_with_unit(after, plan.time_unit)} instead of "
        f"{time_with_unit(before, plan.time_unit)} ({change:+.1%})"
    )
