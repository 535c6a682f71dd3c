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
from pipecompile.runtime.peers import Peers, peer_of
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


_Key = tuple[int, int, tuple[BoundaryShape, ...]]
"""What names a boundary: the stage behind it, whose turn it is, and what crosses there."""


class Messages:
    """The messages of one rank.

    `boundaries[s]` are the tensors that enter stage s, and `peers[s]` the global ranks that run it,
    in turns. `group` is the process group of the pipeline, None for all ranks.
    """

    def __init__(
        self,
        boundaries: Boundaries,
        peers: Peers,
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
        self._trains = True
        self._missing = MissingGradients()
        self._receiving: dict[Action, list[dist.Work]] = {}
        self._sending: list[dist.Work] = []
        self._sent_before: list[dist.Work] = []
        self._deadline = Deadline()
        self._agreement: Agreement | None = None

    def receive(self, action: Action) -> None:
        """Post the receive of `action`, a RECV of either direction."""
        self.settle()
        is_forward = action.kind is Kind.RECEIVE_FORWARD
        # Values come through the boundary before a stage, gradients through that behind it.
        boundary = self._boundaries_of(action)[action.stage + (not is_forward)]
        # The tables hold the buffers while something may be written to them.
        if is_forward:
            self._buffers[action] = tuple(shape.buffer(self._device) for shape in boundary)
        else:
            key = self._key(action.stage + 1, action.microbatch, boundary)
            self._buffers[action] = self._gradient_buffers(key)
        received = [*self._buffers[action]]
        if not is_forward and self._tells(key):
            flags = torch.empty(len(boundary), dtype=torch.bool, device=self._device)
            self._flags[action] = flags
            received.append(flags)
        sender = action.stage - 1 if is_forward else action.stage + 1
        peer = peer_of(self._peers, sender, action.microbatch)
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
        boundary = self._boundaries_of(action)[action.stage + 1]
        self._missing.note(self._key(action.stage + 1, action.microbatch, boundary), flags)
        return tuple(None if is_missing else v for v, is_missing in zip(values, flags, strict=True))

    def send(self, action: Action, values: Sequence[Tensor | None]) -> None:
        """Begin to send `values`."""
        self.settle()
        if action.kind is Kind.SEND_FORWARD:
            receiver, sent = action.stage + 1, [*values]
        else:
            receiver, sent = action.stage - 1, self._gradients_to_send(action, values)
        # What is sent are bytes, without the bits that say "conjugate" and "negative".
        plain = [None if each is None else each.resolve_conj().resolve_neg() for each in sent]
        peer = peer_of(self._peers, receiver, action.microbatch)
        self._sending += self._start(dist.isend, plain, peer)

    def _gradients_to_send(
        self, action: Action, values: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return a message of gradients: zeros for those that are missing and not left out."""
        boundary = self._boundaries_of(action)[action.stage]
        if not any(shape.has_gradient for shape in boundary):
            return []
        key = self._key(action.stage, action.microbatch, boundary)
        flags = tuple(value is None for value in values)
        self._missing.check(key, action.stage, flags)
        self._missing.note(key, flags)
        left_out = self._missing.left_out(key, len(boundary))
        sent: list[Tensor | None] = [
            shape.zeros(self._device) if value is None and shape.has_gradient and not out else value
            for value, shape, out in zip(values, boundary, left_out, strict=True)
        ]
        if self._missing.tells(key):
            sent.append(torch.tensor(flags, device=self._device))
        return sent

    def _key(self, stage: int, microbatch: int | None, boundary: Sequence[BoundaryShape]) -> _Key:
        """Return what names the boundary before a stage to the two ranks that have a microbatch
        beside it: of a smaller microbatch it is another one.
        """
        # Replicas know only of their own messages, so each turn around both stages has its own.
        turns = len(self._peers[stage - 1]) * len(self._peers[stage])
        return stage, (microbatch or 0) % turns, tuple(boundary)

    def _gradient_buffers(self, key: _Key) -> Values:
        boundary = key[-1]
        left_out = self._missing.left_out(key, len(boundary))
        return tuple(
            shape.buffer(self._device) if shape.has_gradient and not out else None
            for shape, out in zip(boundary, left_out, strict=True)
        )

    def _tells(self, key: _Key) -> bool:
        """Return whether a message of gradients over a boundary tells which are missing."""
        return any(shape.has_gradient for shape in key[-1]) and self._missing.tells(key)

    @property
    def steps(self) -> int:
        """How many training steps it knows what is missing from."""
        return self._missing.steps

    def begin(
        self,
        deadline: Deadline,
        agreement: Agreement | None,
        remainder: tuple[int, Boundaries] | None = None,
        *,
        trains: bool = True,
    ) -> None:
        """Begin a step that ends by `deadline`; forget what one that failed has left.

        No message is exchanged before the ranks' `agreement`; without it `agree` is called before
        the first message of gradients. `remainder` is the microbatch that is smaller than the
        others, and its boundaries.
        """
        self._deadline = deadline
        self._agreement = agreement
        self._remainder = remainder
        self._trains = trains
        # Operations go before the memory that they write to.
        self._receiving.clear()
        self._buffers.clear()
        self._flags.clear()
        self._missing.begin_step()
        self._sending.clear()
        self._sent_before.clear()

    def agree(self, agreement: Agreement) -> None:
        """Wait for the ranks' `agreement` about the step."""
        self._agreement = agreement
        self.settle()

    def go_on(self, deadline: Deadline) -> None:
        """Go on with a run that has no end, whose next minibatch ends by `deadline`.

        It waits until all is sent that was given here before the last call, so that what is kept of
        it does not grow.
        """
        self._deadline = deadline
        self._wait_for(self._sent_before)
        self._sent_before, self._sending = self._sending, []

    def finish(self) -> None:
        """Wait until everything is sent."""
        self.settle()
        self._wait_for(self._sent_before)
        self._wait_for(self._sending)
        if self._trains:
            self._missing.end_step()

    def _wait_for(self, works: list[dist.Work]) -> None:
        while works:
            self._deadline.wait(works.pop())

    def settle(self) -> None:
        """Wait for what the other ranks say of the step, before its first message."""
        if self._agreement is not None:
            self._agreement.settle()
            if not self._agreement.is_history_the_same:
                self._missing.forget()
            self._agreement = None

    def _boundaries_of(self, action: Action) -> Boundaries:
        if self._remainder is not None and action.microbatch == self._remainder[0]:
            return self._remainder[1]
        return self._boundaries

    def _start(
        self, operation: object, tensors: Sequence[Tensor | None], peer: int
    ) -> list[dist.Work]:
        """Begin one operation for each tensor; as one batch, because NCCL needs that."""
        self.settle()
        operations = [
            dist.P2POp(operation, tensor, peer, self._group)  # type: ignore[arg-type]
            for tensor in tensors
            if tensor is not None
        ]
        return dist.batch_isend_irecv(operations) if operations else []
