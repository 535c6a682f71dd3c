"""Device constants: a graph captured on the meta device makes its tensors where it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

__all__ = ["LeaveMeta"]


@dataclass(frozen=True)
class LeaveMeta:
    """Puts `device` in the place of the meta device, which `torch.arange(n, device=x.device)` of a
    model on the meta device has left in the graph as a constant.

    Requires nothing. Ensures that no argument of a node is the meta device.
    """

    device: torch.device

    def requires(self, graph: fx.Graph) -> None:
        """Any graph will do."""

    def __call__(self, graph: fx.Graph) -> None:
        """Replace the constants."""
        for node in graph.nodes:
            # A device may lie in a list or a dictionary of arguments too.
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), self._placed)

    def ensures(self, graph: fx.Graph) -> None:
        """No constant is the meta device."""
        for node in graph.nodes:
            map_aggregate((node.args, node.kwargs), _check_not_meta)

    def _placed(self, argument: Any) -> Any:
        return self.device if _is_meta(argument) else argument


def _is_meta(argument: Any) -> bool:
    return isinstance(argument, torch.device) and argument.type == "meta"


def _check_not_meta(argument: Any) -> Any:
    assert not _is_meta(argument), "a constant is the meta device"
    return argument
