"""A layout as a value: what a framework's words say of each stage, before a model is known."""

from __future__ import annotations

from dataclasses import dataclass

from pipecompile.ir.plan import LayoutFormat

__all__ = ["BEGINNING", "END", "HYBRID_ATTENTION", "HYBRID_MLP", "NODE", "SYMBOLS", "Layout"]

SYMBOLS = {
    "E": "embedding",
    "t": "decoder",
    "m": "mtp",
    "L": "loss",
}
"""Megatron's symbols, and the words that it has for them in nested lists."""
HYBRID_ATTENTION, HYBRID_MLP = "*+D", "-E"
"""Megatron's symbols for the halves of a layer in hybrid patterns."""
NODE = "%"
"""What begins the name of a node where modules are named, as in %view_3: a module may have the same
name.
"""
BEGINNING, END = "BEGINNING", "END"
"""The points of a module at which torch's `split_spec` cuts."""


@dataclass(frozen=True)
class Layout:
    """The stages of a layout, each with its entries.

    An entry is, by `format`, a symbol (`E` `t` `m` `L`; halves of layers in `megatron-hybrid`; only
    `t` in `vllm` and `sglang`), or the path of a module (`torchtitan`, `device-map`, `json`) or %
    and the name of a node. In a `split-spec` the first stage has no entries, and each other one has
    two: the module where it begins, and `BEGINNING` or `END` of that module.
    """

    format: LayoutFormat
    stages: tuple[tuple[str, ...], ...]

    @property
    def k(self) -> int:
        """The number of stages."""
        return len(self.stages)
