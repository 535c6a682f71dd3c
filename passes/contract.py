"""What a pass is: a graph in, the same graph rewritten, and a contract that is checked on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import fx

__all__ = ["Pass", "apply"]


class Pass(Protocol):
    """One rewrite. Its options are its fields; `requires` and `ensures` assert what its docstring promises."""

    def requires(self, graph: fx.Graph) -> None:
        """AssertionError unless the pass may run on `graph`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites `graph` in place."""

    def ensures(self, graph: fx.Graph) -> None:
        """AssertionError unless the pass did what it promises."""


def apply(graph: fx.Graph, passes: Sequence[Pass]) -> None:
    """Runs `passes` in order. A broken contract is a defect of ours: the error says after which passes."""
    done: list[str] = []
    for rewrite in passes:
        name = type(rewrite).__name__
        try:
            rewrite.requires(graph)
            rewrite(graph)
            rewrite.ensures(graph)
            graph.lint()
        except AssertionError as error:
            raise AssertionError(f"pass {name} failed after passes {done}: {error}") from error
        done.append(name)
