"""What the workers do; each function runs on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from benchmarks.gpipe_models import Transformer, token_loss
from benchmarks.memory_prediction import PlanSetting, RankPeak, measure
from examples import models
from pipecompile.api.compilation import pipecompile
from pipecompile.api.links import probe_links
from pipecompile.api.verification import Comparison, compare, reference_for, verify
from pipecompile.errors import PipecompileError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.ir.links import Links
from pipecompile.runtime import probe
from pipecompile.runtime.messages import BoundaryShape
from pipecompile.schedule import selection as ordering
from tests.orders import PipelineOrder, compared, pipeline_under
from tests.zoo.models import MODELS


@dataclass(frozen=True)
class Verdict:
    """What `verify` found, small enough to send."""

    passed: bool
    references: tuple[str, ...]
    unequal: tuple[tuple[str, float], ...]
    tied: frozenset[str]


def load(name: str) -> Target:
    """An example model, or one of the zoo."""
    return Target.of((getattr(models, name, None) or MODELS[name])(), name)


def verify_model(name: str, options: dict[str, Any]) -> Verdict:
    """One seeded step of the pipeline beside the unsplit model's."""
    # What is tested does not depend on how long is searched.
    with patch.object(ordering, "SEARCH_SECONDS", 0.2):
        options = {
            "costs": "flops",
            "microbatches": 4,
            "self_check": False,
            **options,
        }  # this is a check itself
        return _verdict(verify(load(name), **options)[1])


def verify_order(name: str, order: PipelineOrder) -> Verdict:
    """The same under any order, planned or not."""
    return _verdict([compared(order, load(name))])


def _verdict(found: list[Comparison]) -> Verdict:
    unequal = tuple(
        (d.name, d.relative) for comparison in found for d in comparison.differences if not d.equal
    )
    return Verdict(
        all(c.passed for c in found), tuple(c.reference for c in found), unequal, found[0].tied
    )


def measured_transformer(setting: PlanSetting) -> RankPeak:
    """Return what a rank of a narrow GPipe Transformer holds at its peak."""
    torch.manual_seed(0)
    model, tokens = Transformer(3, 64), torch.randint(0, 32_000, (8, 64))
    return measure(Target(model, arguments_of(model, tokens), token_loss, tokens), setting)


def receive_buffers(schedule: str, microbatches: int) -> tuple[int, int]:
    """Return the most receive buffers that live at once in two steps, and how many outlive them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
    batch = torch.randn(2 * microbatches, 8)
    pipeline = pipecompile(
        model,
        batch,
        k=2,
        microbatches=microbatches,
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
        costs="flops",
        self_check=False,
    )
    made, counts = list[StorageWeakRef](), list[int]()
    make_buffer = BoundaryShape.buffer

    def alive() -> int:
        return sum(not storage.expired() for storage in made)

    def buffer(shape: BoundaryShape, device: torch.device) -> Tensor:
        memory = make_buffer(shape, device)
        made.append(StorageWeakRef(memory.untyped_storage()))
        counts.append(alive())
        return memory

    with patch.object(BoundaryShape, "buffer", buffer):
        for _ in range(2):
            pipeline.step(batch, torch.zeros_like(batch))
    assert len(made) == 2 * microbatches, "each rank receives one tensor of each microbatch"
    return max(counts), alive()


def probed() -> Links:
    """The links between the ranks, from few messages."""
    with patch.object(probe, "REPEATS", 10):
        return probe_links()


def losses(name: str, k: int, steps: int) -> tuple[list[float], list[float]] | None:
    """The losses of several optimizer steps, pipelined and unsplit; on the last stage's rank."""
    target = load(name)
    pipeline = pipecompile(
        target.model, target.call, k=k, microbatches=4, costs="flops", loss_fn=target.loss_fn
    )
    reference = reference_for(target, pipeline.plan)
    twins = [
        torch.optim.SGD(p, lr=0.05, momentum=0.9)
        for p in (pipeline.parameters(), reference.model.parameters())
    ]
    own, unsplit = [], []
    for step in range(steps):
        unsplit.append(reference.step(target, 4, step=step).item())
        twins[0].zero_grad()
        loss = pipeline.step(target.call, target.targets)
        own.append(float("nan") if loss is None else loss.item())
        for optimizer in twins:
            optimizer.step()
    return (own, unsplit) if dist.get_rank() == k - 1 else None


def state_names(name: str, k: int) -> list[str]:
    """The names of this rank's state, after a checkpoint of the original was loaded into it."""
    target = load(name)
    pipeline = pipecompile(
        target.model, target.call, k=k, microbatches=4, costs="flops", loss_fn=target.loss_fn
    )
    checkpoint = {
        key: torch.full_like(value, 2) for key, value in target.model.state_dict().items()
    }
    pipeline.load_state_dict(checkpoint)
    state = pipeline.state_dict()
    assert all(torch.equal(value, checkpoint[key]) for key, value in state.items())
    return sorted(state)


def tied_values(name: str, k: int, tied: str) -> torch.Tensor | None:
    """Return a tied parameter on the ranks that hold it; each rank initialised its own model."""
    target = load(name)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.add_(dist.get_rank())
    pipeline = pipecompile(
        target.model, target.call, k=k, microbatches=4, costs="flops", loss_fn=target.loss_fn
    )
    found = dict(pipeline.named_parameters()).get(tied)
    return None if found is None else found.detach().clone()


def evaluation(name: str, k: int) -> bool | None:
    """Whether `evaluate` gives what the model gives in eval mode; on the last stage's rank."""
    target = load(name)
    with torch.no_grad():
        rows = [
            target.model.eval()(*[tensor[i : i + 2] for tensor in target.call.args])
            for i in range(0, 8, 2)
        ]
    target.model.train()
    pipeline = pipecompile(
        target.model, target.call, k=k, microbatches=4, costs="flops", loss_fn=target.loss_fn
    )
    pipeline.step(target.call, target.targets)  # receive buffers of training must not disturb it
    pipeline.load_state_dict(load(name).model.state_dict())
    found = pipeline.evaluate(target.call)
    return None if found is None else torch.equal(found, torch.cat(rows))


def switched(name: str, k: int) -> list[bool]:
    """Return whether steps in train, eval and again train mode equal the unsplit model's."""
    target = load(name)
    pipeline = pipecompile(
        target.model, target.call, k=k, microbatches=4, costs="flops", loss_fn=target.loss_fn
    )
    reference = reference_for(target, pipeline.plan)
    found = []
    for training in (True, False, True):
        for model in (target.model, reference.model):
            model.train(training).zero_grad()
        wanted = reference.step(target, 4, step=pipeline.steps)
        loss = pipeline.step(target.call, target.targets)
        gradients = {name: parameter.grad for name, parameter in reference.model.named_parameters()}
        buffers = dict(reference.model.named_buffers())
        found.append(
            compare(
                pipeline, (wanted.item(), loss), gradients, buffers, reference.description
            ).passed
        )
    return found


class Head(nn.Module):
    """In eval mode another head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.other = (
            nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
            nn.Linear(8, 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        return x if self.training else self.other(x)


def head_of_evaluation() -> str:
    """What each rank says of a parameter that no stage of the plan holds."""
    x = torch.ones(4, 8)
    pipeline = pipecompile(
        Head(), x, 2, microbatches=2, costs="flops", loss_fn=nn.functional.mse_loss
    )
    try:
        pipeline.evaluate(x)
    except PipecompileError as error:
        return str(error)
    return "accepted"


def several_stages(
    name: str, order: PipelineOrder
) -> tuple[list[float] | None, list[float], list[str], bool | None]:
    """Return losses of three optimizer steps, this rank's state names, and if `evaluate` agrees."""
    target = load(name)
    pipeline = pipeline_under(order, target)
    reference = reference_for(target, pipeline.plan)
    twins = [
        torch.optim.SGD(p, lr=0.05, momentum=0.9)
        for p in (pipeline.parameters(), reference.model.parameters())
    ]
    own, unsplit = [], []
    for step in range(3):
        unsplit.append(reference.step(target, 4, step=step).item())
        twins[0].zero_grad()
        own.append(pipeline.step(target.call, target.targets))
        for optimizer in twins:
            optimizer.step()
    losses = None if own[0] is None else [loss.item() for loss in own]
    with torch.no_grad():
        rows = [
            reference.model.eval()(*[tensor[i : i + 2] for tensor in target.call.args])
            for i in range(0, 8, 2)
        ]
    found = pipeline.evaluate(target.call)
    agrees = None if found is None else torch.equal(found, torch.cat(rows))
    return losses, unsplit, sorted(pipeline.state_dict()), agrees


def plans(name: str, k: int, microbatches: int | None) -> tuple[str, int]:
    """Return the costs of each rank's plan, and the steps after a short minibatch under it. Without
    a number of microbatches all that is left open is chosen.
    """
    target = load(name)
    pipeline = pipecompile(
        target.model,
        target.call,
        k=k,
        microbatches=microbatches,
        costs="measured",
        loss_fn=target.loss_fn,
    )
    (value,) = target.call.args
    pipeline.step(value[:6], target.targets[:6])
    return pipeline.plan.fingerprint.costs, pipeline.steps


def refusal(name: str, options: dict[str, Any]) -> str:
    """The message with which each rank refuses."""
    target = load(name)
    try:
        pipecompile(
            target.model, target.call, loss_fn=target.loss_fn, **{"costs": "flops", **options}
        )
    except PipecompileError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def refusal_on(rank: int, name: str, costs: str) -> str:
    """The same, where the costs are a file that one rank does not find."""
    costs = f"{costs}.absent" if dist.get_rank() == rank else costs
    return refusal(name, {"k": 2, "microbatches": 4, "costs": costs})
