"""The contract of a pass: it rewrites a graph in place and is checked before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import fx

__all__ = ["Pass", "apply_passes"]


class Pass(Protocol):
    """One rewrite of a graph.

    Options are fields of the class. `requires` and `ensures` assert what its docstring promises.
    """

    def requires(self, graph: fx.Graph) -> None:
        """Raise AssertionError unless the pass may run on `graph`."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite `graph` in place."""

    def ensures(self, graph: fx.Graph) -> None:
        """Raise AssertionError unless the pass did what it promises."""


def apply_passes(graph: fx.Graph, passes: Sequence[Pass]) -> None:
    """Run `passes` in order.

    A broken contract is a defect of pipecompile: the AssertionError says after which passes.
    """
    done: list[str] = []
    for rewrite in passes:
        name = type(rewrite).__name__
        try:
            rewrite.requires(graph)
            rewrite(graph)
            rewrite.ensures(graph)
            # Here and not at the end, so that the pass that
            # broke the graph is the one that is named.
            graph.lint()
        # Only assertions: an InputError of a pass is about the user's model, and goes on as it is.
        except AssertionError as error:
            raise AssertionError(f"pass {name} failed after passes {done}: {error}") from error
        done.append(name)
