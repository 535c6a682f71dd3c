"""The table of options: what Python, the command line, plans and the documentation take from it."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.option_help import options_page
from pipecompile.ir.option_names import (
    Objective,
    OptimizerName,
    PlacementShape,
    ScheduleName,
    known_name,
)
from pipecompile.ir.options import OPTIONS
from pipecompile.ir.plan import Options
from pipecompile.memory_model.optimizer import OPTIMIZERS
from pipecompile.schedule.named_orders import NAMES
from pipecompile.schedule.placement import SHAPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "options.md"


def test_names_are_those_that_the_rooms_know() -> None:
    assert sorted(get_args(ScheduleName)) == sorted([*NAMES, "search"])
    assert sorted(get_args(OptimizerName)) == sorted(OPTIMIZERS)
    assert sorted(get_args(PlacementShape)) == sorted(SHAPES)


def test_each_option_is_a_field_of_a_plan_and_each_field_an_option() -> None:
    fields = [option.field for option in OPTIONS if option.field is not None]
    assert sorted(fields) == sorted(Options.__struct_fields__)


def test_defaults_are_those_of_a_plan() -> None:
    required = len(Options.__struct_fields__) - len(Options.__struct_defaults__)
    of_plan = dict(
        zip(Options.__struct_fields__[required:], Options.__struct_defaults__, strict=True)
    )
    for option in OPTIONS:
        # Those are None there, and {} or 1 in a plan.
        if option.field in of_plan and option.name not in ("pin", "replicas"):
            assert of_plan[option.field] == option.default, option.name


def test_a_name_in_another_case_is_known_and_a_near_one_is_suggested() -> None:
    schedules = get_args(ScheduleName)
    assert known_name("schedule", "1F1B", schedules) == "1f1b"
    with pytest.raises(InputError, match=r"unknown schedule '1f1v'; did you mean '1f1b'\? choose"):
        known_name("schedule", "1f1v", schedules)
    with pytest.raises(InputError, match=r"did you mean 'variance'\? choose"):
        known_name("objective", "var", get_args(Objective))
    with pytest.raises(InputError, match=r"did you mean 'zb-h1' or 'zb-h2' or 'zb-v'\? choose"):
        known_name("schedule", "ZB", schedules)
    with pytest.raises(InputError, match=r"unknown schedule ''; choose"):
        known_name("schedule", "", schedules)
    with pytest.raises(InputError, match=r"schedule=4 is not a name; choose"):
        known_name("schedule", 4, schedules)


def test_the_page_of_the_documentation_is_current() -> None:
    assert PAGE.read_text() == options_page(), (
        "write it with: python -m pipecompile.ir.option_help > docs/reference/options.md"
    )
