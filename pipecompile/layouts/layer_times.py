"""Measured times of layers in a table, as the cost graph of a chain. Whoever has timed layers needs
no model:

    part,forward_ms,backward_ms,parameters,saved
    E,0.2,0.3,2GB,64MiB
    t*3,1.0,2.1,300MB,1GiB
    attention*58,0.9,1.8,190MB,700MiB
    mlp*58,1.7,3.5,11GB,1.5GiB
    L,1.9,3.8,2GB,2GiB

Parts are Megatron's symbols in the order of the forward: E (embedding), t (layer), m (MTP layer), L
(norm, head and loss), with *n for n layers alike. Rows of attention and of MLP stand for both
halves of layers. `parameters` and `saved` (of a microbatch, for its backward) are sizes, which may
be left out: they then count as nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple

from pipecompile.errors import FormatError, InputError
from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor
from pipecompile.ir.serialization import read_bytes
from pipecompile.ir.size import parse_bytes

__all__ = ["layer_times", "read_layer_times"]

TIMES, SIZES = ("forward_ms", "backward_ms"), ("parameters", "saved")
NS_PER_MS = 1_000_000
HALVES = ("attention", "mlp")


class _TimedPart(NamedTuple):
    """A row of the table: so many (`number`) parts of these times and sizes, in ns and bytes."""

    name: str
    number: int
    forward_ns: int
    backward_ns: int
    parameter_bytes: int
    saved_bytes: int


def read_layer_times(path: str | Path) -> CostGraph:
    """Return the cost graph of the table in a file; FormatError if it is no such table."""
    try:
        text = read_bytes(path).decode("utf-8-sig")  # spreadsheets write a mark
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: is no text ({error})") from error
    try:
        return layer_times(text)
    except InputError as error:
        raise FormatError(f"{path}: {error}") from error


def layer_times(text: str) -> CostGraph:
    """Return the cost graph of a table; InputError names the line that is wrong."""
    modules = list(_modules(_parts(text)))
    nodes = tuple(_node(place, *row) for place, row in enumerate(modules))
    tensors = (
        # Nobody has said how large they are: they only say the order, and cost no transfer.
        Tensor(producer=before.name, consumers=(after.name,), bytes=0, gradient_bytes=0)
        for before, after in pairwise(nodes)
    )
    parameters = (
        Parameter(name=name, bytes=part.parameter_bytes, trainable=True)
        for (_, part), node in zip(modules, nodes, strict=True)
        for name in node.parameters
    )
    return CostGraph(
        nodes=nodes,
        tensors=tuple(tensors),
        storages=tuple(part.saved_bytes for _, part in modules),
        parameters=tuple(parameters),
    )


def _parts(text: str) -> Iterator[_TimedPart]:
    """Yield the rows of the table."""
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    header = tuple(name.strip() for name in rows.fieldnames or ())
    missing = {"part", *TIMES} - set(header)
    unknown_names = set(header) - {"part", *TIMES, *SIZES}
    if missing or unknown_names:
        raise InputError(
            f"the table of layer times has the columns {', '.join(header) or 'none'}; write "
            f"part,{','.join(TIMES)} and, if you know them, {','.join(SIZES)}"
        )
    # Without the spaces behind commas that people write.
    rows.fieldnames = header
    for number, row in enumerate(rows, start=2):
        values = [row[name] or "" for name in header]
        try:
            # The reader keeps what is beyond the header by None, and has None for what is missing.
            if None in row:
                raise InputError(f"it has more values than the header, {len(header)}")
            yield _part(dict(zip(header, values, strict=True)))
        except InputError as error:
            text = ",".join([*values, *row.get(None, ())])
            raise InputError(f"line {number} of the table is {text!r}: {error}") from None


def _part(row: dict[str, str]) -> _TimedPart:
    """Return the part of a row; InputError or ValueError says what is wrong."""
    match = re.fullmatch(r"\s*(E|t|m|L|attention|mlp)\s*(?:\*\s*(\d+))?\s*", row["part"])
    if match is None or match[2] == "0":
        raise InputError(
            f"{row['part']!r} is no part; write E, t, m, L, attention or mlp, with *n for n alike"
        )
    if match[1] in "EL" and match[2] is not None:
        raise InputError(f"{row['part']!r}: there is one {match[1]}")
    times = [_time_ns(name, row[name]) for name in TIMES]
    sizes = [parse_bytes(row.get(name, "").strip() or "0") for name in SIZES]
    return _TimedPart(match[1], int(match[2] or 1), *times, *sizes)


def _time_ns(name: str, text: str) -> int:
    """Return a time in ns; InputError if it is no time."""
    with suppress(ValueError):
        time = float(text)
        if 0 <= time < inf:
            return round(time * NS_PER_MS)
    raise InputError(f"{name} is {text!r}; write a time in ms, 0 or more")


def _modules(parts: Iterator[_TimedPart]) -> Iterator[tuple[str, _TimedPart]]:
    """Yield the path of each module in the order of the forward, with its row."""
    layers, waiting = {"t": 0, "m": 0}, None
    for part in parts:
        if waiting is not None and (part.name, part.number) != ("mlp", waiting.number):
            raise InputError(
                f"attention*{waiting.number} is followed by {part.name}*{part.number}; write "
                f"mlp*{waiting.number} behind it, the other half of these layers"
            )
        if part.name == "attention":
            waiting = part
        elif part.name == "mlp":
            if waiting is None:
                raise InputError("mlp needs attention before it, the other half of its layers")
            # attention*2 and mlp*2 are layers.0.attention, layers.0.mlp, layers.1.attention,
            # layers.1.mlp.
            yield from _layers("layers", layers["t"], (waiting, part))
            layers["t"], waiting = layers["t"] + part.number, None
        elif part.name in layers:
            container = {"t": "layers", "m": "mtp"}[part.name]
            yield from _layers(container, layers[part.name], (part,))
            layers[part.name] += part.number
        else:
            yield {"E": "embedding", "L": "head"}[part.name], part
    if waiting is not None or not layers["t"]:
        raise InputError(
            "the table ends with attention; add mlp" if waiting else "the table has no layer (t)"
        )


def _layers(
    container: str, first: int, parts: Sequence[_TimedPart]
) -> Iterator[tuple[str, _TimedPart]]:
    """Yield the modules of layers that are alike, in one part each or in two halves."""
    for number in range(first, first + parts[0].number):
        for part in parts:
            half = f".{part.name}" if part.name in HALVES else ""
            yield f"{container}.{number}{half}", part


def _node(place: int, module: str, part: _TimedPart) -> Node:
    """Return the node of a module; what it saves is the storage of its own place."""
    return Node(
        name=module.replace(".", "_"),
        forward_ns=part.forward_ns,
        backward_ns=part.backward_ns,
        parameter_bytes=part.parameter_bytes,
        saved_bytes=part.saved_bytes,
        group=None,
        saved=(place,),
        # Also one of no bytes: modules with parameters are those that layouts name.
        parameters=(f"{module}.weight",),
        module=module,
    )
