"""The messages of one rank: tensors that are sent to stages of other ranks, and received from them.

rank_step.py calls this for each SEND and RECV of a schedule. A receive is posted when its action
comes, and waited for by the action that needs it:

    action      1RECV_F0       1F0
    here        post           wait, the stage gets the buffer

Its buffers are made when it is posted, and nothing here holds them once they were waited for: they
live as long as the stage needs them, and the memory model counts them so (memory_model/rank.py).
So their number depends on the order of actions, not on the number of microbatches. What is sent is
kept until the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.ir.schedule import Action, Kind
from pipecompile.runtime.agreement import Agreement
from pipecompile.runtime.missing_gradients import MissingGradients
from pipecompile.runtime.watch import Deadline

__all__ = ["Boundaries", "BoundaryShape", "Messages"]

Values = tuple[Tensor | None, ...]
"""The tensors of one message; None for a gradient that nobody sends."""


class BoundaryShape(tuple[tuple[int, ...], torch.dtype, bool]):
    """Shape and type of one tensor that crosses a boundary, and whether it has a gradient."""

    __slots__ = ()

    def zeros(self, device: torch.device) -> Tensor:
        """Return zeros of this shape."""
        return torch.zeros(self[0], dtype=self[1], device=device)

    def buffer(self, device: torch.device) -> Tensor:
        """Return memory of this shape, not initialised."""
        return torch.empty(self[0], dtype=self[1], device=device)

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient is sent back for it."""
        return self[2]


Boundaries = Sequence[Sequence[BoundaryShape]]
"""The tensors that enter each stage."""


class Messages:
    """The messages of one rank.

    `boundaries[s]` are the tensors that enter stage s, and `peers[s]` is the global rank that runs
    it. `group` is the process group of the pipeline, None for all ranks.
    """

    def __init__(
        self,
        boundaries: Boundaries,
        peers: Sequence[int],
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._boundaries = boundaries
        self._peers = peers
        self._device = device
        self._group = group
        self._remainder: tuple[int, Boundaries] | None = None
        self._buffers: dict[Action, Values] = {}
        self._flags: dict[Action, Tensor] = {}
        self._missing = MissingGradients()
        self._receiving: dict[Action, list[dist.Work]] = {}
        self._sending: list[dist.Work] = []
        self._deadline = Deadline()
        self._agreement: Agreement | None = None

    def receive(self, action: Action) -> None:
        """Post the receive of `action`, a RECV of either direction."""
        is_forward = action.kind is Kind.RECEIVE_FORWARD
        # Values come through the boundary before a stage, gradients through that behind it.
        boundary = self._boundaries_of(action)[action.stage + (not is_forward)]
        # The table holds the buffers while something may be written to them.
        expected = [is_forward or shape.has_gradient for shape in boundary]
        if not is_forward:
            expected = self._expected_gradients(action.stage + 1, expected)
        self._buffers[action] = tuple(
            shape.buffer(self._device) if is_expected else None
            for shape, is_expected in zip(boundary, expected, strict=True)
        )
        received = [*self._buffers[action]]
        if not is_forward and self._tells(action.stage + 1, expected):
            flags = torch.empty(len(boundary), dtype=torch.bool, device=self._device)
            self._flags[action] = flags
            received.append(flags)
        peer = self._peers[action.stage - 1 if is_forward else action.stage + 1]
        # The whole message is one batch, so that its tensors cannot overtake each other.
        self._receiving[action] = self._start(dist.irecv, received, peer)

    def wait(self, action: Action) -> Values:
        """Return what the receive of `action` has brought, once it is there."""
        for work in self._receiving.pop(action):
            self._deadline.wait(work)
        values = self._buffers.pop(action)
        if action not in self._flags:
            return values
        flags = tuple(self._flags.pop(action).tolist())
        self._missing.note(action.stage + 1, flags)
        return tuple(None if is_missing else v for v, is_missing in zip(values, flags, strict=True))

    def send(self, action: Action, values: Sequence[Tensor | None]) -> None:
        """Begin to send `values`."""
        if action.kind is Kind.SEND_FORWARD:
            peer, sent = self._peers[action.stage + 1], [*values]
        else:
            peer, sent = self._peers[action.stage - 1], self._gradients_to_send(action, values)
        # What is sent are bytes, without the bits that say "conjugate" and "negative".
        plain = [None if each is None else each.resolve_conj().resolve_neg() for each in sent]
        self._sending += self._start(dist.isend, plain, peer)

    def _gradients_to_send(
        self, action: Action, values: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return a message of gradients; while it tells what is missing, that is sent as zeros."""
        shapes = self._boundaries_of(action)[action.stage]
        expected = [shape.has_gradient for shape in shapes]
        flags = tuple(value is None for value in values)
        if not self._tells(action.stage, expected):
            if any(expected):
                self._missing.check(action.stage, flags)
            return [*values]
        self._missing.note(action.stage, flags)
        sent: list[Tensor | None] = [
            shape.zeros(self._device) if value is None and shape.has_gradient else value
            for value, shape in zip(values, shapes, strict=True)
        ]
        return [*sent, torch.tensor(flags, device=self._device)]

    def _expected_gradients(self, stage: int, expected: list[bool]) -> list[bool]:
        missing = self._missing.of(stage)
        if missing is None:
            return expected
        return [each and not left_out for each, left_out in zip(expected, missing, strict=True)]

    def _tells(self, stage: int, expected: Sequence[bool]) -> bool:
        """Whether a message of gradients from `stage` tells which are missing."""
        return self._missing.of(stage) is None and any(expected)

    def begin(
        self,
        deadline: Deadline,
        agreement: Agreement,
        remainder: tuple[int, Boundaries] | None = None,
    ) -> None:
        """Begin a step that ends by `deadline`; forget what one that failed has left.

        No message is exchanged before the ranks' `agreement`. `remainder` is the microbatch that is
        smaller than the others, and its boundaries.
        """
        self._deadline = deadline
        self._agreement = agreement
        self._remainder = remainder
        # Operations go before the memory that they write to.
        self._receiving.clear()
        self._buffers.clear()
        self._flags.clear()
        self._missing.begin_step()
        self._sending.clear()

    def finish(self) -> None:
        """Wait until everything is sent."""
        self._agree()
        while self._sending:
            self._deadline.wait(self._sending.pop())
        self._missing.end_step()

    def _agree(self) -> None:
        if self._agreement is not None:
            self._agreement.settle()
            self._agreement = None

    def _boundaries_of(self, action: Action) -> Boundaries:
        if self._remainder is not None and action.microbatch == self._remainder[0]:
            return self._remainder[1]
        return self._boundaries

    def _start(
        self, operation: object, tensors: Sequence[Tensor | None], peer: int
    ) -> list[dist.Work]:
        """Begin one operation for each tensor; as one batch, because NCCL needs that."""
        self._agree()
        operations = [
            dist.P2POp(operation, tensor, peer, self._group)  # type: ignore[arg-type]
            for tensor in tensors
            if tensor is not None
        ]
        return dist.batch_isend_irecv(operations) if operations else []
