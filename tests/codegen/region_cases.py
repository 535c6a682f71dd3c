"""Models with random regions, and how tests run them as stages in one process."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from stages import Case, case_of, eager_stages
from torch import Tensor, fx, nn
from zoo import first, same
from zoo.models import MODELS as ZOO

from examples import models as examples
from pipecompile.codegen.regions import Regions, stage_order
from pipecompile.codegen.stages import StageModule, emit
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.graph.random_streams import StreamKey
from pipecompile.graph.recomputability import RecomputeLimits, recompute_limits
from pipecompile.ir.schedule import Action
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.runtime.one_process import step
from pipecompile.runtime.rank_step import Minibatch
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


def instantiated(region_case: Case) -> fx.GraphModule:
    module = region_case.capture.instantiate(region_case.call)
    apply_passes(module.graph, [Group()])
    return module


def assignment_of(region_case: Case, cuts: Sequence[int]) -> dict[str, int]:
    return {
        name: sum(unit >= cut for cut in cuts)
        for unit, names in enumerate(region_case.units)
        for name in names
    }


def eager(
    region_case: Case, assignment: dict[str, int], regions: Regions
) -> tuple[list[EagerStage], tuple[StageModule, ...]]:
    """The stages as one process runs them, with the gradients of tied parameters handed on."""
    module = instantiated(region_case)
    emitted = emit(module, assignment, regions)
    return eager_stages(region_case, module, emitted), emitted


def outcome(
    region_case: Case, assignment: dict[str, int], regions: Regions, order: str | None = None
) -> Outcome:
    """A step on the state of the model, which is as before afterwards."""
    model = region_case.capture.model
    start = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stages, emitted = eager(region_case, assignment, regions)
    actions = [Action.parse(text) for text in (order or IN_FLIGHT[len(stages)]).split()]
    rows = [region_case.inputs, [value.flip(0) for value in region_case.inputs]]
    torch.manual_seed(11)
    try:
        result = step(stages, actions, Minibatch(rows, [None, None], NOW.seed, NOW.step))
        losses = [loss for (loss,) in result.values]
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
    region_case: Case, assignment: dict[str, int], seed: int, *, nested: bool = False
) -> dict[int, list[list[str]]]:
    module = instantiated(region_case)
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


@cache
def plain(name: str, cuts: tuple[int, ...]) -> Outcome:
    return outcome(case(name), assignment_of(case(name), cuts), {})


def node_order(region_case: Case) -> list[str]:
    return stage_order(instantiated(region_case).graph, assignment_of(region_case, ()), 0)


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
