"""Cost graphs of small decoders, as captured ones look, for tests of layouts."""

from __future__ import annotations

from itertools import pairwise

from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor

__all__ = ["decoder"]

_LAYER = ("norm1", "attention", "", "norm2", "mlp", "")  # "": a residual addition


def decoder(layers: int, *, mtp: int = 0, container: str = "layers") -> CostGraph:
    """Return a decoder: a mask, an embedding, layers, MTP layers, then norm, head and loss.

    Each node takes another time; residuals skip the attention and the MLP.
    """
    names: list[tuple[str, str]] = [("tokens", ""), ("mask", ""), ("embed", "embed"), ("drop", "")]
    for path in (
        *(f"{container}.{index}" for index in range(layers)),
        *(f"mtp.{index}" for index in range(mtp)),
    ):
        for place, part in enumerate(_LAYER):
            module = f"{path}.{part}".rstrip(".")
            names.append((f"{path}_{part or 'add'}{place}".replace(".", "_"), module))
    names += [("norm", "norm"), ("head", "head"), ("loss", ""), ("output", "")]
    order = [name for name, _ in names]
    edges = {(a, b) for a, b in pairwise(order) if "mask" not in (a, b)} | {("tokens", "mask")}
    edges |= {("tokens", "embed"), ("tokens", "loss")}  # the labels are the tokens
    for place, (name, _) in enumerate(names):
        if "attention" in name:
            edges.add(("mask", name))
        if "add" in name:
            edges.add((order[place - 3], name))
    parameters = [
        Parameter(name=f"{module}.weight", bytes=4, trainable=True)
        for name, module in names
        if module and not name.split("_")[-1].startswith("add")
    ]
    known = {parameter.name for parameter in parameters}
    return CostGraph(
        nodes=tuple(
            Node(
                name=name,
                forward_ns=10 + index % 7,
                backward_ns=20 + index % 5,
                parameter_bytes=0,
                saved_bytes=0,
                group="inputs" if name == "tokens" else None,
                module=module,
                parameters=(f"{module}.weight",) if f"{module}.weight" in known else (),
            )
            for index, (name, module) in enumerate(names)
        ),
        tensors=tuple(
            Tensor(
                producer=name,
                consumers=tuple(b for b in order if (name, b) in edges),
                bytes=4,
                gradient_bytes=4 * (name not in ("tokens", "mask")),
            )
            for name in order
            if any(a == name for a, _ in edges)
        ),
        parameters=tuple(parameters),
    )
