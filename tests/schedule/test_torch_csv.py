from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Kind, Schedule
from pipecompile.schedule.named_orders import generate
from pipecompile.schedule.torch_csv import read_csv, write_csv
from tests.schedule.cases import order
from tests.schedule.strategies import orders, problems


def _plain(schedule: Schedule) -> Schedule:
    rows = [
        [action for action in row if action.kind is not Kind.RECOMPUTE] for row in schedule.rows
    ]
    return Schedule.of("csv", schedule.microbatches, schedule.placement, rows)


@given(st.data())
def test_what_is_written_is_read_again(data: st.DataObject) -> None:
    schedule = _plain(data.draw(orders(data.draw(problems()))))
    assert read_csv(write_csv(schedule)) == schedule


def test_a_line_is_a_rank() -> None:
    text = write_csv(generate("1f1b", range(2), 2, False))
    assert text == "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"


def test_torch_reads_ours_and_we_read_torchs(tmp_path: Path) -> None:
    """Orders are read and written by torch's own code, on a runtime without stages."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = order(
        ["0F0 0F1 3F0 3F1 3I0 3W0 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"], [0, 1, 1, 0], 2
    )
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pipeline_order = {
        rank: [schedules._Action.from_str(cell) for cell in row]
        for rank, row in enumerate(csv.reader(io.StringIO(write_csv(schedule))))
    }
    path = tmp_path / "schedule.csv"
    runtime._dump_csv(path, format="compute_only")
    assert read_csv(path.read_text()) == _plain(schedule)
    assert [[str(action) for action in row] for row in runtime.pipeline_order.values()] == list(
        map(list, schedule.actions)
    )


def test_torch_loads_our_file(tmp_path: Path) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    path = tmp_path / "schedule.csv"
    path.write_text(write_csv(generate("1f1b", range(2), 3, False)), newline="")
    runtime = object.__new__(schedules.PipelineScheduleMulti)
    runtime.pipeline_order, checked = {}, []
    runtime._validate_and_set_stage_mapping = checked.append
    runtime._load_csv(path)
    assert checked == [runtime.pipeline_order]
    assert [" ".join(map(str, row)) for row in runtime.pipeline_order.values()] == [
        "0F0 0F1 0B0 0F2 0B1 0B2",
        "1F0 1B0 1F1 1B1 1F2 1B2",
    ]


def test_the_steps_in_which_a_rank_idles_are_left_out() -> None:
    assert read_csv("0F0,,,0B0\n,1F0,1B0,\n\n").actions == (("0F0", "0B0"), ("1F0", "1B0"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0R0", "line 1, column 2: 0R0 is not F, I, W or B: a recompute cannot be written"),
        (
            "0F0\n1RECV_F0",
            "line 2, column 1: 1RECV_F0 is not F, I, W or B: torch adds transfers and reductions",
        ),
        (
            "0F0,,0REDUCE_GRAD",
            "line 1, column 3: 0REDUCE_GRAD is not F, I, W or B: torch adds transfers",
        ),
        (
            "0F0@1",
            "line 1, column 1: 0F0@1 is not F, I, W or B: weight versions cannot be written",
        ),
        ("0STEP", "line 1, column 1: 0STEP is not F, I, W or B: optimizer steps cannot be written"),
        (
            "0F0,0UNSHARD",
            "line 1, column 2: '0UNSHARD' is not an action such as .* F, I, W and B only",
        ),
        ("0F0\n0B0", "line 2 performs 0B0, but stage 0 is on line 1"),
        ("0F0,2F0", "no line performs stage 1; stages are numbered from 0 without a gap"),
        ("", "the CSV is no schedule"),
    ],
)
def test_what_the_format_cannot_say_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_csv(text)


def test_what_torch_could_not_load_is_not_written() -> None:
    with pytest.raises(InputError, match="line 1, column 2: 0R0 is not F, I, W or B"):
        write_csv(order(["0F0 0R0 0B0"], [0], 1))


@pytest.mark.parametrize("text", ["00F0", "0F01", "٠F٠"])
def test_numbers_are_written_in_one_way(text: str) -> None:
    with pytest.raises(InputError, match="is not an action"):
        read_csv(text)


def test_what_is_no_csv_is_refused() -> None:
    with pytest.raises(InputError, match="is no CSV"):
        read_csv("0" * 200_000)
