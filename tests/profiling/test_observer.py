"""What the fake run says is kept, against what a real eager forward keeps."""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.profiling.kernel_workspace import workspace_on
from pipecompile.profiling.observation import StepObservation
from pipecompile.profiling.observer import observe
from pipecompile.profiling.workload import Workload

MODELS = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "models.py"))


def observed(graph_module: fx.GraphModule, *inputs: Tensor) -> StepObservation:
    workload = Workload(graph_module, graph_module.graph, inputs, loss=None, targets=())
    with FakeTensorMode(allow_non_fake_inputs=True), workload.faked() as fake:
        return observe(fake, workspace_on("cpu"))


def predicted_bytes(graph_module: fx.GraphModule, inputs: Iterable[Tensor]) -> list[int]:
    """The saved storages of the whole graph, inputs aside."""
    observation = observed(graph_module, *inputs)
    placeholders = [node.name for node in graph_module.graph.nodes if node.op == "placeholder"]
    given = {storage for name in placeholders for storage in observation.nodes[name].storages}
    saved = {storage for facts in observation.nodes.values() for storage in facts.saved}
    return sorted(observation.storages[storage] for storage in saved - given)


def kept_bytes(model: nn.Module, forward: Callable[[], Any], inputs: Iterable[Tensor]) -> list[int]:
    """Return storages that a real forward saves, without parameters, buffers and inputs."""
    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda value: held.append(value) or value, lambda value: value
    ):
        output = forward()
    aside = {
        value.untyped_storage().data_ptr()
        for value in (*model.parameters(), *model.buffers(), *inputs)
    }
    kept = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in held}
    del output
    return sorted(size for pointer, size in kept.items() if pointer not in aside)


def example(name: str) -> tuple[nn.Module, Any]:
    made = MODELS[name]()
    model, sample = (made["model"], made["sample_input"]) if isinstance(made, dict) else made
    return model.train(), sample


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "llama", "resnet50", "unet", "sequential"])
def test_the_saved_storages_are_those_of_a_real_run_of_the_graph(name: str) -> None:
    model, sample = example(name)
    captured = capture(model, arguments_of(model, sample))
    inputs = captured.inputs.flatten(arguments_of(model, sample))
    graph_module = captured.instantiate(arguments_of(model, sample))
    assert predicted_bytes(graph_module, inputs) == kept_bytes(
        graph_module, lambda: graph_module(*inputs), inputs
    )


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet50", "unet", "sequential"])
def test_the_saved_storages_are_those_of_the_eager_model(name: str) -> None:
    """Without Llama and T5, for whose capture transformers builds attention masks differently."""
    model, sample = example(name)
    call = arguments_of(model, sample)
    inputs = [
        leaf for leaf in pytree.tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Tensor)
    ]
    captured = capture(model, call)
    predicted = predicted_bytes(captured.instantiate(call), captured.inputs.flatten(call))
    assert predicted == kept_bytes(model, lambda: model(*call.args, **call.kwargs), inputs)


class Aliases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.linear(image)
        left, right = hidden.chunk(2, dim=1)
        product = left.sin() * right
        return self.dropout(product.add_(1))


@pytest.fixture
def aliases() -> StepObservation:
    return observed(fx.symbolic_trace(Aliases()), torch.randn(4, 8))


def test_views_share_a_storage(aliases: StepObservation) -> None:
    linear, chunk, left = (aliases.nodes[name] for name in ("linear", "chunk", "getitem"))
    assert linear.storages == chunk.storages == left.storages
    assert (chunk.bytes, left.bytes) == (4 * 8 * 4, 4 * 4 * 4)
    assert aliases.storages[left.storages[0]] == 4 * 8 * 4


def test_a_view_that_is_saved_keeps_the_whole_storage_once(aliases: StepObservation) -> None:
    assert aliases.nodes["sin"].saved == aliases.nodes["linear"].storages
    assert set(aliases.nodes["mul"].saved) == {
        *aliases.nodes["linear"].storages,
        *aliases.nodes["sin"].storages,
    }


def test_an_in_place_write_is_seen_and_its_value_stays_where_it_was(
    aliases: StepObservation,
) -> None:
    assert [name for name, facts in aliases.nodes.items() if facts.mutates] == ["add_"]
    assert aliases.nodes["add_"].storages == aliases.nodes["mul"].storages


def test_parameters_are_read_and_never_kept(aliases: StepObservation) -> None:
    linear = aliases.nodes["linear"]
    assert linear.parameters == ("linear.weight", "linear.bias")
    assert linear.saved == aliases.nodes["image"].storages


def test_who_needs_a_gradient(aliases: StepObservation) -> None:
    assert aliases.nodes["image"].gradient_bytes == 0
    assert aliases.nodes["linear"].differentiable == (False,)
    assert aliases.nodes["chunk"].gradient_bytes == aliases.nodes["chunk"].bytes == 4 * 8 * 4
    assert aliases.nodes["mul"].differentiable == (True, True)


def test_a_microbatch_is_as_large_as_itself_not_as_the_minibatch_it_was_cut_from() -> None:
    observation = observed(fx.symbolic_trace(Aliases()), torch.randn(64, 8)[:4])
    assert observation.storages[observation.nodes["image"].storages[0]] == 4 * 8 * 4


def test_nothing_real_is_touched() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.LSTM(8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    observed(fx.symbolic_trace(model), torch.randn(4, 8))
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


class Chain(nn.Module):
    """Two linear layers and a residual: gradients of `hidden` come from `cos` and from `add`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, image: Tensor) -> Tensor:
        hidden = self.first(image)
        return self.second(hidden.cos() + hidden)


SIZE = 4 * 8 * 4  # of each value, in bytes


@pytest.fixture
def chain() -> StepObservation:
    return observed(fx.symbolic_trace(Chain()), torch.randn(4, 8))


def test_a_forward_rises_by_what_it_makes(chain: StepObservation) -> None:
    assert {name: facts.forward_peak for name, facts in chain.nodes.items()} == {
        "image": 0, "first": SIZE, "cos": SIZE, "add": SIZE, "second": SIZE, "output": 0,
    }  # fmt: skip


def test_one_gradient_lives_between_any_two_nodes(chain: StepObservation) -> None:
    """`add` gives `cos` and `hidden` one storage, to which the gradient of `cos` is added."""
    names = list(chain.nodes)
    for place in range(names.index("first"), names.index("second")):
        flowing = [
            g for g in chain.gradients if names.index(g.last) <= place < names.index(g.producer)
        ]
        assert [gradient.bytes for gradient in flowing] == [SIZE], names[place]


def test_a_sum_in_place_continues_what_it_was_added_to(chain: StepObservation) -> None:
    given, summed = chain.gradients
    assert (given.producer, given.last, given.readers, given.is_sum) == (
        "second",
        "cos",
        ("add",),
        False,
    )
    assert (summed.producer, summed.last, summed.is_sum, summed.continues) == (
        "cos",
        "first",
        True,
        0,
    )


def test_a_sum_of_what_others_hold_is_new() -> None:
    """A linear layer makes a view of what it gives back for more than two dimensions."""
    observation = observed(fx.symbolic_trace(Chain()), torch.randn(2, 4, 8))
    (summed,) = (gradient for gradient in observation.gradients if gradient.is_sum)
    assert (summed.producer, summed.last, summed.continues) == ("cos", "first", None)


def test_a_backward_makes_the_gradients_of_parameters_too(chain: StepObservation) -> None:
    weight = 8 * 8 * 4
    assert chain.nodes["second"].backward_peak == SIZE + weight
    assert chain.nodes["first"].backward_peak == weight, "the minibatch needs no gradient"


class Used(nn.Module):
    """ReLU, pooling and dropout, each on what the one before returns."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        value = self.line(value).relu()
        value = nn.functional.max_pool2d(value, 2)
        value = nn.functional.avg_pool2d(value, 2)
        return nn.functional.dropout(value, 0.3).masked_fill(value > 0.5, 0.0).sin()


def test_what_saved_storages_hold_and_what_for() -> None:
    model, value = Used().train(), torch.rand(2, 4, 8, 8)
    captured = capture(model, arguments_of(model, value))
    found = observed(captured.instantiate(arguments_of(model, value)), value)
    uses = {name: facts.uses for name, facts in found.nodes.items() if facts.uses}
    kinds = {
        name: [found.contents[storage] for storage in facts.saved]
        for name, facts in found.nodes.items()
    }
    assert uses["relu"] == (("relu",),)
    assert uses["max_pool2d"] == (("pool input",), ("pool indices",))
    assert [content.bound for content in kinds["max_pool2d"]] == [None, 64]
    assert kinds["max_pool2d"][1].dtype == "int64"
    assert uses["avg_pool2d"] == (("pool input",),)
    assert [content.is_mask for content in kinds["dropout"]] == [True]
    assert [(content.dtype, content.is_mask) for content in kinds["masked_fill"]] == [
        ("bool", True)
    ]
    assert uses["sin"] == (("other",),) and not kinds["sin"][0].is_mask
