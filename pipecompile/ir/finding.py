"""What a check of a plan says: each thing that was looked at, and whether it is as it should be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pipecompile.ir.serialization import Value

__all__ = ["CheckedPlan", "Code", "Finding"]

Code = Literal[
    "schedule",
    "stage",
    "cap",
    "edited",
    "step",
    "imbalance",
    "bubble",
    "memory",
    "relayed",
    "recompute",
    "stale",
    "nodes",
    "drift",
]
"""schedule: incomplete, out of order or deadlocking; stage: no plan with these options has such a
stage; cap: a rank is over the cap that the plan was made for; edited: the file contradicts itself;
stale: the model or its costs have changed; nodes: a part of the model that has; drift: a part whose
time has. The others are limits that were given to the check.
"""


class Finding(Value, frozen=True, kw_only=True):
    """One thing that was checked. `value` and `limit` are bytes for memory and what is relayed, ns
    for the step, a ratio for imbalance, bubble and drift, and a count for nodes.
    """

    code: Code
    message: str
    passed: bool = False
    rank: int | None = None
    value: float | str | None = None
    limit: float | str | None = None


class CheckedPlan(Value, frozen=True, kw_only=True):
    """The result of `pipecompile check`: the path of a plan, all that was checked of it, and of
    that what did not pass. A plan is `sound` if all did.
    """

    plan: str
    sound: bool
    findings: tuple[Finding, ...]
    checks: tuple[Finding, ...]

    @classmethod
    def of(cls, path: str, checks: Sequence[Finding]) -> CheckedPlan:
        """Return the result for the plan in the file at `path`."""
        failed = tuple(finding for finding in checks if not finding.passed)
        return cls(plan=path, sound=not failed, findings=failed, checks=tuple(checks))
