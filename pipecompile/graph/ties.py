"""Tied parameters: one tensor that several stages read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, nn

from pipecompile.graph.propagation import named_state
from pipecompile.graph.stages import stage_of

__all__ = ["Tie", "reads_of", "ties_of"]


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter or buffer by its first name, and the stages that read it; the first of them owns it.

    Every stage that reads it holds a copy; their gradients are summed over `stages`, so the copies stay equal.
    """

    name: str
    stages: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The stage that answers for it in state dicts and norms: the earliest."""
        return self.stages[0]


def ties_of(module: nn.Module, graph: fx.Graph, canonical: Mapping[str, str]) -> dict[str, Tie]:
    """Who reads what. Requires `meta["stage"]` (place); ensures one owner for every tensor that is read.

    `canonical` maps every name of a tensor to its first.
    """
    stages: dict[str, set[int]] = {}
    for node in graph.nodes:
        for name in reads_of(module, node):
            stages.setdefault(canonical.get(name, name), set()).add(stage_of(node))
    return {name: Tie(name, tuple(sorted(where))) for name, where in sorted(stages.items())}


def reads_of(module: nn.Module, node: fx.Node) -> list[str]:
    """The names of the parameters and buffers that `node` itself reads."""
    if node.op == "get_attr":
        return [str(node.target)]
    if node.op != "call_module":
        return []
    return [
        f"{node.target}.{name}" for name, _ in named_state(module.get_submodule(str(node.target)))
    ]
