"""Source lines: the line of the model that runs now, or in which an error was raised."""

from __future__ import annotations

import contextlib
import sys
import traceback
from functools import cache
from pathlib import Path

import torch

from pipecompile import errors

__all__ = ["HIDDEN", "current_line", "error_line", "is_user_file", "line_text"]

# No frame of a file in these folders is a line that a user wrote.
HIDDEN = tuple(f"{Path(file or '').parent}/" for file in (torch.__file__, errors.__file__))
# Frames outside of the frame of this file, which calls the model, are not the model's.
CALLER = str(Path(__file__).with_name("recorded_forward.py"))
STANDARD_LIBRARY = Path(contextlib.__file__).parent


def current_line() -> str:
    """Return `file:line` of the innermost frame of the model, "" if there is none.

    A frame of the model is one that belongs neither to torch nor to pipecompile.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != CALLER:
        if is_user_file(frame.f_code.co_filename):
            return line_text(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def line_text(file: str, line: int) -> str:
    """Return `file:line`, the file relative to the folder that it is imported from."""
    return f"{_relative(file)}:{line}"


@cache
def is_user_file(file: str) -> bool:
    """Return whether a frame of `file` may be a line that the user wrote."""
    return not file.startswith(("<", *HIDDEN)) and Path(file).parent != STANDARD_LIBRARY


@cache
def _relative(file: str) -> str:
    """Return `file` relative to sys.path, so that it reads the same on every machine."""
    roots = [str(Path(entry or ".").resolve()) for entry in sys.path]
    best = max((root for root in roots if file.startswith(root + "/")), key=len, default="")
    return file[len(best) + 1 :] if best else Path(file).name


def error_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of the model that raised `error`, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if is_user_file(frame.filename)]
    if not user_frames:
        return ""
    return line_text(user_frames[-1].filename, user_frames[-1].lineno or 0)
