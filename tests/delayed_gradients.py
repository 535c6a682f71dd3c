"""Asynchronous training as its papers define it: the unsplit model in a plain loop.

Weights are a list of versions for each parameter. A microbatch runs forward and backward on copies
of the versions that the rule names, one microbatch after the other, so nothing is ever in flight.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from pipecompile.api.verification import reference_for
from pipecompile.frontend.target import Target
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.plan import Plan

__all__ = ["OPTIMIZERS", "Batches", "DelayedGradients"]

Batches = Sequence[tuple[Tensor, Tensor]]
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    # The bias of the convolution before the layer norm has no effect: its gradient is noise of
    # 1e-17, which AdamW would make a step of with its usual eps.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.02, eps=1e-5),
}


def version(schedule: str, replicas: Sequence[int], stage: int, microbatch: int, each: int) -> int:
    """Which version a microbatch reads of a parameter, of which `each` make a minibatch, in a
    pipeline with so many ranks for each stage.
    """
    stages = len(replicas)
    if max(replicas) > 1 and schedule in ("pipedream", "pipedream-vertical-sync"):
        return _version_of_round(
            replicas, stage if schedule == "pipedream" else 0, microbatch, each
        )
    if schedule == "pipedream":
        return max(0, microbatch - (stages - 1 - stage))
    if schedule == "pipedream-vertical-sync":
        return max(0, microbatch - (stages - 1))
    if schedule == "pipedream-2bw":
        return max(0, microbatch // each - 1)
    return microbatch // each


def _version_of_round(replicas: Sequence[int], stage: int, microbatch: int, each: int) -> int:
    """The minibatches that are back as a round begins, of one microbatch for each rank: all but
    the last ones in flight, which are as many as keep all ranks from the stage on busy.
    """
    ranks, own = sum(replicas[stage:]), replicas[stage]
    in_flight = next(rounds for rounds in range(1, ranks + 1) if rounds * own >= ranks)
    rounds_back = microbatch // own + 1 - in_flight
    return max(0, rounds_back * own // each)


class DelayedGradients:
    """The unsplit model of `target`, to be trained by the rule of any schedule.

    `plan` says only how it draws random numbers.
    """

    def __init__(self, target: Target, plan: Plan) -> None:
        assert target.loss_fn is not None
        self._loss_fn = target.loss_fn
        self._reference = reference_for(target, plan)
        self._initial = copy.deepcopy(self._reference.model.state_dict())

    def train(
        self,
        plan: Plan,
        batches: Batches,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        schedule: str | None = None,
        replicas: int = 1,
        max_norm: float | None = None,
        rate: Callable[[int], float] = lambda _: 1.0,
    ) -> tuple[list[float], dict[str, Tensor]]:
        """The losses of minibatches and the last version of the model's state.

        `rate(update)` scales the learning rate. A tied parameter belongs to the first stage of the
        plan that reads it. The rule is that of the plan unless another `schedule` is given.
        """
        schedule, each = schedule or plan.schedule.name, plan.microbatches
        model, loss_fn = self._reference.model, self._loss_fn
        model.load_state_dict(self._initial)
        owner = {parameter.name: parameter.owner for parameter in plan.parameters}
        masters = {name: nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
        versions = {name: [master.detach().clone()] for name, master in masters.items()}
        stepped = optimizer(list(masters.values()))
        initial = [group["lr"] for group in stepped.param_groups]
        on = list(map(len, plan.schedule.stage_ranks))
        is_soon = schedule in ("pipedream", "pipedream-vertical-sync") and max(on) == 1
        per_update = 1 if is_soon else each
        sums = {name: torch.zeros_like(master) for name, master in masters.items()}
        losses = []
        for number, (inputs, wanted) in enumerate(batches):
            # The microbatches of all replicas, of which the first `each` are the first one's.
            parts = (tensor.chunk(each * replicas) for tensor in (inputs, wanted))
            rows, total = list(zip(*parts, strict=True)), 0.0
            for index in range(each):
                microbatch = number * each + index
                for row in range(index, each * replicas, each):
                    for name, parameter in model.named_parameters():
                        read = version(schedule, on, owner[name], microbatch, each)
                        parameter.data.copy_(versions[name][read])
                        parameter.grad = None
                    x, y = rows[row]
                    loss = loss_fn(self._reference._run(StreamKey(0, number, row), (x,), {}), y)
                    loss.backward()
                    total += loss.item() / (each * replicas)
                    for name, parameter in model.named_parameters():
                        assert parameter.grad is not None
                        sums[name] += parameter.grad
                if (microbatch + 1) % per_update:
                    continue
                for name, master in masters.items():
                    master.grad = sums[name] / (per_update * replicas)
                    sums[name] = torch.zeros_like(master)
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(list(masters.values()), max_norm)
                for group, first in zip(stepped.param_groups, initial, strict=True):
                    group["lr"] = first * rate((microbatch + 1) // per_update - 1)
                stepped.step()
                for name, master in masters.items():
                    versions[name].append(master.detach().clone())
            losses.append(total)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        return losses, {**{name: each[-1] for name, each in versions.items()}, **buffers}
