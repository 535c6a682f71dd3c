"""Recorded runs of a pipeline in one process, from the block to the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from pipecompile.api.comparison import comparison_of, comparison_text, run_page, run_trace
from pipecompile.api.compilation import pipecompile
from pipecompile.api.device_correction import corrected_device
from pipecompile.cost_models.device import load_device
from pipecompile.errors import InputError
from pipecompile.ir.recorded_run import RecordedRun
from pipecompile.ir.schedule import Action
from pipecompile.ir.serialization import encode, write
from pipecompile.runtime.clock_alignment import ClockOffset
from pipecompile.training.pipeline import Pipeline
from pipecompile.training.run_recorder import _ClockReading, _to_rank_0

ROWS = torch.randn(8, 16)


class Tied(nn.Module):
    """Two stages that share a weight: the first one computes its gradient after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.last.weight = self.first.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows of 16."""
        return self.last(torch.relu(self.inner(torch.relu(self.first(rows)))))


def pipeline_of(model: nn.Module, **options: object) -> Pipeline:
    choices = {"k": 2, "microbatches": 4, "costs": "flops", "schedule": "1f1b", **options}
    return pipecompile(model, ROWS, loss_fn=nn.functional.mse_loss, sample_target=ROWS, **choices)


@pytest.fixture
def pipeline() -> Pipeline:
    layers = [nn.Linear(16, 16) for _ in range(4)]
    return pipeline_of(nn.Sequential(*layers))


def recorded(pipeline: Pipeline, steps: int = 3) -> RecordedRun:
    with pipeline.record() as recording:
        for _ in range(steps):
            pipeline.step(ROWS, ROWS)
    assert recording.run is not None
    return recording.run


def test_steps_of_the_block_are_recorded_and_no_others(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.step(ROWS, ROWS)
    with pipeline.record() as recording:
        pipeline.step(ROWS, ROWS)
        pipeline.evaluate(ROWS)
        pipeline.step(ROWS, ROWS)
        with pytest.raises(InputError, match="save behind it"):
            recording.save(tmp_path / "run.json")
    pipeline.step(ROWS, ROWS)
    recording.save(tmp_path / "run.json")
    run = RecordedRun.load(tmp_path / "run.json")
    assert run == recording.run
    assert [step.number for step in run.steps] == [1, 2]
    assert (run.processes, run.ranks, run.is_in_turns) == (1, 2, True)
    assert (run.torch, run.clock_error_ns) == (str(torch.__version__), 0)


def test_each_rank_has_its_compute_actions_in_order(pipeline: Pipeline) -> None:
    for step in recorded(pipeline).steps:
        assert step.microbatches == 4
        for rank, row in zip(step.ranks, pipeline.plan.schedule.compute, strict=True):
            assert [Action.parse(a.action) for a in rank.actions] == list(row)
        # One process performs them, so that no two overlap.
        moments = sorted(a[1:4] for rank in step.ranks for a in rank.actions)
        assert [m for times in moments for m in times] == sorted(m for t in moments for m in t)


def test_recording_changes_no_result() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16)) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    plain, watched = map(pipeline_of, models)
    plain.step(ROWS, ROWS)
    recorded(watched, 1)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_blocks_may_lie_in_each_other(pipeline: Pipeline) -> None:
    with pipeline.record() as outer:
        pipeline.step(ROWS, ROWS)
        inner = recorded(pipeline, 1)
    assert outer.run is not None
    assert ([s.number for s in outer.run.steps], [s.number for s in inner.steps]) == ([0, 1], [1])


def test_a_block_without_steps_has_no_run(pipeline: Pipeline, tmp_path: Path) -> None:
    with pipeline.record() as recording:
        pass
    assert recording.run is None
    with pytest.raises(InputError, match="nothing was recorded"):
        recording.save(tmp_path / "run.json")


def test_a_run_is_compared_with_its_plan(pipeline: Pipeline) -> None:
    comparison = comparison_of(pipeline.plan, recorded(pipeline))
    assert len(comparison.actions) == 2 * 2 * 4
    assert "only shares are compared" in comparison_text(comparison)
    assert run_page(comparison).count("<svg") == 2
    assert b"relative" not in run_trace(comparison)


def test_weight_gradients_that_wait_for_a_tied_parameter_are_compared() -> None:
    pipeline = pipeline_of(Tied(), pin={"first": 0, "last": 1}, schedule="zb-h1")
    run = recorded(pipeline)
    compute = pipeline.plan.schedule.compute
    first = [Action.parse(a.action) for a in run.steps[0].ranks[0].actions]
    assert first != list(compute[0]) and sorted(first) == sorted(compute[0])
    assert len(comparison_of(pipeline.plan, run).actions) == sum(map(len, compute))


def test_a_run_of_another_plan_is_refused(pipeline: Pipeline) -> None:
    run = recorded(pipeline, 1)
    other = pipeline_of(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), schedule="gpipe")
    with pytest.raises(InputError, match=r"recorded of another plan \(fingerprint [0-9a-f]{12}…"):
        comparison_of(other.plan, run)
    wider = pipeline_of(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), k=4)
    with pytest.raises(InputError, match="the run is of 2 ranks, but the plan has 4"):
        comparison_of(wider.plan, run)


def test_a_device_corrected_by_a_run_predicts_its_compute(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    pipeline = pipeline_of(model, costs="roofline:cpu")
    comparison = comparison_of(pipeline.plan, recorded(pipeline))
    device = corrected_device(comparison)
    assert "by a recorded run" in device.sources["launch_ns"]
    assert device.memory_bytes == load_device("cpu").memory_bytes
    path = tmp_path / "device.json"
    write(path, encode(device))
    again = pipeline_of(model, costs=f"roofline:{path}")
    predicted = sum(again.simulate().busy_ns)
    assert predicted == pytest.approx(comparison.compute.measured_ns, rel=0.01)


def test_without_a_device_there_is_nothing_to_correct(pipeline: Pipeline) -> None:
    with pytest.raises(InputError, match="'flops', which have no device to correct"):
        corrected_device(comparison_of(pipeline.plan, recorded(pipeline, 1)))


def test_times_of_another_clock_are_moved_by_an_offset_that_changes_evenly() -> None:
    before = _ClockReading(1000, [ClockOffset(), ClockOffset(500, 10)])
    after = _ClockReading(2000, [ClockOffset(), ClockOffset(600, 10)])
    convert = _to_rank_0(1, (before, after))
    assert [convert(ns) for ns in (1500, 2050, 2600)] == [1000, 1495, 1990]
    assert _to_rank_0(0, (before, after))(1234) == 1234


def test_an_offset_within_its_error_is_none() -> None:
    reading = _ClockReading(1000, [ClockOffset(), ClockOffset(-9, 10)])
    assert _to_rank_0(1, (reading, reading))(1234) == 1234
