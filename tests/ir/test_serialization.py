from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipecompile.errors import FormatError
from pipecompile.ir.serialization import NonNegative, Value, decode, encode, read, write


class _Point(Value, frozen=True, kw_only=True):
    y: NonNegative
    x: NonNegative = 0


def test_the_same_value_gives_the_same_bytes_with_sorted_keys() -> None:
    assert encode(_Point(y=1, x=2)) == encode(_Point(x=2, y=1)) == b'{\n "x": 2,\n "y": 1\n}\n'
    assert encode({"b": 1, "a": 2}) == encode({"a": 2, "b": 1})


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
    with pytest.raises(
        FormatError, match=r"none\.json: cannot be read \(No such file or directory\)"
    ):
        read(tmp_path / "none.json", _Point)
    with pytest.raises(
        FormatError, match=r"none/p\.json: cannot be written \(No such file or directory\)"
    ):
        write(tmp_path / "none" / "p.json", b"")
