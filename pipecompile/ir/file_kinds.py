"""The kind of a file, by its `schema`: serialization.py asks for it when a file cannot be read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

import msgspec

__all__ = ["kind_mismatch", "remedy", "schema_of", "written_by"]


_WRITTEN_BY = {
    "plan": "`pipecompile plan TARGET -o FILE` writes a plan",
    "cost graph": "`pipecompile profile TARGET -o FILE` writes a cost graph",
    "links file": "`pipecompile links -o FILE` writes a links file",
    "run": "`Pipeline.record()` records a run, and its `save` writes it",
    "cluster": "a cluster file is written by hand (docs/reference/formats.md)",
    "schedule problem": "a schedule problem is written by hand (docs/how-to/alone.md)",
}


class _Header(msgspec.Struct):
    """The one field that all of our files have; the others are ignored."""

    schema: str = ""


def schema_of(data: bytes) -> str:
    """Return the `schema` that a file names; empty if it names none, or is not JSON."""
    try:
        return msgspec.json.decode(data, type=_Header).schema
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""


def kind_mismatch(data: bytes, *types: type[Any]) -> str | None:
    """Return the message for a file whose `schema` is not that of any of `types`.

    None if it is, if it is of an older version, or if the types have none. A file without one is
    not of another kind if it has some field of `types`.
    """
    given = schema_of(data)
    known = dict(_kind_and_version(schema) for schema in map(_schema, types) if schema is not None)
    if known and data.lstrip()[:1] == b"[":
        return f"is a list, but {' or '.join(map(_with_article, known))} is expected; name one"
    if known and data.lstrip()[:1] not in (b"{", b""):
        return f"is not JSON, but {' or '.join(map(_with_article, known))} is expected; name one"
    if known and not given and _has_no_field_of(data, types):
        wanted = " or ".join(map(_with_article, known))
        return f"is no file of pipecompile, but {wanted} is expected; name {wanted}"
    if not given or not known:
        return None
    kind, version = _kind_and_version(given)
    if kind not in known:
        wanted = " or ".join(map(_with_article, known))
        return f"is {_with_article(kind)} ({given}), but {wanted} is expected; name {wanted}"
    # An older version has no message here: what could not be decoded then says why itself.
    if version > known[kind]:
        return (
            f"is {_with_article(kind)} of version {version} ({given}), "
            f"written by a newer pipecompile than this one, which reads version {known[kind]}; "
            "update pipecompile, or have the file written again"
        )
    return None


def written_by(*types: type[Any]) -> str:
    """Return what writes files of these types, for a path that has none; empty if that is open."""
    schemas = filter(None, map(_schema, types))
    kinds = (_kind_and_version(schema)[0] for schema in schemas)
    return "; ".join(_WRITTEN_BY[kind] for kind in kinds if kind in _WRITTEN_BY)


def _has_no_field_of(data: bytes, types: Sequence[type[Any]]) -> bool:
    """Return whether the file is a mapping without any field of `types`.

    One that has some is a file of that kind that somebody wrote, with a mistake in it.
    """
    try:
        # Raw leaves the values undecoded: a plan may be large, and only its keys are asked for.
        keys = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).keys()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    structs = (type_ for type_ in types if _schema(type_) is not None)
    return keys.isdisjoint(
        field.encode_name for struct in structs for field in msgspec.structs.fields(struct)
    )


def remedy(data: bytes, fault: str) -> str:
    """Return what to do about the `fault` of a file that is of the right kind."""
    schema = schema_of(data)
    # A field may have been added or renamed since: then nobody has made a mistake in the file.
    if not schema or not any(part in fault for part in ("unknown field", "missing required field")):
        return "correct it, or have it written again"
    anew = "plan again" if schema.startswith("pipecompile/plan/") else "have it written again"
    return f"correct it, or, if another version of pipecompile wrote the file, {anew}"


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
    # The only name that is a plural: "a links" would be no English.
    return "links file" if name == "links" else name.replace("-", " "), int(version)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[:1] in set('aeiou') else 'a'} {noun}"
