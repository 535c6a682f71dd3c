"""Reports of plans for inference say nothing of training, and what inference asks."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipecompile.api.report import page_of, text_of
from pipecompile.ir.plan import Plan
from pipecompile.report.inference import cache_rows, cache_text, load_text

MakePlan = Callable[..., Plan]
OF_TRAINING = ("backward", "recompute", "optimizer", "gradients")


@pytest.mark.parametrize("write", [text_of, page_of])
def test_nothing_is_said_of_training(make_plan: MakePlan, write: Callable[[Plan], str]) -> None:
    report = write(make_plan(schedule="forward-only", objective="throughput"))
    # The page's styles name all kinds of memory, and its picture defines all patterns.
    report = report.rpartition("</style>")[2].partition("<script")[0].replace('id="recompute"', "")
    assert [word for word in OF_TRAINING if word in report] == []
    assert "in a full pipeline one is done every" in report
    assert "tokens that fit" in report
    training = write(make_plan())
    assert "backward" in training and "tokens that fit" not in training
    assert load_text(make_plan()) == "forward, backward and recompute of one microbatch"


def test_the_tightest_rank_decides_how_many_tokens_fit(make_plan: MakePlan) -> None:
    def plan(caps: tuple[int, ...] | None) -> Plan:
        return make_plan(k=2, schedule="forward-only", objective="throughput", memory_bytes=caps)

    caps = (1 << 30, 1 << 29)
    rows = list(cache_rows(plan(caps)))
    assert [row[:3] for row in rows] == [["0", "2", "8.0 KiB"], ["1", "2", "8.0 KiB"]]
    assert cache_text(plan(caps)) == f"{rows[1][3]} tokens fit, rank 1 decides"
    assert cache_text(plan(None)) == "give a cap (--memory) to see how many tokens fit"
    assert [len(row) for row in cache_rows(plan(None))] == [3, 3]
