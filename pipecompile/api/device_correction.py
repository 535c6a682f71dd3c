"""A device whose rates were corrected by a recorded run, so that plans for it predict that run.

Needs no PyTorch.
"""

from __future__ import annotations

from pipecompile.cost_models.device import Device, load_device, slowed
from pipecompile.errors import InputError
from pipecompile.report.run_comparison import RunComparison
from pipecompile.report.run_text import ratios_text

__all__ = ["corrected_device", "ratios_text"]


def corrected_device(comparison: RunComparison) -> Device:
    """Return the device that the plan was made for, slowed or sped up so that all compute of a step
    takes as long as in the run.

    A roofline has no rates of its own for forwards and backwards, so all rates get one factor.
    Raise InputError unless the costs of the plan are `roofline:DEVICE`.
    """
    costs = comparison.plan.options.costs
    kind, _, name = costs.partition(":")
    if kind != "roofline":
        raise InputError(
            f"the plan's costs are {costs!r}, which have no device to correct; plan "
            "with --costs roofline:DEVICE, record that, or measure anew with --costs measured"
        )
    # A run that took 3 ms where 2 ms were predicted has a ratio of 1.5: rates are divided by it.
    ratio = comparison.compute.ratio
    if not ratio:
        raise InputError("the plan predicts no time, or the run took none; record whole steps")
    return slowed(load_device(name), ratio, f"× {ratio:.3f} in time, by a recorded run")
