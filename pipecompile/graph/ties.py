"""Tied parameters: a tensor that several stages read.

Code generation copies such a tensor to each of its stages; the runtime sums the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx, nn

from pipecompile.graph.loss_module import called_path
from pipecompile.graph.model_state import named_state
from pipecompile.graph.stages import stage_of

__all__ = ["Tie", "names_of_read_state", "ties_of"]


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter or buffer, by its first name, and the stages that read it in ascending order.

    Every one of the stages holds a copy. Gradients are summed over `stages` before the optimizer's
    step, so the copies stay equal.
    """

    name: str
    stages: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The earliest stage: the tensor is in its state dict and counts in its gradient norm."""
        return self.stages[0]


def ties_of(module: nn.Module, graph: fx.Graph, canonical: Mapping[str, str]) -> dict[str, Tie]:
    """Return, by first name, a tie for every parameter and buffer that the graph reads.

    `canonical` maps every name of a tensor to its first name. Requires `meta["stage"]` (Place).
    """
    # A tensor that one stage alone reads has an entry too, since it has an owner.
    stages: dict[str, set[int]] = {}
    for node in graph.nodes:
        for name in names_of_read_state(module, node):
            stages.setdefault(canonical.get(name, name), set()).add(stage_of(node))
    return {name: Tie(name, tuple(sorted(members))) for name, members in sorted(stages.items())}


def names_of_read_state(module: nn.Module, node: fx.Node) -> list[str]:
    """Return the names of the parameters and buffers that `node` itself reads; those of the loss
    are read by the output node.
    """
    if node.op == "get_attr":
        return [str(node.target)]
    path = called_path(node)
    if path is None:
        return []
    return [f"{path}.{name}" for name, _ in named_state(module.get_submodule(path))]
