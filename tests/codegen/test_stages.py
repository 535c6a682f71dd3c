"""Stages keep the names, and a chain of them is the model, wherever it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stages import NOW, Case, assert_equal, case_of, split
from torch import Tensor, fx, nn
from zoo import captured, example, first

from pipecompile.codegen.stages import emit
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.random_streams import use_stream


@cache
def case(name: str) -> Case:
    target = example(name)
    return case_of(target.model, first(2, target.call))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", ["gpt2", "unet"])
@settings(max_examples=12)
@given(data=st.data())
def test_wherever_it_is_cut_gradients_are_the_unsplit_graphs(
    name: str, data: st.DataObject
) -> None:
    made = case(name)
    places = st.integers(1, len(made.units) - 1)
    assert_equal(made, sorted(data.draw(st.sets(places, min_size=1, max_size=5), label="cuts")))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", ["gpt2", "unet", "t5"])
def test_cut_at_every_place_at_once(name: str) -> None:
    made = case(name)
    assert_equal(made, range(1, len(made.units)))


def test_there_are_places_to_cut_inside_attention() -> None:
    made = case("gpt2")
    module = made.capture.instantiate(made.call)
    inside = [n for unit in made.units for n in unit[:1] if "h.1.attn" in _module(module, n)]
    assert len(inside) > 5


def _module(module: fx.GraphModule, name: str) -> str:
    (node,) = [node for node in module.graph.nodes if node.name == name]
    return str(node.meta["module"])


@pytest.mark.parametrize("name", ["gpt2", "unet", "t5"])
def test_stages_keep_the_original_names(name: str) -> None:
    made = case(name)
    own = {
        **dict(made.capture.model.named_parameters(remove_duplicate=False)),
        **dict(made.capture.model.named_buffers(remove_duplicate=False)),
    }
    seen: set[int] = set()
    for stage in split(made, [len(made.units) // 3, len(made.units) // 2])[1]:
        state = {**dict(stage.module.named_parameters()), **dict(stage.module.named_buffers())}
        assert all(value is own[name] for name, value in state.items())
        seen.update(map(id, state.values()))
    assert seen >= {id(p) for p in made.capture.model.parameters()}


def test_a_stage_holds_only_what_it_reads() -> None:
    made = case("unet")
    _, emitted = split(made, [len(made.units) // 2])
    names = [set(dict(stage.module.named_parameters())) for stage in emitted]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == len(list(made.capture.model.named_parameters()))


def test_boundaries_fit_and_are_what_travels() -> None:
    made = case("gpt2")
    _, emitted = split(made, [10, 20, 30, 40])
    values: Sequence[Tensor] = made.inputs
    for stage, following in pairwise(emitted):
        with use_stream(NOW):
            values = stage.module(*values)
        assert stage.outputs == following.inputs
        assert [value.shape for value in values] == [edge.shape for edge in stage.outputs]
        assert [value.dtype for value in values] == [edge.dtype for edge in stage.outputs]
        assert [value.requires_grad for value in values] == [
            edge.has_gradient for edge in stage.outputs
        ]
        assert all(value.is_contiguous() for value in values)
        assert following.gradient_inputs == tuple(edge.has_gradient for edge in stage.outputs)


class Layouts(nn.Module):
    """Values whose dimensions are permuted in memory; reductions over them round by that order."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        turned = hidden.view(-1, 2, 3).transpose(1, 2)
        moved = turned.sin().movedim(0, 2)
        return moved.sum(dim=(0, 1))[:, None] * turned.contiguous().flatten(1)


class Gaps(Layouts):
    """A slice that leaves gaps between its elements."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden[:, ::2].sum() * hidden.sin()


class Wide(Layouts):
    """An expanded value, whose elements lie on each other."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        return hidden[:, :1].expand(-1, 9).sin().sum(dim=1, keepdim=True) * hidden.sin()


@pytest.mark.parametrize("kind", [Layouts, Gaps, Wide])
def test_values_of_any_layout_travel(kind: type[Layouts]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(40, 6)
    found, _ = captured(model, x)
    call = Arguments((x,), {})
    wanted = model(x)
    (gradient,) = torch.autograd.grad(wanted.sum(), model.linear.weight)
    nodes = [node.name for node in found.graph.nodes if node.op not in ("get_attr", "output")]
    for cut in range(2, len(nodes)):
        module = found.instantiate(call)
        stages = {name: int(index >= cut) for index, name in enumerate([*nodes, "output"])}
        values: Sequence[Tensor] = [x]
        for stage in emit(module, stages):
            values = stage.module(*values)
        assert torch.equal(values[0], wanted), nodes[cut]
        (got,) = torch.autograd.grad(values[0].sum(), model.linear.weight)
        assert torch.equal(got, gradient), nodes[cut]


def test_the_layout_in_memory_survives_the_way() -> None:
    class Turned(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin().transpose(0, 1).cos()

    x = torch.randn(4, 6)
    found = capture(Turned(), Arguments((x,), {}))
    stages = emit(
        found.instantiate(Arguments((x,), {})),
        {"x": 0, "sin": 0, "transpose": 0, "cos": 1, "output": 1},
    )
    (sent,) = stages[0].module(x)
    (edge,) = stages[0].outputs
    assert sent.shape == edge.shape == (4, 6)
    assert edge.is_permuted
    (got,) = stages[1].module(sent)
    assert got.stride() == Turned()(x).stride()


def test_only_stages_that_draw_are_random_and_only_writers_have_buffers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    _, module = captured(model, x)
    names = [node.name for node in module.graph.nodes if node.op.startswith("call_")]
    stages = emit(
        module, {"input_1": 0, **{name: index for index, name in enumerate(names)}, "output": 3}
    )
    assert [stage.random for stage in stages] == [False, True, False, False]
    assert [len(stage.buffers) for stage in stages] == [0, 0, 3, 0]
    assert {id(buffer) for buffer in stages[2].buffers} == {
        id(buffer) for buffer in model.buffers()
    }
