"""What has changed in a model since it was compiled, in the words of the model and not of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.graph.attributes import PLAIN, REGISTERED_TABLES, is_same_value

__all__ = ["BACKWARD_HOOKS", "changed_parameter", "changed_setting"]

# A setting that is gone or new; None would be a value that a setting may have.
ABSENT = object()
HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
COMPILED = "_compiled_call_impl"
THEN = "when the model was compiled"
ADVICE = "compile the model again"
CHECKPOINTING = "checkpointing"
"""In the names by which libraries switch it: `gradient_checkpointing`, `grad_checkpointing`."""


def changed_setting(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    """Return which setting of a module, by path, has another value now, and what to do; None if all
    are the same.
    """
    pairs = {
        name: (before.get(name, ABSENT), after.get(name, ABSENT))
        for name in before.keys() | after.keys()
    }
    different = [name for name, pair in pairs.items() if not is_same_value(*pair)]
    if not different:
        return None

    # A switch says most: it may come with hooks. What a module has that is new or gone says less
    # than the outermost table of modules that it is new in, and so do the tables of another module.
    def order(name: str) -> tuple[bool, bool, bool, int, str]:
        pair = pairs[name]
        is_absent, is_table = any(value is ABSENT for value in pair), name.endswith("_modules")
        return not _is_plain(*pair), is_absent, not is_table, name.count("."), name

    name = min(different, key=order)
    return _text(name, *pairs[name])


def changed_parameter(name: str, now: nn.Parameter, trained: bool, dtype: torch.dtype) -> str:
    """Return what is new about a parameter, and what to do: it was `trained` or not, and of type
    `dtype`, when the model was compiled.
    """
    if now.dtype != dtype:
        return (
            f"{name} is {now.dtype}, but was {dtype} {THEN}, and stages send and keep what is of "
            f"that type; convert the model first, and {ADVICE}"
        )
    required = "requires a gradient" if now.requires_grad else "requires no gradient"
    did = "did" if trained else "did not"
    return f"{name} {required}, but {did} {THEN}; {ADVICE}"


def _text(name: str, before: Any, after: Any) -> str:
    path, _, last = name.rpartition(".")
    if last in REGISTERED_TABLES:
        return _text_of_table(path, REGISTERED_TABLES[last], before, after)
    if last in HOOKS:
        return (
            f"{path or 'the model'} has other forward hooks than {THEN}, and the graph has those "
            f"that were there; {ADVICE}"
        )
    if last in BACKWARD_HOOKS:
        return (
            f"{path or 'the model'} has a backward hook that was not there {THEN}, and is taken "
            "apart, so it would not be called; register it on a module of torch.nn, or make the "
            f"module one node (leaf), and {ADVICE}"
        )
    if CHECKPOINTING in last and isinstance(after, bool):
        return (
            f"{name} is {after}, but was {before} {THEN}: set gradient checkpointing before that, "
            "or leave it off and let the plan say what is recomputed (recompute=)"
        )
    if last == COMPILED:
        name = f"the code that torch.compile made of {path or 'the model'}"
    if before is ABSENT or after is ABSENT:
        what = f"{name} was not there" if before is ABSENT else f"{name} is gone, but was there"
    elif _is_plain(before, after):
        what = f"{name} is {after!r}, but was {before!r}"
    else:
        what = f"{name} is or holds something else than"
    return (
        f"{what} {THEN}, and the graph may have that in it; {ADVICE}, or keep what changes in a "
        "buffer and write to it in place"
    )


def _text_of_table(
    path: str, kind: str, before: Mapping[str, Any], after: Mapping[str, Any]
) -> str:
    """Return which entry of a table of a module, each of which is a `kind`, is another one now."""
    name = next(_changed_names(before, after))
    full, old, new = f"{path}.{name}".lstrip("."), before.get(name), after.get(name)
    if old is None:
        return f"{full} is a {kind} that was not there {THEN}; {ADVICE}"
    if new is None:
        return f"{full} is gone, but was a {kind} {THEN}; {ADVICE}"
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if (was := _layout(old)) != (now := _layout(new)):
            return f"{full} is {now}, but was {was} {THEN}; {ADVICE}"
        return (
            f"{full} is another tensor than {THEN}, and stages have that one; write to it in place "
            f"(copy_), or {ADVICE}"
        )
    return f"{full} is another {kind} than {THEN}, or stands at another place; {ADVICE}"


def _changed_names(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what is another object; all names, if only their order is another."""
    names = dict.fromkeys((*before, *after))
    # Where a list of modules is put into another order, each object is there under its name, and
    # only the names' order tells: then any of them will do.
    yield from (name for name in names if before.get(name) is not after.get(name))
    yield from names


def _is_plain(*values: Any) -> bool:
    return all(isinstance(value, PLAIN) for value in values)


def _layout(tensor: Tensor) -> str:
    return f"a tensor {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
