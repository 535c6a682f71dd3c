from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from pipecompile.errors import FormatError
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import (
    NonNegative,
    Value,
    decode,
    encode,
    fingerprint,
    read,
    write,
)


class _Point(Value, frozen=True, kw_only=True):
    y: NonNegative
    x: NonNegative = 0


def test_the_same_value_gives_the_same_bytes_with_sorted_keys() -> None:
    assert encode(_Point(y=1, x=2)) == encode(_Point(x=2, y=1)) == b'{"x": 2, "y": 1}\n'
    assert encode({"b": 1, "a": 2}) == encode({"a": 2, "b": 1})


def test_a_fingerprint_is_of_the_content_and_not_of_its_layout() -> None:
    assert fingerprint({"b": [1], "a": 2}) == fingerprint({"a": 2, "b": [1]})
    canonical = b'{\n "a": 2,\n "b": [\n  1\n ]\n}\n'
    assert fingerprint({"a": 2, "b": [1]}) == hashlib.sha256(canonical).hexdigest()


@pytest.mark.parametrize(
    ("schema", "type_", "message"),
    [
        ("plan/1", CostGraph, "is a plan (pipecompile/plan/1), but a cost graph is expected; name"),
        (
            "cost-graph/1",
            Plan,
            "is a cost graph (pipecompile/cost-graph/1), but a plan is expected",
        ),
        (
            "plan/2",
            Plan,
            "is a plan of version 2 (pipecompile/plan/2), written by a newer pipecompile",
        ),
        ("device/3", Plan, "is a device (pipecompile/device/3), but a plan is expected"),
        (
            "plan/1",
            Links,
            "is a plan (pipecompile/plan/1), but a links file is expected; name a links",
        ),
        ("links/1", Plan, "is a links file (pipecompile/links/1), but a plan is expected"),
        ("other", Plan, "is an other (pipecompile/other), but a plan is expected"),
        ("plan/0", Plan, "Invalid enum value"),
    ],
)
def test_a_file_of_another_kind_or_of_a_newer_version_is_named_as_that(
    schema: str, type_: type, message: str
) -> None:
    data = encode({"schema": f"pipecompile/{schema}", "k": 4})
    with pytest.raises(FormatError, match=rf"^a\.json: {re.escape(message)}"):
        decode(data, type_, origin="a.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "truncated"),
        (b"\xff", "utf-8|invalid"),
        (b"[]", "Expected `object`"),
        (b'{"y": -1}', r"\$\.y"),
        (b'{"y": "1"}', r"\$\.y"),
        (b'{"y": true}', r"\$\.y"),
        (b'{"y": 1, "z": 2}', "unknown field `z`"),
        (b'{"x": 1}', "missing required field `y`"),
        (b'{"y": 1} x', "trailing"),
    ],
)
def test_reading_is_strict_and_names_file_and_place(data: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=rf"^point\.json: .*({message}).*; correct it"):
        decode(data, _Point, origin="point.json")


@pytest.mark.parametrize(
    ("value", "type_", "advice"),
    [
        ({"schema": "pipecompile/plan/1", "k": 4}, Plan, "wrote the file, plan again"),
        (
            {"schema": "pipecompile/cost-graph/1", "nodes": [], "tensors": [], "edges": []},
            CostGraph,
            "wrote the file, have it written again",
        ),
    ],
)
def test_fields_of_another_version_are_not_taken_for_a_mistake_alone(
    value: dict[str, object], type_: type, advice: str
) -> None:
    expected = f"; correct it, or, if another version of pipecompile {advice}"
    with pytest.raises(FormatError, match=f"{re.escape(expected)}$"):
        decode(encode(value), type_, origin="a.json")


def test_a_wrong_value_is_a_mistake_whatever_the_version() -> None:
    data = encode({"schema": "pipecompile/cost-graph/1", "nodes": 3, "tensors": []})
    with pytest.raises(FormatError, match=r"; correct it, or have it written again$"):
        decode(data, CostGraph, origin="a.json")


def test_a_file_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "point.json"
    write(path, encode(_Point(y=1)))
    write(path, encode(_Point(y=2)))
    assert read(path, _Point) == _Point(y=2)
    assert os.listdir(tmp_path) == ["point.json"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "point.json"
    write(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["point.json"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none\.json: there is no such file"):
        read(tmp_path / "none.json", _Point)
    with pytest.raises(
        FormatError, match=r"none/p\.json: cannot be written \(No such file or directory\)"
    ):
        write(tmp_path / "none" / "p.json", b"")
