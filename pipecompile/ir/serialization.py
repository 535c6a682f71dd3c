"""JSON in and out: strict, deterministic, and written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from pipecompile.errors import FormatError

__all__ = [
    "NonNegative",
    "Positive",
    "Value",
    "check_writable",
    "decode",
    "encode",
    "read",
    "write",
]

NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T")


class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything on disk: frozen, keyword-only, no unknown fields."""


def encode(value: Any) -> bytes:
    """The one JSON form of `value`: sorted keys, one item a line, a newline at the end."""
    compact = msgspec.json.encode(value, order="sorted")
    return msgspec.json.format(compact, indent=1) + b"\n"


def decode(data: bytes, type_: type[T], *, origin: str) -> T:
    """Reads `data` as `type_`; FormatError names `origin` and the JSON path of what is wrong."""
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{origin}: {error}; correct it, or have it written again") from error


def read(path: str | Path, type_: type[T]) -> T:
    """Reads the file at `path` as `type_`."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error
    return decode(data, type_, origin=str(path))


def check_writable(*paths: str | Path | None) -> None:
    """FormatError unless each path that is given can be written: to be asked before the work that fills it."""
    for target in (Path(path) for path in paths if path is not None):
        if target.is_dir():
            raise FormatError(f"{target}: is a folder; name a file in it")
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise FormatError(
                f"{target}: cannot be written, as the folder {target.parent} does not exist or is closed to you; "
                "make it, or name another"
            )


def write(path: str | Path, data: bytes) -> None:
    """Writes `data` to `path` in one step, so that a failure leaves the old file or none."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise FormatError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
