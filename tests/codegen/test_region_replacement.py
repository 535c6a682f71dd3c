"""Stages with recomputed regions train exactly as stages without them."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from stages import case_of
from torch import Tensor, nn
from zoo import same

from pipecompile.codegen.regions import Regions
from pipecompile.frontend.signature import Arguments
from pipecompile.graph import recomputed_region as recompute
from pipecompile.graph.random_streams import StreamKey
from pipecompile.graph.recomputability import copied_bytes, recompute_limits
from pipecompile.graph.recomputed_region import RecomputedRegion, _RegionRuns
from tests.codegen.region_cases import (
    KEPT,
    NOW,
    ZOO_NAMES,
    assignment_of,
    case,
    differences,
    drawn_for,
    eager,
    instantiated,
    node_order,
    outcome,
    plain,
    units,
)


def test_regions_where_values_skip_stages() -> None:
    region_case = case("skips")
    assignment = assignment_of(
        region_case, (len(region_case.units) // 3, 2 * len(region_case.units) // 3)
    )
    order = "0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 0B0 2B1 1B1 0B1"
    wanted = outcome(region_case, assignment, {}, order)
    for seed in range(2):
        assert (
            differences(
                wanted,
                outcome(region_case, assignment, drawn_for(region_case, assignment, seed), order),
            )
            == []
        )


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("name", [*KEPT, *ZOO_NAMES, "gpt2"])
def test_any_regions_train_as_none(name: str) -> None:
    """Several in each stage, side by side and within each other."""
    region_case = case(name)
    inner_recomputes = 0
    for cuts, seeds in (
        ((len(region_case.units) // 2,), (1,)),
        *([((), (2, 3))] if name in KEPT else []),
    ):
        assignment = assignment_of(region_case, cuts)
        for seed in seeds:
            regions = drawn_for(region_case, assignment, seed, nested=seed % 2 == 1)
            with patch.object(
                RecomputedRegion, "compute", autospec=True, side_effect=RecomputedRegion.compute
            ) as runs:
                found = outcome(region_case, assignment, regions)
            inner_recomputes += runs.call_count - 2 * sum(map(len, regions.values()))
            assert differences(plain(name, cuts), found) == [], regions
    assert inner_recomputes > 0


class Statistics(nn.Module):
    """Reads averages of a module and writes to a buffer, before and after the buffer is read."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(self.linear(x))
        self.scale.mul_(1.5)
        hidden = (normed * self.norm.running_mean.clone() * self.scale.clone()).tanh()
        self.scale.add_(hidden.detach().mean(0))
        return self.linear(hidden * self.scale.clone()).sin()


class Lesson(nn.Module):
    """Draws in no_grad and outside of it, and holds gradients back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            lesson = self.drop(self.linear(x)).relu()
        own = self.drop(self.linear(x)).tanh()
        return (own * lesson).detach() * own + self.drop(x)


class Recurrent(nn.Module):
    """Its layer returns a tuple of tuples, and draws between its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 8, num_layers=2, dropout=0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden, (last, state) = self.layer(x.tanh())
        return self.head(hidden.sin() + last.sum(0) * state.mean(0)).cos()


def layers_with_hooks() -> nn.Module:
    """Hooks of modules that change gradients."""
    first, second = nn.Linear(8, 8), nn.Tanh()
    first.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    second.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    return nn.Sequential(nn.Linear(8, 8), second, first, nn.Tanh(), nn.Linear(8, 8))


def shared_norm() -> nn.Module:
    """One module of statistics, called twice."""
    norm = nn.BatchNorm1d(8)
    return nn.Sequential(nn.Linear(8, 8), norm, nn.Tanh(), norm, nn.Linear(8, 8), nn.Tanh())


def power_iteration() -> nn.Module:
    """A parametrization that writes to buffers."""
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), normed, nn.Tanh(), nn.Linear(8, 8))


class Scale(nn.Identity):
    """Reads a buffer that it does not write to, and keeps nothing of it but in a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor.clone()


class Annealed(nn.Module):
    """Writes to a buffer of a module that is one node."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), Scale()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.scale(self.linear(x)).tanh()
        self.scale.factor.mul_(0.5)
        return hidden


STATE: dict[str, Callable[[], nn.Module]] = {
    "annealed": lambda: nn.Sequential(
        nn.Linear(8, 8), Annealed(), nn.Tanh(), Annealed(), nn.Linear(8, 8)
    ),
    "statistics": lambda: nn.Sequential(nn.Linear(8, 8), Statistics(), Statistics(), nn.Tanh()),
    "lesson": lambda: nn.Sequential(nn.Linear(8, 8), Lesson(), Lesson(), nn.Tanh()),
    "recurrent": Recurrent,
    "module hooks": layers_with_hooks,
    "shared norm": shared_norm,
    "power iteration": power_iteration,
}


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in STATE), ("lesson", True), ("statistics", True)],
)
def test_state_of_every_kind_in_regions_of_every_kind(name: str, autocast: bool) -> None:
    """With the user's own autocast around all, too."""
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        region_case = case_of(STATE[name](), Arguments((torch.randn(4, 8),), {}))
        assignment = assignment_of(region_case, ())
        wanted = outcome(region_case, assignment, {})
        for seed in range(4):
            regions = drawn_for(region_case, assignment, seed, nested=seed % 2 == 1)
            assert differences(wanted, outcome(region_case, assignment, regions)) == [], regions


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", STATE)
def test_regions_copy_what_is_said_of_their_nodes(name: str) -> None:
    """Each region runs twice for each of two microbatches, inner regions too."""
    torch.manual_seed(0)
    region_case = case_of(STATE[name](), Arguments((torch.randn(4, 8),), {}))
    assignment, sizes = assignment_of(region_case, ()), copied_bytes(instantiated(region_case))
    copied = recompute._copied
    for seed in range(4):
        regions, copies = (
            drawn_for(region_case, assignment, seed, nested=seed % 2 == 1),
            list[int](),
        )

        def noted(tensors: Sequence[Tensor], copies: list[int] = copies) -> list[Tensor]:
            found = copied(tensors)
            copies.append(sum(each.nbytes for each in {id(each): each for each in found}.values()))
            return found

        with patch.object(recompute, "_copied", noted):
            outcome(region_case, assignment, regions)
        said = [sum(sum(sizes.get(node, ())) for node in region) for region in regions[0]]
        assert sorted(filter(None, copies)) == sorted(filter(None, 2 * said)), regions
    assert any(sizes.values()) == (name not in ("lesson", "recurrent", "module hooks"))


def test_a_backward_may_run_in_another_thread() -> None:
    """On a GPU it does: its thread knows neither the stream key of the forward nor autocast."""

    def gradients(regions: Regions) -> list[Tensor | None]:
        (stage,), _ = eager(region_case, assignment_of(region_case, ()), regions)
        flights = [
            stage.forward(region_case.inputs, StreamKey(0, 0, microbatch))[1]
            for microbatch in range(2)
        ]
        with ThreadPoolExecutor(1) as thread:
            for saved in flights:
                thread.submit(stage.backward, saved, (), {}).result()
        found = [parameter.grad for parameter in region_case.capture.model.parameters()]
        region_case.capture.model.zero_grad()
        return found

    torch.manual_seed(0)
    region_case = case_of(STATE["lesson"](), Arguments((torch.randn(4, 8),), {}))
    assert same(
        gradients({}),
        gradients(drawn_for(region_case, assignment_of(region_case, ()), 1, nested=True)),
    )


def test_after_the_backward_nothing_is_left() -> None:
    """It is freed without the garbage collector: exceptions that end a run could make cycles."""
    region_case = case("residuals")
    runs: list[weakref.ref[object]] = []

    def noted(self: Any, *given: Any) -> None:
        runs.append(weakref.ref(self))
        original(self, *given)

    original = _RegionRuns.__init__
    gc.disable()
    try:
        with patch.object(_RegionRuns, "__init__", noted):
            outcome(
                region_case,
                assignment_of(region_case, ()),
                drawn_for(region_case, assignment_of(region_case, ()), 3, nested=True),
            )
        assert runs and all(run() is None for run in runs)
    finally:
        gc.enable()


def test_a_stage_that_is_one_region() -> None:
    region_case = case("buffers")
    regions = {
        0: [
            [
                n
                for unit in units(
                    list(node_order(region_case)), recompute_limits(instantiated(region_case))
                )
                for n in unit
            ]
        ]
    }
    assert (
        differences(
            plain("buffers", ()), outcome(region_case, assignment_of(region_case, ()), regions)
        )
        == []
    )


def test_a_stage_with_regions_may_be_recomputed_as_a_whole() -> None:
    region_case = case("buffers")
    assignment = assignment_of(region_case, ())
    found = outcome(
        region_case, assignment, drawn_for(region_case, assignment, 0), "0F0 0F1 0R0 0B0 0R1 0B1"
    )
    assert differences(plain("buffers", ()), found) == []


# -- what runs, and how often


def counted(
    layers: Sequence[nn.Module], regions: Sequence[Sequence[int]], *, evaluate: bool = False
) -> list[int]:
    """How often each layer runs for a microbatch."""
    torch.manual_seed(0)
    calls = Counter[int]()
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, index=index: calls.update([index]))
    region_case = case_of(nn.Sequential(*layers), Arguments((torch.randn(4, 8),), {}))
    names = {
        str(node.target): node.name
        for node in instantiated(region_case).graph.nodes
        if node.op == "call_module"
    }
    chosen = [[names[str(index)] for index in region] for region in regions]
    (stage,), _ = eager(region_case, assignment_of(region_case, ()), {0: chosen})
    calls.clear()
    if evaluate:
        stage.loss = None
        stage.evaluate(region_case.inputs, NOW)
    else:
        _, saved = stage.forward(region_case.inputs, NOW)
        assert set(calls.values()) == {1}
        stage.backward(saved, (), {})
    return [calls[index] for index in range(len(layers))]


def test_a_region_runs_twice_up_to_the_last_that_saves() -> None:
    """A linear saves its input before it computes, and torch stops there. tanh saves its result."""

    def layers() -> list[nn.Module]:
        return [
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Identity(),
            nn.Dropout(0.5),
            nn.Linear(8, 8),
        ]

    assert counted(layers(), []) == [1] * 6
    assert counted(layers(), [[1, 2, 3, 4]]) == [1, 2, 2, 2, 2, 1]
    assert counted(layers(), [[1, 2, 3]]) == [1, 2, 2, 1, 1, 1]
    assert counted(layers(), [[0, 1], [2, 3]]) == [2, 2, 2, 1, 1, 1]
    assert counted(layers(), [[3]]) == [1] * 6


def test_within_another_a_region_runs_three_times() -> None:
    """At its end twice: the outer one then has all it needs before the inner one begins."""

    def layers() -> list[nn.Module]:
        return [nn.Linear(8, 8) if index % 2 == 0 else nn.Tanh() for index in range(6)]

    assert counted(layers(), [[0, 1, 2, 3, 4, 5], [2, 3]]) == [2, 2, 3, 3, 2, 2]
    assert counted(layers(), [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5]]) == [2, 2, 2, 2, 2, 2]
    assert counted(layers(), [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3], [0, 1]]) == [4, 4, 3, 3, 2, 2]


def test_an_evaluation_computes_once() -> None:
    assert counted([nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)], [[0, 1, 2]], evaluate=True) == [
        1,
        1,
        1,
    ]
