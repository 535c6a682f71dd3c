"""The line of the model that runs now."""

from __future__ import annotations

import contextlib
import sys
import traceback
from functools import cache
from pathlib import Path

import torch

import pipecompile.graph.propagation  # noqa: F401

__all__ = ["HIDDEN", "is_users", "place", "source", "source_of"]

# Frames of these folders are never the line that a user wrote.
HIDDEN = tuple(
    str(Path(sys.modules[name].__file__ or "").parent)
    for name in (torch.__name__, "pipecompile.graph.propagation", "pipecompile.errors")
)
CALLER = str(Path(__file__).with_name("capture.py"))  # whose own callers are not the model
STANDARD_LIBRARY = Path(contextlib.__file__).parent


def source() -> str:
    """`file:line` of the innermost frame of the model that is neither torch's nor ours, if there is one."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != CALLER:
        if is_users(frame.f_code.co_filename):
            return place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def place(file: str, line: int) -> str:
    """`file:line`, the file as it can be imported."""
    return f"{_relative(file)}:{line}"


@cache
def is_users(file: str) -> bool:
    """Whether a frame of `file` may be the line that a user wrote."""
    return not file.startswith(("<", *HIDDEN)) and Path(file).parent != STANDARD_LIBRARY


@cache
def _relative(file: str) -> str:
    """`file` as importable from sys.path, so that it reads the same on every machine."""
    roots = [str(Path(entry or ".").resolve()) for entry in sys.path]
    best = max((root for root in roots if file.startswith(root + "/")), key=len, default="")
    return file[len(best) + 1 :] if best else Path(file).name


def source_of(error: BaseException) -> str:
    """`file:line` of the innermost frame of the model in which `error` was raised, if there is one."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return place(frames[-1].filename, frames[-1].lineno or 0) if frames else ""
