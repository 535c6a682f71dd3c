"""One rank of a plan run alone on a device, with recorded receives.

First all stages run here once, and what crosses their boundaries is recorded in host memory. Then
a rank runs its row of the schedule as `runtime/distributed_pipeline.py` does on a rank of its own:

    RECV          a buffer is made, and filled with what was recorded
    F, R, B, I, W the stage's calls, in the order of the row
    sends         outputs and input gradients are held until the step ends, as the runtime does
    end of step   gradients are divided; then the optimizer steps

Nothing is exchanged while it runs, so its peak is that of a rank without NCCL's buffers.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.subject import Subject
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.plan import Plan
from pipecompile.ir.schedule import COMPUTE, Action, Kind
from pipecompile.memory_model.unread_gradients import UnreadGradients, unread_gradients
from pipecompile.runtime.gradients import divide_gradients
from pipecompile.runtime.stage import BackwardParts, EagerStage, SavedForward
from pipecompile.runtime.stage_times import StageWorkload, measure_stages

__all__ = ["OPTIMIZERS", "Messages", "SingleRank", "ranks_of", "record", "resident_bytes"]

Gradients = Sequence[Tensor | None]
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
}


@dataclass
class Messages:
    """What reaches each stage, by stage and then by microbatch, in host memory."""

    inputs: dict[int, list[Sequence[Tensor]]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[int, list[Gradients]] = field(default_factory=lambda: defaultdict(list))


@torch.enable_grad()
def record(subject: Subject, stages: Sequence[EagerStage]) -> Messages:
    """Run each microbatch through all stages and back; return what crossed their boundaries.

    The parameters have no gradients afterwards.
    """
    messages = Messages()
    targets = subject.targets()
    for microbatch, values in enumerate(subject.inputs()):
        key, saved = StreamKey(0, 0, microbatch), list[SavedForward]()
        arriving: Sequence[Tensor] = values
        for index, stage in enumerate(stages):
            messages.inputs[index].append(_on_host(arriving))
            arriving, kept = stage.forward(arriving, key, targets[microbatch])
            saved.append(kept)
        gradients: Gradients = ()
        for index in reversed(range(len(stages))):
            messages.gradients[index].append(_on_host(gradients))
            gradients = stages[index].backward(saved.pop(), gradients, {})
    _clear_gradients(subject.target.model)
    return messages


def _on_host(values: Iterable[Any]) -> list[Any]:
    return [None if value is None else value.detach().to("cpu", copy=True) for value in values]


def _clear_gradients(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.grad = None


def resident_bytes(stage: EagerStage, minibatch: Any) -> int:
    """Return the bytes that a rank holds before its first step.

    These are the parameters and buffers of its stage, and what it reads of the minibatch.
    """
    leaves = [leaf for leaf in tree_leaves(minibatch) if isinstance(leaf, Tensor)]
    storages = dict[int, int]()
    for tensor in (*stage.module.parameters(), *stage.module.buffers(), *leaves):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@dataclass
class SingleRank:
    """A rank that holds one stage, its row of actions, and what reaches it.

    `inputs` and `targets` are per microbatch. The first stage finds its inputs on the device; what
    other stages get, and `gradients`, is in host memory until its RECV. As many gradients are held
    as would be `unread`.
    """

    index: int
    stage: EagerStage
    row: Sequence[Action]
    unread: UnreadGradients
    inputs: Sequence[Sequence[Tensor]]
    gradients: Sequence[Gradients]
    targets: Sequence[Any]
    minibatch: Any
    device: torch.device

    @property
    def resident_bytes(self) -> int:
        """What it holds before its first step."""
        return resident_bytes(self.stage, self.minibatch)

    def train(self, optimizer: str, steps: int = 2) -> None:
        """Run steps with an optimizer, which makes its state in the first one.

        At the end gradients are gone.
        """
        stepper = OPTIMIZERS[optimizer](self._trained(), lr=1e-3)
        for step in range(steps):
            self.step(step)
            stepper.step()
            stepper.zero_grad()

    def clear(self) -> None:
        """Free the gradients that a step has left."""
        _clear_gradients(self.stage.module)

    def _trained(self) -> list[nn.Parameter]:
        return [value for value in self.stage.module.parameters() if value.requires_grad]

    @torch.enable_grad()
    def step(self, step: int = 0) -> None:
        """Perform the row once; gradients are left on the parameters."""
        values = {} if self.index else dict(enumerate(self.inputs))
        gradients = dict[int, Gradients]()
        recomputed = {action.microbatch for action in self.row if action.kind is Kind.RECOMPUTE}
        saved, parts = dict[int, SavedForward](), dict[int, BackwardParts]()
        sent, returned = dict[int, Gradients](), deque[Gradients]()
        for action in self.row:
            number = action.microbatch or 0
            match action.kind:
                case Kind.RECEIVE_FORWARD:
                    values[number] = self._received_values(number)
                case Kind.RECEIVE_BACKWARD:
                    gradients[number] = self._received_gradients(number)
                case Kind.FORWARD:
                    sent[number], saved[number] = self.stage.forward(
                        values.pop(number),
                        StreamKey(0, step, number),
                        self.targets[number],
                        recompute=number in recomputed,
                    )
                case Kind.RECOMPUTE:
                    self.stage.recompute(saved[number])
                case Kind.BACKWARD:
                    made = self.stage.backward(saved.pop(number), gradients.pop(number, ()), {})
                    returned.append(self._sent(made))
                    del made, sent[number]
                case Kind.BACKWARD_INPUT:
                    made, parts[number] = self.stage.backward_input(
                        saved.pop(number), gradients.pop(number, ())
                    )
                    returned.append(self._sent(made))
                    del made, sent[number]
                case Kind.BACKWARD_WEIGHT:
                    self.stage.backward_weight(parts.pop(number), {})
                case Kind.SEND_BACKWARD:
                    while len(returned) > self.unread[self.index, number]:
                        returned.popleft()
                case Kind.SEND_FORWARD | Kind.REDUCE:
                    pass  # what would be sent is held in `sent`
                case _:
                    raise AssertionError(f"{action} is no action of a synchronous schedule")
        divide_gradients(self.stage.module.parameters(), len(self.inputs))

    def _received_values(self, number: int) -> Sequence[Tensor]:
        return [value.to(self.device, copy=True) for value in self.inputs[number]]

    def _received_gradients(self, number: int) -> Gradients:
        return [
            None if value is None else value.to(self.device, copy=True)
            for value in self.gradients[number]
        ]

    def _sent(self, gradients: list[Tensor | None]) -> Gradients:
        """Return what is sent back: contiguous, and not a part of a larger storage.

        The list is filled in place, so that each gradient is freed as soon as its copy is there.
        """
        for place, gradient in enumerate(gradients):
            if self.index == 0 or gradient is None:
                gradients[place] = None
                continue
            value = gradient.contiguous()
            is_own = value.untyped_storage().nbytes() == value.nbytes
            gradients[place] = value if is_own else value.clone()
        return gradients

    def action_ns(self) -> dict[Kind, int]:
        """Return what each kind of action takes for one microbatch, and REDUCE the end of a step.

        All microbatches get the gradients of the first one, since times do not depend on them.
        """
        inputs = list(self.inputs)
        if self.index:
            inputs = [self._received_values(number) for number in range(len(inputs))]
        workload = StageWorkload(self.stage, inputs, self.targets, self._received_gradients(0))
        row = [action for action in self.row if action.kind in COMPUTE]
        times = measure_stages({self.index: workload}, row, self.device)
        self.clear()
        return times[self.index]


def ranks_of(subject: Subject, plan: Plan) -> list[SingleRank]:
    """Return all ranks of a plan with one stage on each, ready to be run one at a time."""
    stages = subject.stages(plan)
    messages = record(subject, stages)
    inputs, targets = subject.inputs(), subject.targets()
    first, last = (subject.target.call.args, subject.target.call.kwargs), subject.target.targets
    ranks = []
    for rank, row in enumerate(plan.schedule.rows):
        index = plan.schedule.placement.index(rank)
        is_last = index == plan.k - 1
        ranks.append(
            SingleRank(
                index=index,
                stage=stages[index],
                row=row,
                unread=unread_gradients(plan.schedule),
                inputs=messages.inputs[index] if index else inputs,
                gradients=messages.gradients[index],
                targets=targets if is_last else [None] * plan.microbatches,
                minibatch=[first if index == 0 else None, last if is_last else None],
                device=subject.target.device,
            )
        )
    return ranks
