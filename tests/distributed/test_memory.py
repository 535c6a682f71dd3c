"""What gloo ranks hold, by the allocator's own events, against what the plan says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_prediction import PlanSetting, measure_rank
from tests.distributed.jobs import measured_transformer
from tests.distributed.workers import Workers
from tests.sweeps import sweep


@pytest.mark.parametrize(
    "setting",
    [
        sweep(PlanSetting("gpipe", 2, 2, "rmsprop")),
        PlanSetting("1f1b", 2, 4, "adamw"),
        PlanSetting("1f1b", 2, 4, "sgd", "stage"),
        sweep(PlanSetting("gpipe", 2, 4, "sgd", "except-last")),
        PlanSetting("gpipe", 2, 4, "sgd", "block"),
        PlanSetting("1f1b", 2, 4, "adamw", "sqrt"),
        PlanSetting("1f1b", 2, 4, "sgd", "auto", 28_000_000),  # without regions 38,858,752
        sweep(
            PlanSetting("gpipe", 2, 8, "adamw", "auto", 46_000_000)
        ),  # without regions 65,556,902
    ],
)
def test_ranks_hold_what_is_expected_and_no_more_than_the_bound(
    workers: Workers, tmp_path: Path, setting: PlanSetting
) -> None:
    for expected, bound, measured in workers.run(
        2, measure_rank, "mlp", setting, folder=str(tmp_path)
    ):
        assert abs(expected - measured) <= measured // 100
        assert measured <= bound <= measured * 11 // 10
        assert setting.memory is None or bound <= setting.memory


@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_so_do_those_of_the_transformer_of_the_gpipe_paper(
    workers: Workers, tmp_path: Path, recompute: str
) -> None:
    setting = PlanSetting("1f1b", 2, 8, "rmsprop", recompute)
    for expected, bound, measured in workers.run(
        2, measured_transformer, setting, folder=str(tmp_path)
    ):
        assert abs(expected - measured) <= measured // 100
        assert measured <= bound <= measured * 11 // 10
