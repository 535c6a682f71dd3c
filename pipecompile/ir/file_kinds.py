"""The kind of a file, by its `schema`: serialization.py asks for it when a file cannot be read."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec

__all__ = ["kind_mismatch", "schema_of"]


class _Header(msgspec.Struct):
    """The one field that all of our files have; the others are ignored."""

    schema: str = ""


def schema_of(data: bytes) -> str:
    """Return the `schema` that a file names; empty if it names none, or is not JSON."""
    try:
        return msgspec.json.decode(data, type=_Header).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def kind_mismatch(data: bytes, type_: type[Any]) -> str | None:
    """Return the message for a file whose `schema` is not that of `type_`.

    None if it is, if it is of an older version, or if the file or the type has none.
    """
    # Only files that fail to decode come here: those of the right kind have a message of their own.
    given, expected = schema_of(data), _schema(type_)
    if expected is None or given in ("", expected):
        return None
    (kind, version), (wanted, known) = map(_kind_and_version, (given, expected))
    if kind != wanted:
        return (
            f"is {_with_article(kind)} ({given}), but {_with_article(wanted)} is expected; "
            f"name {_with_article(wanted)}"
        )
    # An older version has no message here: what could not be decoded then says why itself.
    if version > known:
        return (
            f"is {_with_article(kind)} of version {version} ({given}), "
            f"written by a newer pipecompile than this one, which reads version {known}; "
            "update pipecompile, or have the file written again"
        )
    return None


def _schema(type_: type[Any]) -> str | None:
    """Return the `schema` of `type_`'s files, such as pipecompile/plan/1; None without one."""
    if not isinstance(type_, type) or not issubclass(type_, msgspec.Struct):
        return None
    schemas = get_args(get_type_hints(type_).get("schema"))
    return schemas[0] if schemas else None


def _kind_and_version(schema: str) -> tuple[str, int]:
    """Return (cost graph, 1) for pipecompile/cost-graph/1; version 0 if there is none."""
    name, _, version = schema.removeprefix("pipecompile/").partition("/")
    if not version.isdecimal():
        version = "0"
    return name.replace("-", " "), int(version)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1] in set('aeiou') else 'a'} {noun}"
