"""Everything this package raises on purpose, in one tree.

PipecompileError
├── InputError            an argument or a batch is not what the plan or the call expects
├── FormatError           a file is damaged or of another version; the message carries its JSON path
├── CaptureError          the model cannot be captured; the message names the module and the line
├── InfeasibleError       no plan satisfies what was asked for; the message says by how much
├── StalePlanError        a plan was made for another model, or with other options
├── StaleProfileError     costs in a file were made for another model, or for other shapes
├── ScheduleError         a schedule is incomplete, out of order or can deadlock
└── RankFaultError        another rank failed, died or hangs; the message says which one, and where

Each message says what was given, what was expected and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = [
    "CaptureError",
    "FormatError",
    "InfeasibleError",
    "InputError",
    "PipecompileError",
    "RankFaultError",
    "ScheduleError",
    "StalePlanError",
    "StaleProfileError",
    "reason_of",
    "unknown",
]


class PipecompileError(Exception):
    """Base of every error that this package raises on purpose."""


class InputError(PipecompileError, ValueError):
    """An argument or a batch is not what was expected."""


class FormatError(PipecompileError, ValueError):
    """A file does not follow its format; the message carries the JSON path."""


class CaptureError(PipecompileError):
    """A model cannot be captured as a graph that is known to be right."""


class InfeasibleError(PipecompileError):
    """No plan satisfies the constraints; the message says which one and by how much.

    `reason` is the message without the `advice` at its end, which suits the options that were asked
    for, and not one setting of several that were tried.
    """

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(f"{reason}; {advice}" if advice else reason)
        self.reason = reason
        self.advice = advice


class StalePlanError(PipecompileError):
    """A plan was made for another model, other shapes or other options."""


class StaleProfileError(PipecompileError):
    """Costs in a file were made for another model or other shapes."""


class ScheduleError(PipecompileError):
    """A schedule is incomplete, out of order or can deadlock."""


class RankFaultError(PipecompileError, RuntimeError):
    """A step cannot go on because of a rank; the message names it, its action and who waited."""


def reason_of(error: BaseException) -> str:
    """Return the first line of the message of an error, without torch's hint how to debug it."""
    return str(error).strip().split("\n")[0].partition(" Hint: ")[0]


def unknown(
    what: str, name: object, known: Iterable[str], *, listed_in: str | None = None
) -> InputError:
    """Return the error that says that `name` is no `what`, suggests the nearest name, and lists
    all, or says where they are listed.

    >>> print(unknown("schedule", "1f1v", ["gpipe", "1f1b"]))
    unknown schedule '1f1v'; did you mean '1f1b'? choose from gpipe, 1f1b
    """
    names = list(known)
    by_lowercase = {name.lower(): name for name in names}
    given = str(name).lower()
    # "var" is too far from "variance" to be a misspelling of it, but it begins it.
    begun = [known_name for known_name in by_lowercase if given and known_name.startswith(given)]
    nearest = begun or get_close_matches(given, by_lowercase, n=1)
    meant = " or ".join(repr(by_lowercase[known_name]) for known_name in nearest)
    hint = f" did you mean {meant}?" if nearest else ""
    if listed_in is not None:
        return InputError(f"unknown {what} {name!r};{hint} names are those of {listed_in}")
    return InputError(f"unknown {what} {name!r};{hint} choose from {', '.join(names)}")
