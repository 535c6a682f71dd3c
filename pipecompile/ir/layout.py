"""JSON laid out for review: a line for what fits or is a row of a table, few for a small change.

serialization.py calls it for every file that pipecompile writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from typing import Any

import msgspec

from pipecompile.ir.module_paths import block_of

__all__ = ["layout"]

WIDTH = 100


def layout(value: Any) -> str:
    """Return `value`, of dicts, lists and scalars, as JSON in lines of at most 100 columns.

    The key `schema` comes first, then the others in the order that they have. The keys of the
    outermost object have a line each. What is inside fills lines, and what is too long for a line
    has lines of its own; so has each object or array in an array:

        "allocator": "cuda",
        "links": {"bandwidth_bytes_per_s": null, "latency_ns": 0},
        "parameters": [
         {"bytes": 768, "name": "h.0.attn.bias", "owner": 0, "stages": [0]},
         {"bytes": 768, "name": "h.1.attn.bias", "owner": 0, "stages": [0]}
        ],

    Only a long string makes a line longer than that.
    """
    value = _schema_first(value)
    if isinstance(value, dict) and len(line := _line(value)) > WIDTH:
        return _framed("{}", _entries(value, 1), 0)
    return line if isinstance(value, dict) else _laid_out(value, indent=0, column=0)


def _schema_first(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema_first(item) for item in value]
    if isinstance(value, dict):
        # So the first line of a file says what it is. Sorting is stable: others keep their order.
        keys = sorted(value, key=lambda key: key != "schema")
        return {key: _schema_first(value[key]) for key in keys}
    return value


def _laid_out(value: Any, indent: int, column: int) -> str:
    """Return the text of `value`, which begins at `column` of a line with `indent` spaces."""
    # Each level writes its values again: files are some megabytes at most, and rarely five deep.
    line = _line(value)
    if column + len(line) < WIDTH or not isinstance(value, dict | list) or not value:
        return line  # one column is kept for the comma behind it
    # One column less: rows lie one space deeper than their bracket.
    width = WIDTH - indent - 1
    if isinstance(value, dict):
        return _framed("{}", _rows(_entries(value, indent + 1), width), indent)
    if any(isinstance(item, dict | list) for item in value):
        items = (_laid_out(item, indent + 1, indent + 1) for item in value)
        return _framed("[]", items, indent)
    # The names of each block begin a line: where a layer changes, the lines of others stay.
    blocks = (_rows(map(_line, names), width) for _, names in groupby(value, key=_block))
    return _framed("[]", chain.from_iterable(blocks), indent)


def _framed(brackets: str, rows: Iterable[str], indent: int) -> str:
    """Return the rows, each beginning a line, between brackets on lines of their own."""
    space = " " * indent
    return f"{brackets[0]}\n {space}" + f",\n {space}".join(rows) + f"\n{space}{brackets[1]}"


def _line(value: Any) -> str:
    # With indent=0 all is one line with spaces: {"a": 1, "b": [1, 2]}.
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _entries(value: dict[str, Any], indent: int) -> Iterator[str]:
    for key, inner in value.items():
        name = f"{_line(key)}: "
        yield name + _laid_out(inner, indent, indent + len(name))


def _block(value: Any) -> str:
    """Return the numbered block of a model that a dotted name lies in, else nothing."""
    block = block_of(value) if isinstance(value, str) and "." in value else ""
    return block if block[-1:].isdigit() else ""


def _rows(cells: Iterable[str], width: int) -> Iterator[str]:
    """Yield the cells with commas between them, as many in a row as fit in `width` columns.

    A cell of several lines is a row of its own.
    """
    row = ""
    for cell in cells:
        together = f"{row}, {cell}" if row else cell
        if "\n" not in together and len(together) < width:
            row = together
            continue
        if row:
            yield row
        row = cell
        if "\n" in cell:
            yield cell
            row = ""
    if row:
        yield row
