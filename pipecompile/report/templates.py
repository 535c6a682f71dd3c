"""Pages from the jinja2 templates in templates/: one HTML file each, which loads nothing else."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipecompile.ir.duration import time_text, time_with_unit
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.size import size_text
from pipecompile.report.units import percent

__all__ = ["page"]


def page(template: str, *, time_unit: TimeUnit, **values: Any) -> str:
    """Return the page of a template in templates/; text among `values` is escaped."""
    # StrictUndefined: a value that a template misspells is an error, not an empty cell.
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "percent": percent,
        "share": _share,
        "size": size_text,
        "time": partial(time_text, unit=time_unit),
        "time_with_unit": partial(time_with_unit, unit=time_unit),
    }
    return environment.get_template(template).render(values)


def _share(part: int, whole: int) -> str:
    """Return a part in percent of the whole, for the width of a bar."""
    return f"{100 * part / max(whole, 1):.2f}"
