from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from pipecompile.report import templates
from pipecompile.report.templates import page

FOLDER = Path(templates.__file__).parent / "templates"
ROOT = Path(__file__).parents[2]


def test_templates_are_installed_with_the_package() -> None:
    tables = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = tables["package-data"]["pipecompile.report"]
    installed = {path for pattern in patterns for path in FOLDER.parent.glob(pattern)}
    assert installed == set(FOLDER.iterdir()) != set()


def test_text_is_escaped_and_what_is_missing_is_an_error() -> None:
    text = page("base.html", time_unit="ns", title="<b>", subtitle="a & b", figures=[("<i>", "1")])
    assert "<h1>&lt;b&gt;</h1>" in text and "a &amp; b" in text and "<dt>&lt;i&gt;</dt>" in text
    with pytest.raises(UndefinedError, match="'subtitle' is undefined"):
        page("base.html", time_unit="ns", title="", figures=[])
