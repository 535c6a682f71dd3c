"""Stages that run copies of cheap nodes, against the unsplit model and a model without sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor, fx, nn

import pipecompile
from pipecompile.codegen.stages import StageModule, emit
from pipecompile.cost_models.flops import Flops
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.copied_nodes import stages_of_copies
from pipecompile.ir.links import FREE
from pipecompile.partition.cheap_nodes import with_cheap_nodes_copied
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.profiling.profile import profile

WIDTH = 6
# Each makes a value of shape (WIDTH,) or (rows, WIDTH) from one that lies there already.
CHEAP: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "view": lambda value: value.unsqueeze(0).squeeze(0),
    "expanded": lambda value: value[..., :1].expand(value.shape),
    "mask": lambda value: value > 0.5,
    "double": lambda value: value.double() * 2,
    "flipped": lambda value: value.flip(-1),
}


class Shared(nn.Module):
    """Values without a gradient, made of positions, a buffer and the input, that layers read.

    `made` names for each value what it is made by, and of which earlier one; `read` says which of
    them each layer reads.
    """

    def __init__(self, made: Sequence[tuple[str, int]], read: Sequence[int]) -> None:
        super().__init__()
        self.made, self.read = made, read
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in read)
        self.register_buffer("frequencies", torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values = [torch.arange(WIDTH) / WIDTH, self.frequencies, x.detach() > 0]
        for name, source in self.made:
            values.append(CHEAP[name](values[source].float()))
        hidden = x
        for layer, index in zip(self.layers, self.read, strict=True):
            hidden = torch.tanh(layer(hidden)) * values[index].float()
        return hidden


@st.composite
def shared_models(draw: st.DrawFn) -> Shared:
    made = [
        (draw(st.sampled_from(sorted(CHEAP))), draw(st.integers(0, 2 + index)))
        for index in range(draw(st.integers(1, 5)))
    ]
    read = draw(st.lists(st.integers(0, 2 + len(made)), min_size=3, max_size=4))
    return Shared(made, read)


def run(stages: Sequence[StageModule], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the output of stages one after the other, and the gradients of their weights."""
    values: Sequence[Tensor] = [x]
    for stage in stages:
        values = stage.module(*values)
    weights = [p for stage in stages for p in stage.module.parameters()]
    distinct = list({id(weight): weight for weight in weights}.values())
    return values[0], list(torch.autograd.grad(values[0].sum(), distinct))


@given(shared_models(), st.integers(0, 5))
@settings(max_examples=10)
def test_stages_with_copies_give_what_the_model_gives(model: Shared, cut_index: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, WIDTH)
    call = Arguments((x,), {})
    found = capture(model, call)
    module = found.instantiate(call)
    apply_passes(module.graph, [Group()])
    costs = profile(module, [x], Flops())
    # Nothing that may be copied takes any time, so all of it is.
    free = (replace(n, forward_ns=0) if n.is_copyable else n for n in costs.nodes)
    copied = with_cheap_nodes_copied(replace(costs, nodes=tuple(free)), 3, FREE).copied
    wanted = model(x)
    parameters = [p for layer in model.layers for p in layer.parameters()]
    gradients = torch.autograd.grad(wanted.sum(), parameters)
    names = [node.name for node in module.graph.nodes if node.op != "get_attr"]
    starts = [index for index, name in enumerate(names) if name.startswith("layers_")]
    cuts = list(combinations(starts, 2))
    first, second = cuts[cut_index % len(cuts)]
    assignment = {name: (i >= first) + (i >= second) for i, name in enumerate(names)}
    expected = stages_of_copies(module.graph, assignment, copied)
    stages = emit(module, assignment, copied=copied)
    got, got_gradients = run(stages, x)
    assert torch.equal(got, wanted)
    assert all(map(torch.equal, got_gradients, gradients))
    for name, where in expected.items():
        nodes = [(stage.index, node) for stage in stages for node in stage.module.graph.nodes]
        called = {index for index, node in nodes if node.op.startswith("call") and _is(node, name)}
        assert called == where
        assert all(name not in {each.name for each in stage.inputs} for stage in stages)


def _is(node: fx.Node, name: str) -> bool:
    return bool(node.meta.get("origin") == name)


class Rotated(nn.Module):
    """Layers that scale by cosines: made once for all of them, or by each one for itself."""

    def __init__(self, *, shares: bool) -> None:
        super().__init__()
        self.shares = shares
        self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

    def cosines(self) -> Tensor:
        return torch.cos(torch.arange(512) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        # The first operation stays with the inputs, so it must not be one of those.
        x = x * 2
        shared = self.cosines() if self.shares else None
        for layer in self.layers:
            x = layer(x) * (self.cosines() if shared is None else shared)
        return x


OWN = [["arange", "mul_1", "cos", "mul_2"], ["arange_1", "mul_3", "cos_1", "mul_4"]]
"""The nodes beside the layers 0 and 1 of a model in which each layer makes its own cosines."""


def test_copies_cost_what_a_model_costs_whose_layers_share_nothing() -> None:
    last = ["arange_2", "mul_5", "cos_2"]
    pins = {
        True: {"mul_2": 0, "mul_3": 1},
        False: {n: stage for stage, names in enumerate([*OWN, last]) for n in names},
    }
    plans = []
    for shares, pin in pins.items():
        torch.manual_seed(0)
        plans.append(
            pipecompile.pipecompile(
                Rotated(shares=shares),
                torch.randn(48, 512),
                k=3,
                costs="flops",
                self_check=False,
                pin=pin | {f"layers_{i}": i for i in range(3)},
            ).plan
        )
    shared, own = plans
    assert shared.copied == {"arange", "mul_1", "cos"}
    assert not shared.routes and not own.routes and not own.copied
    assert shared.prediction == own.prediction
    for one, other in zip(shared.stages, own.stages, strict=True):
        assert one.footprint.activations == other.footprint.activations
        assert (one.forward_ns, one.backward_ns) == (other.forward_ns, other.backward_ns)
        assert [t.bytes for t in one.inputs] == [t.bytes for t in other.inputs]
