"""JSON in and out: strict, deterministic, and written whole or not at all.

Every file of pipecompile passes through here.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec

from pipecompile.errors import FormatError
from pipecompile.ir.file_kinds import kind_mismatch, remedy, written_by
from pipecompile.ir.layout import layout

__all__ = [
    "FileValue",
    "NonNegative",
    "Positive",
    "Value",
    "check_writable",
    "decode",
    "encode",
    "fingerprint",
    "read",
    "read_bytes",
    "write",
]

# msgspec checks types and bounds when it decodes a file, not when code makes a value. So code may
# make an Amount of negative bytes for a difference, but a file with one is refused.
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
T = TypeVar("T")


# Unknown fields are forbidden: a misspelled optional field would otherwise mean its default.
class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything on disk: frozen, keyword-only, no unknown fields."""


def encode(value: Any) -> bytes:
    """Return `value` as JSON for a file: sorted keys, laid out by layout.py, and a newline."""
    # The way through JSON turns structs, tuples and enums into dicts, lists and scalars.
    return layout(msgspec.json.decode(_sorted(value))).encode() + b"\n"


def fingerprint(value: Any) -> str:
    """Return the SHA-256 of `value` as JSON with sorted keys, whatever the layout of files."""
    # Plans are committed with their fingerprints. So this text must never change, while the
    # layout of files may.
    return hashlib.sha256(msgspec.json.format(_sorted(value), indent=1) + b"\n").hexdigest()


def _sorted(value: Any) -> bytes:
    return msgspec.json.encode(value, order="sorted")


def decode(data: bytes, type_: type[T], *, origin: str) -> T:
    """Return the value of `type_` in `data`.

    FormatError, which begins with `origin`, says what is wrong: a file of another kind or of a
    newer version is named as that, else the JSON path of the first wrong field is given.
    """
    try:
        return msgspec.json.decode(data, type=type_)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        is_json = isinstance(error, msgspec.ValidationError)
        fault = str(error) if is_json else f"is not valid JSON ({error})"
        reason = kind_mismatch(data, type_) or f"{fault}; {remedy(data, fault)}"
        raise FormatError(f"{origin}: {reason}") from error


def read(path: str | Path, type_: type[T]) -> T:
    """Return the value of `type_` in the file at `path`.

    FormatError as in `decode`, or if the file cannot be read.
    """
    return decode(read_bytes(path, type_), type_, origin=str(path))


def read_bytes(path: str | Path, *types: type[Any]) -> bytes:
    """Return what is in the file at `path`; FormatError if it cannot be read, which says what
    writes files of these `types`.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError as error:
        how = written_by(*types)
        raise FormatError(f"{path}: there is no such file{how and f'; {how}'}") from error
    except OSError as error:
        raise FormatError(f"{path}: cannot be read ({error.strerror})") from error


def check_writable(*paths: str | Path | None) -> None:
    """Raise FormatError unless each path that is not None can be written.

    Commands call it before the work whose result they write.
    """
    for target in (Path(path) for path in paths if path is not None):
        if target.is_dir():
            raise FormatError(f"{target}: is a folder; name a file in it")
        # To open the file would empty it, or leave an empty one if the work then fails.
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise FormatError(
                f"{target}: cannot be written, as the folder {target.parent} does not exist "
                "or cannot be written to; make it, or name another"
            )


def write(path: str | Path, data: bytes) -> None:
    """Write `data` to `path` in one step, so that a failure leaves the old file or none."""
    # The temporary file is in the same folder, since a rename is atomic only within a file system.
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise FormatError(f"{path}: cannot be written ({error.strerror})") from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, target)
    # BaseException, so that Ctrl-C leaves no temporary file either.
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


class FileValue(Value, frozen=True):
    """A value that has a file of its own."""

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the value in the file at `path`; FormatError says what is wrong with it."""
        return read(path, cls)

    def save(self, path: str | Path) -> None:
        """Write the value to `path`: the old file stays if that fails."""
        write(path, encode(self))
