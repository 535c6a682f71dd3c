"""The objectives by which a joint search cuts the model under a setting. Needs no PyTorch.

The search is for the shortest step, so `step-time` is the objective unless the user gives one:

    quick plans      step-time; with very many actions, where a step takes too long to simulate
                     often, the load of the fullest stage
    last plans       step-time, and if that finds no cut that fits, those of the others
"""

from __future__ import annotations

from pipecompile.ir.setting import Setting
from pipecompile.planner.setting_space import SettingSpace, effort_of

__all__ = ["last_objectives", "quick_objective"]


def quick_objective(space: SettingSpace, setting: Setting) -> str:
    """Return the objective of quick plans of a setting."""
    if "objective" in space.fixed:
        return space.base.objective
    if effort_of(setting) == 1:
        return "step-time"
    # With many microbatches a step is the load of the fullest stage, M times. Where a rank has
    # several stages, it is the sum of theirs that must be alike on all ranks.
    return "max-load" if setting.stages_per_rank == 1 else space.base.objective


def last_objectives(space: SettingSpace, setting: Setting) -> tuple[str, ...]:
    """Return the objectives of a thorough plan of a setting, in the order in which they are tried.

    A search by step-time shares its effort among cuts of three objectives, so it may find none that
    fits where one of them alone does.
    """
    if "objective" in space.fixed:
        return (space.base.objective,)
    # Each once: a quick plan is often by one of the two others.
    all_of_them = ("step-time", quick_objective(space, setting), space.base.objective)
    return tuple(dict.fromkeys(all_of_them))
