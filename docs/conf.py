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

smartquotes = False  # --costs is no dash

html_theme = "furo"
html_title = "pipecompile"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
pygments_style = "friendly"
highlight_language = "none"  # drawings and tables; code says what it is

ROW = re.compile(r"(\S+(?:, \S+)*) {2,}(\S.*)")


def _blocks(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, with tables of two columns as definition lists."""
    for blank, paragraph in groupby(lines, key=lambda line: not line.strip()):
        text = list(paragraph)
        if not blank and ROW.match(text[0]) and not text[0].endswith(")"):
            yield from _definitions(text)
        else:
            yield from text


def _definitions(lines: list[str]) -> Iterator[str]:
    """`name   what it is`, and more of it on indented lines, as terms and definitions."""
    for line in lines:
        row = ROW.match(line)
        yield from (f"`{row[1]}`", f"    {row[2]}") if row else (f"    {line.strip()}",)


def _lay_out(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    lines[:] = _blocks(lines)


def setup(app: Any) -> None:
    """Sphinx calls this."""
    app.connect("autodoc-process-docstring", _lay_out)
