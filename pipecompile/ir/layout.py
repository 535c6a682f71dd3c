"""JSON laid out for review: a line for what fits or is a row of a table, few for a small change.

serialization.py calls it for every file that pipecompile writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import msgspec

from pipecompile.ir.module_paths import block_of

__all__ = ["layout"]

WIDTH = 100
RECORD = (
    5 * WIDTH
)  # an object in an array fills lines up to this length; a longer one has a key a line


def layout(value: Any) -> str:
    """Return `value`, of dicts, lists and scalars, as JSON in lines of at most 100 columns.

    The key `schema` comes first, then the others in the order that they have. What fits beside its
    key is one line. Arrays of scalars, and short objects in an array, fill line after line; of
    other arrays and objects each item has lines of its own. Only a long string makes a line longer:

        "allocator": "cuda",
        "links": {"bandwidth_bytes_per_s": null, "latency_ns": 0},
        "parameters": [
         {"bytes": 768, "name": "h.0.attn.bias", "owner": 0, "stages": [0]},
         {"bytes": 768, "name": "h.1.attn.bias", "owner": 0, "stages": [0]}
        ],
    """
    return _laid_out(_schema_first(value), indent=0, column=0)


def _schema_first(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema_first(item) for item in value]
    if isinstance(value, dict):
        keys = sorted(value, key=lambda key: key != "schema")
        return {key: _schema_first(value[key]) for key in keys}
    return value


def _laid_out(value: Any, indent: int, column: int, *, is_item: bool = False) -> str:
    """Return the text of `value`, which begins at `column` of a line that is indented by `indent`.

    An item of an array may fill its lines with keys.
    """
    line = _line(value)
    if column + len(line) < WIDTH or not isinstance(value, dict | list) or not value:
        return line  # one column is kept for the comma behind it
    if isinstance(value, list):
        return _framed("[]", _items(value, indent + 1), indent)
    if is_item and len(line) <= RECORD:
        cells = [f"{_line(key)}: {_line(inner)}" for key, inner in value.items()]
        width = WIDTH - indent - len("{},")
        if max(map(len, cells)) <= width:
            return "{" + f",\n {' ' * indent}".join(_rows(cells, width)) + "}"
    return _framed("{}", _entries(value, indent + 1), indent)


def _framed(brackets: str, items: Iterable[str], indent: int) -> str:
    """Return the items, each beginning a line, between brackets on lines of their own."""
    space = " " * indent
    return f"{brackets[0]}\n {space}" + f",\n {space}".join(items) + f"\n{space}{brackets[1]}"


def _line(value: Any) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _entries(value: dict[str, Any], indent: int) -> Iterator[str]:
    for key, inner in value.items():
        name = f"{_line(key)}: "
        yield name + _laid_out(inner, indent, indent + len(name))


def _items(values: list[Any], indent: int) -> Iterator[str]:
    if any(isinstance(value, dict | list) for value in values):
        for value in values:
            yield _laid_out(value, indent, indent, is_item=True)
        return
    # The names of each block begin a line: where a layer changes, the lines of others stay.
    for _, block in groupby(values, key=_block):
        yield from _rows(map(_line, block), WIDTH - indent - 1)


def _block(value: Any) -> str:
    """Return the block of a model that a dotted name lies in, else nothing."""
    return block_of(value) if isinstance(value, str) and "." in value else ""


def _rows(cells: Iterable[str], width: int) -> Iterator[str]:
    """Yield the cells with commas between them, as many in a row as fit in `width` columns."""
    row = ""
    for cell in cells:
        if row and len(row) + len(", ") + len(cell) > width:
            yield row
            row = cell
        else:
            row = f"{row}, {cell}" if row else cell
    yield row
