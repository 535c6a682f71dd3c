"""Stages whose regions are computed again in the backward train as they do without."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from allocations import events
from stages import Case, assert_equal, case_of, eager_stages, loss_of
from torch import Tensor, fx, nn
from torch.profiler import record_function
from zoo import first, same
from zoo.models import MODELS as ZOO

from examples import models as examples
from pipecompile.api.target import Target
from pipecompile.codegen.regions import Regions, stage_order
from pipecompile.codegen.stages import StageModule, emit
from pipecompile.codegen.transfer import transfer, transfer_regions
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph import recomputed_region as recompute
from pipecompile.graph.random_streams import StreamKey, use_stream
from pipecompile.graph.recomputability import RecomputeLimits, copied_bytes, recompute_limits
from pipecompile.graph.recomputed_region import RecomputedRegion, _RegionRuns
from pipecompile.graph.stages import origin_of
from pipecompile.graph.ties import ties_of
from pipecompile.ir.schedule import Action
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.runtime.local import step
from pipecompile.runtime.stage import EagerStage
from tests.codegen.test_footprint import MODELS as SMALL

NOW = StreamKey(seed=5, step=3, microbatch=0)
IN_FLIGHT = {
    1: "0F0 0F1 0B0 0B1",
    2: "0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1",
}
ZOO_NAMES = (
    "autocast", "in_place", "custom_function", "ties", "data_branch", "buffers", "hooks", "no_grad",
    "checkpointed", "parametrized", "nested", "resnet",
)  # fmt: skip


class Normed(nn.Module):
    """Random numbers and running statistics between layers that keep much."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 32), nn.BatchNorm1d(24), nn.Linear(32, 32)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.norm(self.first(value)).tanh(), 0.5)).sin()


KEPT: dict[str, Callable[[], nn.Module]] = {
    **SMALL,
    "normed": lambda: nn.Sequential(Normed(), Normed(), nn.Tanh()),
}


@dataclass(frozen=True)
class Outcome:
    """All that a step of two microbatches in flight can be seen by."""

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    names: list[list[str]]
    generator: Tensor


def instantiated(made: Case) -> fx.GraphModule:
    module = made.capture.instantiate(made.call)
    apply_passes(module.graph, [Group()])
    return module


def assignment_of(made: Case, cuts: Sequence[int]) -> dict[str, int]:
    return {
        name: sum(unit >= cut for cut in cuts)
        for unit, names in enumerate(made.units)
        for name in names
    }


def eager(
    made: Case, assignment: dict[str, int], regions: Regions
) -> tuple[list[EagerStage], tuple[StageModule, ...]]:
    """The stages as one process runs them, with the gradients of tied parameters handed on."""
    module = instantiated(made)
    emitted = emit(module, assignment, regions)
    return eager_stages(made, module, emitted), emitted


def outcome(
    made: Case, assignment: dict[str, int], regions: Regions, order: str | None = None
) -> Outcome:
    """A step on the state of the model, which is as before afterwards."""
    model = made.capture.model
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stages, emitted = eager(made, assignment, regions)
    actions = [Action.parse(text) for text in (order or IN_FLIGHT[len(stages)]).split()]
    rows = [made.inputs, [value.flip(0) for value in made.inputs]]
    torch.manual_seed(11)
    try:
        losses = step(stages, actions, rows, [None, None], seed=NOW.seed, step=NOW.step)
        return Outcome(
            losses,
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None},
            {name: buffer.clone() for name, buffer in model.named_buffers()},
            [list(stage.module.state_dict()) for stage in emitted],
            torch.get_rng_state(),
        )
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(start[name])


def differences(wanted: Outcome, got: Outcome) -> list[str]:
    found = [] if same(wanted.losses, got.losses) else ["losses"]
    for left, right in ((wanted.gradients, got.gradients), (wanted.buffers, got.buffers)):
        found += [
            n
            for n in left.keys() | right.keys()
            if n not in left or n not in right or not same(left[n], right[n])
        ]
    found += [] if wanted.names == got.names else ["names"]
    return found + ([] if torch.equal(wanted.generator, got.generator) else ["the generator"])


# -- any regions


def units(order: Sequence[str], limits: RecomputeLimits) -> Iterator[list[str]]:
    """Return runs of nodes of which a region contains all or none, without excluded nodes."""
    place = {name: index for index, name in enumerate(order)}
    until, run = 0, list[str]()
    for index, name in enumerate(order):
        run.append(name)
        bound = [members for members in limits.together if name in members]
        until = max([until, index, *(place[m] for members in bound for m in members)])
        if index == until:
            yield [] if any(n in limits.never for n in run) else run
            run = []
    assert not run


def drawn(
    order: Sequence[str], limits: RecomputeLimits, seed: int, *, nested: bool = False
) -> list[list[str]]:
    """Regions of random lengths, and with `nested` others within them."""
    dice, regions, current = random.Random(seed), list[list[list[str]]](), list[list[str]]()
    for unit in units(order, limits):
        if current and (not unit or dice.random() < 0.3):
            regions.append(current)
            current = []
        if unit and dice.random() < 0.9:
            current = [*current, unit]
        elif current:
            regions.append(current)
            current = []
    found = [region for region in [*regions, current] if region]
    inner = []
    for region in found if nested else ():
        begin = dice.randrange(len(region))
        part = region[begin : begin + 1 + dice.randrange(len(region))]
        inner += [part] if 0 < len(part) < len(region) else []
    return [[name for unit in region for name in unit] for region in (*found, *inner)]


def drawn_for(
    made: Case, assignment: dict[str, int], seed: int, *, nested: bool = False
) -> dict[int, list[list[str]]]:
    module = instantiated(made)
    limits = recompute_limits(module)
    orders = {
        stage: stage_order(module.graph, assignment, stage) for stage in set(assignment.values())
    }
    return {
        stage: drawn(order, limits, seed + stage, nested=nested) for stage, order in orders.items()
    }


@cache
def case(name: str) -> Case:
    torch.manual_seed(0)
    if name in KEPT:
        return case_of(KEPT[name](), Arguments((torch.randn(16, 24, 32),), {}))
    target = Target.of((getattr(examples, name, None) or ZOO[name])(), name)
    target.model.train()
    return case_of(target.model, first(4, target.call))


def test_regions_where_values_skip_stages() -> None:
    made = case("skips")
    assignment = assignment_of(made, (len(made.units) // 3, 2 * len(made.units) // 3))
    order = "0F0 1F0 2F0 0F1 1F1 2F1 2B0 1B0 0B0 2B1 1B1 0B1"
    wanted = outcome(made, assignment, {}, order)
    for seed in range(2):
        assert (
            differences(wanted, outcome(made, assignment, drawn_for(made, assignment, seed), order))
            == []
        )


@cache
def plain(name: str, cuts: tuple[int, ...]) -> Outcome:
    return outcome(case(name), assignment_of(case(name), cuts), {})


@pytest.mark.parametrize("name", [*KEPT, *ZOO_NAMES, "gpt2"])
def test_any_regions_train_as_none(name: str) -> None:
    """Several in each stage, side by side and within each other."""
    made = case(name)
    again = 0
    for cuts, seeds in (((len(made.units) // 2,), (1,)), *([((), (2, 3))] if name in KEPT else [])):
        assignment = assignment_of(made, cuts)
        for seed in seeds:
            regions = drawn_for(made, assignment, seed, nested=seed % 2 == 1)
            with patch.object(
                RecomputedRegion, "compute", autospec=True, side_effect=RecomputedRegion.compute
            ) as runs:
                found = outcome(made, assignment, regions)
            again += runs.call_count - 2 * sum(map(len, regions.values()))
            assert differences(plain(name, cuts), found) == [], regions
    assert again > 0


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


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in STATE), ("lesson", True), ("statistics", True)],
)
def test_state_of_every_kind_in_regions_of_every_kind(name: str, autocast: bool) -> None:
    """With the user's own autocast around all, too."""
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        made = case_of(STATE[name](), Arguments((torch.randn(4, 8),), {}))
        assignment = assignment_of(made, ())
        wanted = outcome(made, assignment, {})
        for seed in range(4):
            regions = drawn_for(made, assignment, seed, nested=seed % 2 == 1)
            assert differences(wanted, outcome(made, assignment, regions)) == [], regions


@pytest.mark.parametrize("name", STATE)
def test_regions_copy_what_is_said_of_their_nodes(name: str) -> None:
    """Each region runs twice for each of two microbatches, inner regions too."""
    torch.manual_seed(0)
    made = case_of(STATE[name](), Arguments((torch.randn(4, 8),), {}))
    assignment, sizes = assignment_of(made, ()), copied_bytes(instantiated(made))
    copied = recompute._copied
    for seed in range(4):
        regions, copies = drawn_for(made, assignment, seed, nested=seed % 2 == 1), list[int]()

        def noted(tensors: Sequence[Tensor], copies: list[int] = copies) -> list[Tensor]:
            found = copied(tensors)
            copies.append(sum(each.nbytes for each in {id(each): each for each in found}.values()))
            return found

        with patch.object(recompute, "_copied", noted):
            outcome(made, assignment, regions)
        said = [sum(sum(sizes.get(node, ())) for node in region) for region in regions[0]]
        assert sorted(filter(None, copies)) == sorted(filter(None, 2 * said)), regions
    assert any(sizes.values()) == (name not in ("lesson", "recurrent", "module hooks"))


def test_a_backward_may_run_in_another_thread() -> None:
    """On a GPU it does: its thread knows neither the stream key of the forward nor autocast."""

    def gradients(regions: Regions) -> list[Tensor | None]:
        (stage,), _ = eager(made, assignment_of(made, ()), regions)
        flights = [
            stage.forward(made.inputs, StreamKey(0, 0, microbatch))[1] for microbatch in range(2)
        ]
        with ThreadPoolExecutor(1) as thread:
            for saved in flights:
                thread.submit(stage.backward, saved, (), {}).result()
        found = [parameter.grad for parameter in made.capture.model.parameters()]
        made.capture.model.zero_grad()
        return found

    torch.manual_seed(0)
    made = case_of(STATE["lesson"](), Arguments((torch.randn(4, 8),), {}))
    assert same(gradients({}), gradients(drawn_for(made, assignment_of(made, ()), 1, nested=True)))


def test_after_the_backward_nothing_is_left() -> None:
    """It is freed without the garbage collector: exceptions that end a run could make cycles."""
    made = case("residuals")
    runs: list[weakref.ref[object]] = []

    def noted(self: Any, *given: Any) -> None:
        runs.append(weakref.ref(self))
        original(self, *given)

    original = _RegionRuns.__init__
    gc.disable()
    try:
        with patch.object(_RegionRuns, "__init__", noted):
            outcome(
                made,
                assignment_of(made, ()),
                drawn_for(made, assignment_of(made, ()), 3, nested=True),
            )
        assert runs and all(run() is None for run in runs)
    finally:
        gc.enable()


def test_a_stage_that_is_one_region() -> None:
    made = case("buffers")
    regions = {
        0: [
            [
                n
                for unit in units(list(made_order(made)), recompute_limits(instantiated(made)))
                for n in unit
            ]
        ]
    }
    assert differences(plain("buffers", ()), outcome(made, assignment_of(made, ()), regions)) == []


def made_order(made: Case) -> list[str]:
    return stage_order(instantiated(made).graph, assignment_of(made, ()), 0)


def test_a_stage_with_regions_may_be_recomputed_as_a_whole() -> None:
    made = case("buffers")
    assignment = assignment_of(made, ())
    found = outcome(made, assignment, drawn_for(made, assignment, 0), "0F0 0F1 0R0 0B0 0R1 0B1")
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
    made = case_of(nn.Sequential(*layers), Arguments((torch.randn(4, 8),), {}))
    names = {
        str(node.target): node.name
        for node in instantiated(made).graph.nodes
        if node.op == "call_module"
    }
    chosen = [[names[str(index)] for index in region] for region in regions]
    (stage,), _ = eager(made, assignment_of(made, ()), {0: chosen})
    calls.clear()
    if evaluate:
        stage.loss = None
        stage.evaluate(made.inputs, NOW)
    else:
        _, saved = stage.forward(made.inputs, NOW)
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


# -- what it keeps


SMALL_BYTES = 2048  # of sums that kernels make inside, and of copies of statistics
TRIALS = 3  # on a busy machine the profiler loses events


class Keeping(fx.Interpreter):
    """Notes which storages each node saves for the backward."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.saved: dict[str, dict[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        own = self.saved.setdefault(origin_of(n), {})

        def pack(tensor: Tensor) -> Tensor:
            own.update(storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return super().run_node(n)


def storages(values: Sequence[Any]) -> dict[int, int]:
    """Storage → bytes."""
    tensors = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in tensors}


def expected_bytes(
    stage: StageModule, inputs: Sequence[Tensor], regions: Sequence[Sequence[str]]
) -> int:
    """Saved outside of regions, read by outermost regions that save anything, or sent."""
    run = Keeping(stage.module)
    leaves = [
        value.detach().requires_grad_(needed)
        for value, needed in zip(inputs, stage.gradient_inputs, strict=True)
    ]
    with use_stream(NOW):
        outputs = run.run(*leaves)
    inside = {name for region in regions for name in region}
    held = storages(outputs)
    for name, own in run.saved.items():
        held |= {} if name in inside else own
    for region in (one for one in regions if not any(set(one) < set(other) for other in regions)):
        nodes = [
            node
            for node in stage.module.graph.nodes
            if origin_of(node) in region and node.op != "placeholder"
        ]
        if any(run.saved[name] for name in region):
            held |= storages(
                [run.env[s] for node in nodes for s in node.all_input_nodes if s not in nodes]
            )
    for owned in storages([*leaves, *stage.module.parameters(), *stage.module.buffers()]):
        held.pop(owned, None)
    return sum(held.values())


@pytest.mark.parametrize("name", KEPT)
def test_between_forward_and_backward_a_stage_keeps_what_regions_read(name: str) -> None:
    made = case(name)
    wanted: dict[str, int] = {}
    trials: list[tuple[str, EagerStage, list[Tensor]]] = []
    for cut, seeds in ((1, (0, 1)), (len(made.units) // 2, (2, 3))):
        assignment = assignment_of(made, [cut])
        for seed in seeds:
            regions = drawn_for(made, assignment, seed, nested=seed % 2 == 1)
            plain_stages = emit(instantiated(made), assignment)
            stages, _ = eager(made, assignment, regions)
            stages[-1].loss = None
            values = list(made.inputs)
            for stage, plain_stage in zip(stages, plain_stages, strict=True):
                label = f"cut {cut} seed {seed} stage {plain_stage.index}"
                wanted[label] = expected_bytes(plain_stage, values, regions[plain_stage.index])
                trials.append((label, stage, values))
                values = list(stage.forward(values, NOW)[0])
    for _ in range(TRIALS):
        kept = []
        with events() as found:
            for label, stage, values in trials:
                with record_function(label):
                    kept.append(stage.forward(values, NOW))
        wrong = {
            n: (wanted[n], sum(found[n]))
            for n in wanted
            if not 0 <= sum(found[n]) - wanted[n] <= SMALL_BYTES
        }
        if not wrong:
            break
    assert wrong == {}
    assert len(set(wanted.values())) > 2


# -- what no region may be


class Inner(nn.Module):
    """Takes a gradient while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.stem(x).tanh()
        (slope,) = torch.autograd.grad(hidden.sin().sum(), hidden, create_graph=True)
        return self.head(hidden + slope).tanh().cos()


class Written(nn.Module):
    """Keeps its weight in bounds while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-1, 1)
        return self.head((x @ self.weight).tanh()).sin().cos()


class OnInput(nn.Module):
    """Asks for the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad = True
        return self.head(self.stem(x).tanh()).sin().cos()


class Parts(nn.Module):
    """Takes a tuple apart, and writes into what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).tanh().chunk(2, dim=-1)
        hidden = self.head(torch.cat([right.exp(), left.exp()], -1))
        hidden.mul_(2)
        return hidden.sin().cos().exp()


class CastOnce(nn.Module):
    """Reads one weight twice in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.twice(self.twice(x).tanh())
        return x.float().sin().cos()


REFUSED: dict[str, tuple[type[nn.Module], list[list[str]], str]] = {
    "an input": (Parts, [["x", "stem"]], "may not hold x: it computes nothing"),
    "the output": (Parts, [["cos", "exp_2", "output"]], "may not hold output"),
    "a parameter": (Written, [["weight", "clamp_"]], "may not hold weight: it computes nothing"),
    "written parameters": (
        Written,
        [["clamp_", "matmul"]],
        "may not hold clamp_: it writes to a parameter",
    ),
    "a change of an input": (OnInput, [["requires_grad_", "stem"]], "it acts on x itself"),
    "a gradient": (Inner, [["grad"]], "goes back through the nodes before it"),
    "on the way of a gradient": (
        Inner,
        [["tanh", "sin"]],
        "it goes with grad, of which it goes back",
    ),
    "half a tuple": (Parts, [["tanh", "chunk"]], "parts chunk from getitem, getitem_1"),
    "half a write": (Parts, [["cat", "head"]], "parts head from mul_"),
    "half a cast": (CastOnce, [["tanh", "twice"]], "parts twice from twice_1"),
    "nothing": (Parts, [[]], "is empty"),
    "a stranger": (Parts, [["stem", "nobody"]], "names nobody, which is no node of the stage"),
    "gaps": (Parts, [["stem", "exp"]], "is no run of the stage's nodes"),
    "another order": (Parts, [["sin", "mul_"]], "is no run of the stage's nodes"),
    "an overlap": (
        Parts,
        [["head", "mul_", "sin"], ["sin", "cos"]],
        "two regions of stage 0 share sin",
    ),
    "one twice": (Parts, [["sin"], ["sin"]], "two regions of stage 0 share sin"),
}


def graph_of(kind: type[nn.Module]) -> fx.GraphModule:
    torch.manual_seed(0)
    call = Arguments((torch.randn(4, 8),), {})
    module = capture(kind(), call).instantiate(call)
    apply_passes(module.graph, [Group()])
    return module


@pytest.mark.parametrize("what", REFUSED)
def test_an_impossible_region_is_refused(what: str) -> None:
    kind, regions, message = REFUSED[what]
    module = graph_of(kind)
    assignment = {node.name: 0 for node in module.graph.nodes if node.op != "get_attr"}
    with pytest.raises(InputError) as raised:
        emit(module, assignment, {0: regions})
    assert message in str(raised.value)


def test_a_region_of_another_stage_is_refused() -> None:
    module = graph_of(Parts)
    names = stage_order(
        module.graph, {n.name: 0 for n in module.graph.nodes if n.op != "get_attr"}, 0
    )
    assignment = {name: int(index >= names.index("sin")) for index, name in enumerate(names)}
    with pytest.raises(InputError, match="of stage 0 names sin"):
        emit(module, assignment, {0: [["sin"]]})


def test_weights_that_are_cast_once_are_bound_for_a_reason() -> None:
    """Cast for each reader, their gradient would be summed in another type."""
    torch.manual_seed(0)
    made = case_of(CastOnce(), Arguments((torch.randn(4, 8),), {}))
    assignment = assignment_of(made, ())
    wanted = outcome(made, assignment, {})
    assert (
        differences(
            wanted, outcome(made, assignment, {0: [["tanh", "twice", "tanh_1", "twice_1"]]})
        )
        == []
    )
    with patch("pipecompile.codegen.stages.check_regions"):
        apart = outcome(made, assignment, {0: [["tanh", "twice"]]})
        assert set(differences(wanted, apart)) == {"twice.bias", "twice.weight"}


class CastInParts(nn.Module):
    """A value of a layer that computes in float32 has several readers in bfloat16."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.own else nullcontext():
            x = self.norm(x)
            x = self.query(x) * self.key(x).tanh() + self.value(x)
        return x.float().sin()


@pytest.mark.parametrize("own", [True, False])
def test_what_a_stage_receives_is_cast_as_in_the_whole_model(own: bool) -> None:
    """A leaf would be cast once for all readers; here the cut or a region's end parts them."""
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not own):
        made = case_of(CastInParts(own=own), Arguments((torch.randn(16, 32),), {}))
        for cut in range(1, len(made.units)):
            assert_equal(made, [cut])
            assignment = assignment_of(made, [cut])
            regions = drawn_for(made, assignment, cut)
            assert (
                differences(outcome(made, assignment, {}), outcome(made, assignment, regions)) == []
            )


def test_a_region_that_ends_early_leaves_autocast_and_the_cache_of_its_casts() -> None:
    """Torch stops a second run in its middle, by an exception, perhaps where autocast is on."""
    made = case("autocast")
    assignment = assignment_of(made, ())
    order = made_order(made)
    limits = recompute_limits(instantiated(made))
    whole = [name for unit in units(order, limits) for name in unit]
    for end in range(3, len(whole) - 1):
        outcome(made, assignment, {0: [whole[:end]]})
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


# -- what else happens to stages


def test_the_first_half_of_a_backward_is_refused() -> None:
    made = case("residuals")
    assignment = assignment_of(made, ())
    stages, _ = eager(made, assignment, drawn_for(made, assignment, 0))
    _, saved = stages[0].forward(made.inputs, NOW)
    with pytest.raises(AssertionError, match="go back as a whole"):
        stages[0].backward_input(saved, ())


def test_values_loaded_and_types_changed_reach_the_regions() -> None:
    """Buffers become other tensors by `.to`, parameters keep being the same."""

    def trained(regions: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        made = case_of(KEPT["normed"](), Arguments((torch.randn(4, 24, 32),), {}))
        assignment = assignment_of(made, ())
        (stage,), (emitted,) = eager(
            made, assignment, drawn_for(made, assignment, 0) if regions else {}
        )
        emitted.module.to(torch.float64)
        state = emitted.module.state_dict()
        emitted.module.load_state_dict({name: value * 1.5 for name, value in state.items()})
        rows = [value.double() for value in made.inputs]
        flights = [stage.forward(rows, StreamKey(0, 0, microbatch)) for microbatch in range(2)]
        for _, saved in flights:
            stage.backward(saved, (), {})
        module = emitted.module
        return [p.grad for p in module.parameters() if p.grad is not None], list(module.buffers())

    assert same(trained(False), trained(True))


@pytest.mark.parametrize(
    ("regions", "error"), [({}, RuntimeError), ({0: [["_0", "_1", "_2"]]}, InputError)]
)
def test_parameters_written_to_before_the_backward_are_an_error(
    regions: Regions, error: type[Exception]
) -> None:
    """Without regions autograd says so; what is computed again would silently be another step's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    made = case_of(model, Arguments((torch.randn(4, 8),), {}))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_stepped)
    with pytest.raises(error):
        outcome(made, assignment_of(made, ()), regions)


@torch.no_grad()
def _stepped(parameter: Tensor) -> None:
    parameter.sub_(parameter.grad)


def test_statistics_move_once_also_after_buffers_were_moved() -> None:
    """`.to` replaces the buffers, of which a recompute of the whole stage uses copies."""

    def average(*, recompute: bool) -> Tensor:
        torch.manual_seed(0)
        made = case_of(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), Arguments((torch.randn(4, 8),), {})
        )
        (emitted,) = emit(instantiated(made), assignment_of(made, ()))
        emitted.module.to(torch.float64)
        stage = EagerStage(
            emitted.module, gradient_inputs=(False,), loss=loss_of, buffers=emitted.buffers
        )
        _, saved = stage.forward(
            [value.double() for value in made.inputs], NOW, recompute=recompute
        )
        if recompute:
            stage.recompute(saved)
        stage.backward(saved, (), {})
        return made.capture.model.get_buffer("1.running_mean")

    assert torch.equal(average(recompute=True), average(recompute=False))


def test_a_copy_of_a_stage_works_on_tensors_of_its_own() -> None:
    torch.manual_seed(0)
    made = case_of(KEPT["normed"](), Arguments((torch.randn(4, 24, 32),), {}))
    assignment = assignment_of(made, ())
    (stage,) = emit(instantiated(made), assignment, drawn_for(made, assignment, 1, nested=True))
    twin = copy.deepcopy(stage.module)
    assert list(twin.state_dict()) == list(stage.module.state_dict())
    with use_stream(NOW):
        loss_of(twin(*made.inputs), None).backward()
    assert all(p.grad is None for p in stage.module.parameters())
    with use_stream(NOW):
        loss_of(stage.module(*made.inputs), None).backward()
    assert same([p.grad for p in twin.parameters()], [p.grad for p in stage.module.parameters()])
    assert same(dict(twin.named_buffers()), dict(stage.module.named_buffers()))


@pytest.mark.parametrize("name", ["checkpointed", "buffers"])
def test_regions_are_found_again_in_the_graph_of_another_mode(name: str) -> None:
    """A step in eval mode (frozen statistics, no dropout) has the cut and regions of training."""
    made = case(name)
    assignment = assignment_of(made, (len(made.units) // 2,))
    regions = drawn_for(made, assignment, 0, nested=True)
    module = instantiated(made)
    emit(module, assignment)
    first_names = made.capture.first_names
    ties = ties_of(module, module.graph, first_names)
    holders = {alias: ties[name].stages for alias, name in first_names.items() if name in ties}
    model = made.capture.model.eval()
    try:
        other = case_of(model, made.call)
        graph = instantiated(other)
        stages = transfer(assignment, made.capture.graph, graph, holders)
        moved = transfer_regions(regions, made.capture.graph, graph, stages)
        held = [name for chosen in moved.values() for region in chosen for name in region]
        assert len(held) > 0.4 * sum(
            len(region) for chosen in regions.values() for region in chosen
        )
        assert differences(outcome(other, stages, {}), outcome(other, stages, moved)) == []
    finally:
        model.train()


def test_regions_stay_where_the_graph_stays() -> None:
    made = case("gpt2")
    assignment = assignment_of(made, (len(made.units) // 2,))
    regions = drawn_for(made, assignment, 1, nested=True)
    assert transfer_regions(regions, made.capture.graph, instantiated(made), assignment) == regions
