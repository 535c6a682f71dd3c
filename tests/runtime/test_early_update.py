"""Updates that are validated later, against the update that the norm asks for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import nan

import pytest
import torch
from torch import nn

from pipecompile import HostOptimizer
from pipecompile.memory_model.optimizer import optimizer_bytes
from pipecompile.runtime.early_update import EarlyUpdate
from pipecompile.runtime.norm import NormOnItsWay
from pipecompile.runtime.update_rule import UpdateRule
from tests.memory_model.test_optimizer import as_costed

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Factory] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    "on the host": lambda parameters: HostOptimizer(parameters, torch.optim.AdamW),
}
RULE = UpdateRule(max_norm=1.0, skip_nonfinite=True)


def parameters_of(seed: int) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, 5), (5,), (2, 3, 4)]
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(parameters: list[nn.Parameter], norm: float, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters[:2]:  # the last one has none
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
    for parameter in parameters[:2]:
        assert parameter.grad is not None
        parameter.grad *= norm / 1e-3


def norm_of(own: float, others: float) -> NormOnItsWay:
    power = torch.tensor(own, dtype=torch.float64) ** 2
    return NormOnItsWay(power**0.5, power + others**2, 2.0)


def state_of(optimizer: torch.optim.Optimizer) -> object:
    return copy.deepcopy(optimizer.state_dict())


class Counting(torch.optim.SGD):
    """An optimizer whose groups count its steps, from the first one on."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1


def test_what_a_step_adds_to_groups_is_taken_back() -> None:
    parameters = parameters_of(0)
    optimizer = Counting(parameters, lr=0.1)
    give_gradients(parameters, 0.5, 0)
    update = EarlyUpdate([optimizer], norm_of(0.5, nan), RULE)
    assert optimizer.param_groups[0]["steps"] == 1
    assert not update.validate(lambda norm: norm.powers**0.5)  # it is left out
    assert "steps" not in optimizer.param_groups[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_validated_update_is_the_one_that_waits(name: str) -> None:
    """Steps that stand, that are clipped for what others have, or for what is here, and that are
    left out; the first one too, before which there is no state.
    """
    steps = [(0.5, 2.0), (0.5, 0.1), (2.0, 0.1), (0.5, nan), (0.2, 0.2), (0.5, 2.0), (nan, 0.0)]
    early, waiting = parameters_of(0), parameters_of(0)
    optimizers = [OPTIMIZERS[name](each) for each in (early, waiting)]
    verdicts = []
    for step, (own, others) in enumerate(steps):
        for each in (early, waiting):
            give_gradients(each, own, step)
        update = EarlyUpdate(optimizers[:1], norm_of(own, others), RULE)
        assert all(parameter.grad is None for parameter in early)
        verdicts.append(update.validate(lambda norm: norm.powers**0.5))
        gradients = [p.grad for p in waiting if p.grad is not None]
        if RULE.apply(gradients, norm_of(own, others).powers ** 0.5):
            optimizers[1].step()
        optimizers[1].zero_grad()
        for left, right in zip(early, waiting, strict=True):
            assert torch.equal(left, right), step
        assert str(state_of(optimizers[0])) == str(state_of(optimizers[1])), step
    assert verdicts == [False, True, False, False, True, False, False]


def test_a_part_of_the_norm_that_is_too_much_already_keeps_an_update_from_being_made() -> None:
    parameters = parameters_of(0)
    before = [parameter.detach().clone() for parameter in parameters]
    give_gradients(parameters, 2.0, 0)
    update = EarlyUpdate([OPTIMIZERS["adamw"](parameters)], norm_of(2.0, 0.0), RULE)
    assert all(map(torch.equal, parameters, before))
    assert update.held_bytes == sum(p.nbytes for p in parameters[:2])  # gradients alone
    update.validate(lambda norm: norm.powers**0.5)
    assert not torch.equal(parameters[0], before[0])


def test_what_it_holds_is_what_plans_count() -> None:
    """Copies of parameters and state, and the gradients."""
    parameters = parameters_of(0)
    optimizer = OPTIMIZERS["adamw"](parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 1e-3)
        update = EarlyUpdate([optimizer], norm_of(0.1, 0.1), RULE)
        held = update.held_bytes
        update.validate(lambda norm: norm.powers**0.5)
        assert update.held_bytes == 0
    state, _ = optimizer_bytes(as_costed(parameters), "adamw", master_weights=False, lists=False)
    assert held == sum(state) + 2 * sum(p.nbytes for p in parameters)


def test_without_a_norm_nothing_is_kept() -> None:
    parameters = parameters_of(0)
    give_gradients(parameters, 9.0, 0)
    update = EarlyUpdate([OPTIMIZERS["momentum"](parameters)], None, UpdateRule())
    assert update.held_bytes == 0
    assert update.validate(lambda norm: pytest.fail("there is none"))
