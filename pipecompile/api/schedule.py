"""The scheduler alone: an order for a schedule problem, or for the stages of a plan. Needs no
PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipecompile.errors import FormatError, InputError
from pipecompile.ir.file_kinds import kind_mismatch, schema_of
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule_problem import ScheduleProblem
from pipecompile.ir.serialization import read, read_bytes
from pipecompile.report.order import order_text as text_of_order
from pipecompile.report.order import order_title
from pipecompile.report.svg import picture
from pipecompile.report.tables import DrawTable, plain_table
from pipecompile.schedule.request import (
    ScheduleAnswer,
    ScheduleRequest,
    answer_for_file,
    answer_for_plan,
)
from pipecompile.schedule.torch_csv import write_csv

__all__ = ["csv_of", "order_for", "order_picture", "order_text"]


def order_for(path: str | Path, **request: Any) -> ScheduleAnswer:
    """Return the order for the schedule problem, or for the stages of the plan, in the file at
    `path`.

    `request` are the fields of `ScheduleRequest`.
    """
    # Its names are checked before a file is opened, as everywhere on the command line.
    checked = ScheduleRequest(**request)
    if _is_plan(path):
        return answer_for_plan(read(path, Plan), checked)
    return answer_for_file(path, checked)


def _is_plan(path: str | Path) -> bool:
    """Return whether the file says that it is a plan.

    Raise FormatError if it says that it is neither a plan nor a schedule problem, or cannot be
    read.
    """
    data = read_bytes(path, Plan, ScheduleProblem)
    mismatch = kind_mismatch(data, ScheduleProblem, Plan)
    if mismatch is not None:
        raise FormatError(f"{path}: {mismatch}")
    # By its head alone: a damaged plan is then refused as a plan, with what is wrong in it.
    return schema_of(data).startswith("pipecompile/plan/")


def order_text(answer: ScheduleAnswer, draw: DrawTable = plain_table) -> str:
    """Return the order for people."""
    return text_of_order(answer.order, answer.timeline, draw, answer.time_unit)


def order_picture(answer: ScheduleAnswer) -> str:
    """Return the timeline of the order as SVG."""
    return picture(order_title(answer.order), answer.timeline, answer.time_unit)


def csv_of(answer: ScheduleAnswer) -> str | None:
    """Return the order as torch reads it; None if it does not fit.

    Raise InputError if torch has no words for it.
    """
    # Refused also if the order does not fit: the user asked for a file that can never be written.
    if answer.skips:
        raise InputError(
            "torch's runtime sends to the next stage only, so an order with skips has no CSV; "
            "drop --csv"
        )
    return write_csv(answer.schedule) if answer.order.fits else None
