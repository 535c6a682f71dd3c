"""How much memory would do, and which caps are tried for it."""

from __future__ import annotations

from typing import NoReturn

from pipecompile.errors import InfeasibleError
from pipecompile.ir.setting import Setting
from pipecompile.planner.least_memory import least_memory

SETTING = Setting(
    replicas=1, ranks=2, stages_per_rank=1, microbatches=2, schedule="1f1b", recompute="auto"
)


def test_above_the_first_cap_a_setting_without_a_fitting_cut_is_not_planned() -> None:
    tried = list[int]()

    def planned(_setting: Setting, cap: int) -> NoReturn:
        tried.append(cap)
        raise InfeasibleError("nothing fits", "")

    assert least_memory([SETTING], 1600, planned, lambda _setting, cap: cap >= 3200) is None
    assert tried == [1700, 3200, 4800, 8000, 14400, 27200, 52800]
