"""An update of weights that is made before all ranks have said whether it is right.

This is post-validation (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section
4). Clipping, and leaving out what is not finite, need the norm of all gradients. A rank begins to
reduce that norm, and steps at once as if nothing were to be clipped, unless its own part of the
norm says already that something is. When the norm is there, the update is validated:

    gradients ─▶ reduce ·································▶ norm
         │                                                  ├─ nothing to clip: the update stands
         └─ keep what is overwritten ─ step ─ forwards ────▶└─ else: roll back, clip, step

The norm is reduced as without post-validation, so that the result is the same bit for bit; in the
paper partial sums travel from stage to stage. A rollback puts back copies: to compute a step
backwards, as the paper does, would round.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipecompile.runtime.norm import NormOnItsWay
from pipecompile.runtime.update_rule import UpdateRule

__all__ = ["EarlyUpdate"]


class EarlyUpdate:
    """One update of this process's weights by `optimizers`, with the gradients that there are.

    It takes the gradients off the parameters. `rule` says what their `norm`, over all ranks, does
    to them. Without a norm nothing need be validated.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        norm: NormOnItsWay | None,
        rule: UpdateRule,
    ) -> None:
        self._optimizers = optimizers
        self._norm = norm
        self._rule = rule
        self._before: list[_OptimizerCopy] = []
        self._gradients: dict[nn.Parameter, Tensor] = {}
        if norm is None:
            self._step()
            self._taken()
            return
        # What this process knows of the norm is never more than all of it.
        is_early = rule.changes_nothing(norm.own)
        if is_early:
            self._before = [_OptimizerCopy(each) for each in optimizers]
        # Off the parameters: the next step begins with `zero_grad`, before it is known whether
        # these are needed once more.
        self._gradients = self._taken()
        if is_early:
            # With copies: a step may write to gradients, as SGD's does with nesterov and foreach.
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient.clone()
            self._step()
            self._taken()

    def validate(self, wait: Callable[[NormOnItsWay], Tensor]) -> bool:
        """Make the update the right one; `wait` returns the norm when it is there.

        Return whether the weights were the right ones before, which all processes say alike.
        """
        if self._norm is None:
            return True
        norm = wait(self._norm)
        is_right = self._rule.changes_nothing(norm)
        if not is_right:
            self._redo(norm)
        self._before, self._gradients = [], {}
        return is_right

    @property
    def held_bytes(self) -> int:
        """The bytes that are held until it is validated."""
        copies = sum(before.bytes for before in self._before)
        return copies + sum(gradient.nbytes for gradient in self._gradients.values())

    def _redo(self, norm: Tensor) -> None:
        """Put back what was overwritten, and make the update that the rule wants."""
        for before in self._before:
            before.restore()
        if self._rule.apply([*self._gradients.values()], norm):
            for parameter, gradient in self._gradients.items():
                parameter.grad = gradient
            self._step()
            self._taken()

    def _step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()

    def _taken(self) -> dict[nn.Parameter, Tensor]:
        """Take the gradients off the parameters and return them."""
        parameters = [
            p for each in self._optimizers for g in each.param_groups for p in g["params"]
        ]
        taken = {p: p.grad for p in parameters if p.grad is not None}
        for parameter in parameters:
            parameter.grad = None
        return taken


class _OptimizerCopy:
    """A copy of what a step of an optimizer overwrites: parameters, its state, and the options of
    groups, of which some optimizers change one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [_without_parameters(group) for group in optimizer.param_groups]
        # A step changes no parameter without a gradient.
        stepped = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        self._parameters = {p: p.detach().clone() for p in stepped}
        self._state = {p: copy.deepcopy(optimizer.state.get(p)) for p in stepped}

    @property
    def bytes(self) -> int:
        """The bytes of parameters and state."""
        values = [*self._parameters.values()]
        for state in self._state.values():
            values += [slot for slot in (state or {}).values() if isinstance(slot, Tensor)]
        return sum(value.nbytes for value in values)

    @torch.no_grad()
    def restore(self) -> None:
        """Put it all back."""
        for parameter, value in self._parameters.items():
            parameter.copy_(value)
        for parameter, state in self._state.items():
            if state is None:
                # The first step of all made it. If it stayed, Adam would count two steps, and
                # correct its means for two.
                self._optimizer.state.pop(parameter, None)
            else:
                self._optimizer.state[parameter] = state
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            # Without what the step has added.
            for name in group.keys() - options.keys() - {"params"}:
                del group[name]
            group.update(options)


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
