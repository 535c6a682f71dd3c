"""The sections of a model: what each symbol of a layout stands for.

A decoder has E (what is computed before its layers), t0, t1, … (its layers), m0, … (MTP layers, if
there are some) and L (norm, head and loss). Hybrid patterns have halves: a0 and p0 of layer 0.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from pipecompile.errors import InputError
from pipecompile.layouts.layers import LayerList, lies_in

__all__ = ["ATTENTION", "MLP", "Section", "in_halves", "parameter_modules", "sections_of"]

ATTENTION, MLP = "a", "p"


class Section(NamedTuple):
    """A symbol, and its number among all of its kind."""

    symbol: str
    number: int = 0

    def __str__(self) -> str:
        """Return its name for messages, such as "layer 3"."""
        names = {
            "E": "E (the embedding)",
            "L": "L (norm, head and loss)",
            "t": f"layer {self.number}",
            "m": f"MTP layer {self.number}",
            ATTENTION: f"the attention of layer {self.number}",
            MLP: f"the MLP of layer {self.number}",
        }
        return names[self.symbol]


def parameter_modules(names: Iterable[str]) -> frozenset[str]:
    """Return the paths of the modules that have the parameters called `names` of their own."""
    return frozenset(name.rpartition(".")[0] for name in names)


def sections_of(
    modules: Sequence[str], with_parameters: Collection[str], layers: LayerList
) -> list[Section | None]:
    """Return the section of each entry of `modules`, which are those of nodes in the order of the
    forward.

    None is for what no symbol names: operations without parameters outside of the layers, such as
    a mask, up to the end of the last layer. These go where their inputs are.
    """
    found = [layers.layer_of(module) for module in modules]
    # For wte, mask, h.0, h.1, ln_f, head: E, None, t0, t1, L, L.
    inside = [place for place, layer in enumerate(found) if layer is not None]
    first, end = inside[0], inside[-1] + 1
    last_layer = max(place for place, layer in enumerate(found) if layer and layer[0] == "t")
    embedding = {module for module in modules[:first] if module in with_parameters}
    sections: list[Section | None] = []
    for place, (module, layer) in enumerate(zip(modules, found, strict=True)):
        if layer is not None:
            sections.append(Section(*layer))
        elif module in embedding and (place < first or not lies_in(layers.container, module)):
            # Also where it is called once more, as by MTP layers.
            sections.append(Section("E"))
        elif place >= end or (place > last_layer and module in with_parameters):
            sections.append(Section("L"))
        else:
            sections.append(None)
    return sections


def in_halves(
    modules: Sequence[str], sections: Sequence[Section | None], layers: LayerList
) -> list[Section | None]:
    """Return the sections with each layer as two: its attention, and its MLP with the norm before.

    InputError for a layer in which attention does not come before an MLP.
    """
    halves: list[Section | None] = list(sections)
    for layer in sorted({s for s in sections if s is not None and s.symbol == "t"}):
        places = [place for place, section in enumerate(sections) if section == layer]
        path = layers.layers[layer.number]
        begin = _mlp_begin([modules[place].removeprefix(path) for place in places])
        if begin is None:
            raise InputError(
                f"a hybrid pattern needs attention before an MLP, which {layer} has not by the "
                "names of its modules; choose another format"
            )
        for order, place in enumerate(places):
            halves[place] = Section(ATTENTION if order < begin else MLP, layer.number)
    return halves


def _mlp_begin(modules: Sequence[str]) -> int | None:
    """Return which of a layer's nodes is the first of its MLP half; None if there is none."""
    is_mlp = [bool(re.search(r"mlp|ffn|feed_?forward|moe|expert", name)) for name in modules]
    is_attention = [bool(re.search(r"att", name)) for name in modules]
    if True not in is_mlp or True not in is_attention:
        return None
    begin = is_mlp.index(True)
    # The last place of attention lies behind the first one of the MLP: the two run in parallel,
    # or in the other order, and cannot be parted.
    if begin < len(modules) - 1 - is_attention[::-1].index(True):
        return None
    # The norm of the MLP, if it is what runs just before: ln_2, post_attention_layernorm.
    norm = modules[begin - 1]
    while begin and modules[begin - 1] == norm and re.search(r"norm|ln", norm.rpartition(".")[2]):
        begin -= 1
    return begin if begin else None
