"""The site: `make docs` builds it into build/docs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pipecompile

project = "pipecompile"
author = "The pipecompile authors"
copyright = author
release = version = pipecompile.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_click"]
root_doc = "index"
nitpicky = False
default_role = "code"  # docstrings write `name`, as Markdown does
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]  # the design notes start tables and drawings as they like

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "separated"
python_display_short_literal_types = True

html_theme = "furo"
html_title = "pipecompile"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"

COLUMNS = re.compile(r"\S {2,}\S|[├└│]")


def _blocks(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring; paragraphs set in columns become literal blocks."""
    for blank, paragraph in groupby(lines, key=lambda line: not line.strip()):
        text = list(paragraph)
        if not blank and any(COLUMNS.search(line) for line in text):
            yield from ("::", "", *(f"    {line}" for line in text), "")
        else:
            yield from text


def _keep_columns(
    app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]
) -> None:
    lines[:] = _blocks(lines)


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _keep_columns)
