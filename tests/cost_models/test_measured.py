"""Measuring leaves nothing behind; how often it runs a node, and how its parts relate."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import pytest
import torch
from torch import Tensor, fx, nn

from pipecompile.cost_models import measured as model
from pipecompile.cost_models.clock import TimeSample, steady_sample
from pipecompile.cost_models.device_transfer import moved_to
from pipecompile.cost_models.measured import Measured, _DeviceRedirection
from pipecompile.errors import CaptureError
from pipecompile.graph.autograd_context import AutogradContext
from pipecompile.ir.graph import CostGraph
from pipecompile.profiling.profile import profile


class Tracer(fx.Tracer):
    proxy_buffer_attributes = True


def measured(model: nn.Module, *inputs: Tensor) -> CostGraph:
    return profile(fx.GraphModule(model, Tracer().trace(model)), inputs, Measured())


class Everything(nn.Module):
    """Changing buffers, random numbers, a write to the input, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 10)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("expanded", torch.zeros(1, 8).expand(4, 8))

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        self.steps.add_(1)
        image.mul_(2)
        hidden = self.embedding(tokens) + image + self.expanded
        hidden = nn.functional.relu(self.norm(hidden), inplace=True)
        return self.head(self.dropout(hidden) + torch.rand_like(hidden))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_model_its_gradients_its_inputs_and_the_random_state_stay_as_they_were() -> None:
    torch.manual_seed(0)
    model, tokens, image = Everything(), torch.randint(0, 10, (4,)), torch.randn(4, 8)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state, random, before = state_of(model), torch.get_rng_state(), image.clone()

    measured(model, tokens, image)

    torch.testing.assert_close(state_of(model), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(image, before)
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert [name for name, value in model.named_parameters() if value.grad is not None] == [
        "head.weight"
    ]


def test_a_node_that_fails_leaves_the_buffers_as_they_were() -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.embedding = nn.Embedding(3, 4)

        def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
            return self.norm(image) + self.embedding(tokens)

    model = Fails()
    state = state_of(model)
    with pytest.raises(CaptureError, match=r"cannot be run by itself.*IndexError: index out of"):
        measured(model, torch.randn(2, 4), torch.tensor([0, 7]))
    torch.testing.assert_close(state_of(model), state, rtol=0, atol=0)


def test_identical_nodes_are_measured_once() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8, bias=False))
    runs: Counter[int] = Counter()
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    model_of_costs = Measured()

    graph = profile(fx.symbolic_trace(model), [torch.randn(2, 8)], model_of_costs)

    # The first layer's input needs no gradient and the last has no bias: three kinds.
    assert len(model_of_costs.costs_by_signature) == 3
    assert runs[2] == runs[3] == 2  # on fake tensors, and to pass its value on
    assert runs[1] > 2
    assert graph.by_name["_1"].forward_ns == graph.by_name["_3"].forward_ns


def test_parts_of_the_backward() -> None:
    graph = measured(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)), torch.randn(256, 256))
    first, second = graph.by_name["_0"], graph.by_name["_1"]
    assert first.forward_ns > 0
    assert first.backward_input_ns == 0
    assert first.backward_weight_ns
    assert second.backward_input_ns
    assert second.backward_weight_ns
    assert second.backward_ns


def test_a_node_under_no_grad_has_no_backward() -> None:
    graph_module = fx.symbolic_trace(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    for node in graph_module.graph.nodes:
        node.meta["autograd_context"] = AutogradContext(grad=node.name != "_0", autocast=())
    graph = profile(graph_module, [torch.randn(2, 8)], Measured())
    assert graph.by_name["_0"].backward_ns == 0
    assert graph.by_name["_1"].backward_input_ns == 0
    assert graph.by_name["_1"].parameters == ("1.weight", "1.bias")


def test_settings_tell_nodes_apart() -> None:
    """Shapes alone do not: a dropout of another probability or mode is another node to measure."""
    costs = Measured()
    dropouts = nn.Sequential(
        nn.Dropout(0.1), nn.Dropout(0.2), nn.Dropout(0.2).eval(), nn.Dropout(0.2)
    )
    profile(fx.symbolic_trace(dropouts), [torch.randn(4)], costs)
    assert len(costs.costs_by_signature) == 3


META = torch.device("meta")  # stands for another device


def test_what_a_graph_asks_of_the_cpu_is_asked_of_the_device() -> None:
    with _DeviceRedirection(META), META:
        made = [
            torch.zeros(2),
            torch.ones(2, device="cpu"),
            torch.arange(2, device=torch.device("cpu")),
        ]
    assert all(value.is_meta for value in made)


@pytest.mark.parametrize("region", [False, True])
def test_autocast_is_respected_inside_and_outside_regions(region: bool) -> None:
    kinds: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].register_forward_hook(lambda _, __, output: kinds.append(output.dtype))
    graph_module = fx.symbolic_trace(model)
    for node in graph_module.graph.nodes:
        node.meta["autograd_context"] = (
            AutogradContext(grad=True, autocast=(("cpu", True, torch.bfloat16),))
            if region
            else None
        )
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not region):
        graph = profile(graph_module, [torch.randn(2, 8)], Measured())
    assert set(kinds) == {torch.bfloat16}
    assert graph.by_name["_1"].forward_ns


def test_what_is_lent_comes_back_even_after_a_failure() -> None:
    model = nn.BatchNorm1d(4)
    model.weight.grad = gradient = torch.ones(4)
    state, random = state_of(model), torch.get_rng_state()

    def use() -> None:
        with moved_to(
            [*model.parameters(), *model.buffers()], torch.device("cpu"), list(model.buffers())
        ):
            assert model.weight.grad is None
            model(torch.randn(3, 4)).sum().backward()
            raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"):
        use()
    assert model.weight.grad is gradient and model.bias.grad is None
    torch.testing.assert_close(state_of(model), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_hooks_on_parameters_rest_while_nodes_are_measured() -> None:
    model, calls = nn.Sequential(nn.Linear(4, 4)), list[str]()
    weight = model[0].weight
    weight.register_hook(lambda _: calls.append("first"))
    weight.register_hook(lambda _: calls.append("second"))
    weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
    before = weight._backward_hooks, weight._post_accumulate_grad_hooks
    profile(fx.symbolic_trace(model), [torch.randn(2, 4)], Measured())
    assert calls == []
    assert weight._backward_hooks is before[0] and weight._post_accumulate_grad_hooks is before[1]
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["first", "second", "accumulated"]


def runs_of(times: list[int]) -> tuple[list[int], TimeSample]:
    """Return the sizes of the rounds on a machine with these times (the last one repeats)."""
    counts: list[int] = []

    def run(count: int) -> list[int]:
        counts.append(count)
        return [times.pop(0) if len(times) > 1 else times[0] for _ in range(count)]

    return counts, steady_sample(run)


class _QueueClock:
    """A GPU's clock, of which runs take 100 ns there."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def mark(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def between_ns(self, start: None, end: None) -> int:
        return 100


@pytest.mark.parametrize(("queued", "entry", "wanted"), [(50, 0, 100), (300, 120, 180)])
def test_on_a_gpu_the_longer_one_of_kernels_and_their_queueing_counts(
    monkeypatch: pytest.MonkeyPatch, queued: int, entry: int, wanted: int
) -> None:
    ticks = itertools.count(step=queued)
    monkeypatch.setattr(model, "Clock", _QueueClock)
    monkeypatch.setattr(model, "_flusher", lambda device: lambda: None)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: next(ticks))
    times = model._timed(torch.device("cuda"), 3, lambda: None, lambda _: None, entry)
    assert times == [wanted] * 3


def test_it_runs_until_the_median_stays() -> None:
    assert runs_of([900, *[200] * 5, *[110] * 5, *[101] * 5, 100]) == (
        [1, 5, 5, 5, 5],
        TimeSample(100, 0),
    )
    assert runs_of([100]) == ([1, 5, 5], TimeSample(100, 0))


def test_a_machine_that_never_settles_is_not_waited_for() -> None:
    counts, _ = runs_of([1, *(time for level in range(1, 9) for time in [level * 100] * 5)])
    assert counts == [1, 5, 5, 5, 5, 5]


def test_long_runs_are_few() -> None:
    counts, sample = runs_of([60_000_000, 51_000_000, 52_000_000, 56_000_000])
    assert counts == [1, 3]
    assert sample == TimeSample(52_000_000, 2_500_000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_the_cpu_comes_to_the_gpu_node_by_node() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model[0].weight.grad = gradient = torch.ones(8, 8)
    state, where = state_of(model), set[tuple[str, str]]()
    for layer in (model[0], model[2]):
        layer.register_forward_pre_hook(
            lambda *_: where.add((model[0].weight.device.type, model[2].weight.device.type))
        )

    costs = Measured(torch.device("cuda"))
    graph = profile(fx.symbolic_trace(model), [torch.randn(4, 8)], costs)

    assert {("cuda", "cpu"), ("cpu", "cuda")} <= where
    assert ("cuda", "cuda") not in where
    assert all(node.forward_ns > 0 for node in graph.nodes if node.name.startswith("_"))
    torch.testing.assert_close(state_of(model), state, rtol=0, atol=0)
    assert model[0].weight.grad is gradient
    assert costs.allocator == "cuda"
