"""The messages of one rank: tensors that are sent to stages of other ranks, and received from them.

rank_step.py calls this for each SEND and RECV of a schedule. A receive is posted when its action
comes, and waited for by the action that needs it:

    action      1RECV_F0       1F0
    here        post           wait, the stage gets the buffer

Its buffers are made when it is posted, and nothing here holds them once they were waited for: they
live as long as the stage needs them, and the memory model counts them so (memory_model/rank.py).
What is sent is kept until the order of actions says that it was received: what went forward until
the backward of the same microbatch is done, and of gradients as many as may be unread. So how
much there is depends on the order of actions, not on the number of microbatches.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pipecompile.errors import InputError
from pipecompile.graph.layout import rounds_by_layout
from pipecompile.ir.schedule import Action, Kind
from pipecompile.runtime.agreement import Agreement
from pipecompile.runtime.deadline import Deadline
from pipecompile.runtime.gradient_states import (
    MISSING,
    GradientStates,
    in_order,
    seen_in_order,
    state_of,
)
from pipecompile.runtime.peers import Peers, peer_of

__all__ = ["Boundaries", "BoundaryShape", "CountUnread", "Messages"]

Values = Sequence[Tensor | None]
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


_Place = tuple[int, int | None]
"""A stage and a microbatch."""

_Key = tuple[int, int, tuple[BoundaryShape, ...]]
"""What names a boundary: the stage behind it, whose turn it is, and what crosses there."""


class _Buffers(NamedTuple):
    """What a receive writes to: `values`, and `told` if a message of gradients says which are
    missing and how the others lie; else that is `known`.
    """

    values: Values
    told: Tensor | None = None
    known: Sequence[int] | None = None

    @property
    def written(self) -> Iterator[Tensor | None]:
        """The tensors of the message, in the order in which they are sent."""
        return chain(self.values, (self.told,))


CountUnread = Callable[[Action], int]
"""Returns how many gradients of its stage may be unread as a SEND begins, its own included."""


class Messages:
    """The messages of one rank.

    `boundaries[s]` are the tensors that enter stage s, and `peers[s]` the ranks in `group` that run
    it, in turns. `group` is the process group of the pipeline.
    """

    def __init__(
        self,
        boundaries: Boundaries,
        peers: Peers,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> None:
        self._boundaries = boundaries
        self._peers = peers
        self._device = device
        self._group = group
        self._remainder: tuple[int, Boundaries] | None = None
        # The life of what stage 0 sends to stage 1 on another rank, of microbatch 0, and the
        # tables that hold it:
        #
        #     sender      0F0   0SEND_F0: isend, _values_sent  …      0B0, then free_values
        #     receiver    1RECV_F0: irecv, _receiving, _buffers  …    1F0: wait pops both
        #
        # Minibatches in flight number their microbatches alike: what was posted first comes first.
        self._buffers: dict[Action, deque[_Buffers]] = defaultdict(deque)
        self._trains = True
        self._states = GradientStates()
        self._receiving: dict[Action, deque[list[dist.Work]]] = defaultdict(deque)
        self._values_sent: dict[_Place, deque[list[dist.Work]]] = defaultdict(deque)
        self._gradients_sent: dict[int, deque[list[dist.Work]]] = defaultdict(deque)
        self._unread: CountUnread | None = None
        self._deadline = Deadline()
        self._agreement: Agreement | None = None

    def receive(self, action: Action) -> None:
        """Post the receive of `action`, a RECV of either direction."""
        self.settle()
        boundaries = self._boundaries_of(action)
        # Values come through the boundary before a stage, gradients through that behind it.
        if action.kind is Kind.RECEIVE_FORWARD:
            source, shapes = action.stage - 1, boundaries[action.stage]
            buffers = _Buffers([shape.buffer(self._device) for shape in shapes])
        else:
            source = action.stage + 1
            # A gradient has the shape of its value, so the boundary is the one that the value
            # went through: that before the stage which sends it.
            buffers = self._gradient_buffers(self._key(action, source), boundaries[source])
        # The table holds the buffers while something may be written to them.
        self._buffers[action].append(buffers)
        peer = peer_of(self._peers, source, action.microbatch)
        self._receiving[action].append(self._start(dist.irecv, buffers.written, peer))

    def wait(self, action: Action) -> Values:
        """Return what the receive of `action` has brought, once it is there."""
        for work in self._receiving[action].popleft():
            self._deadline.wait(work)
        values, told, states = self._buffers[action].popleft()
        if told is not None:
            states = tuple(told.tolist())
            self._states.note(self._key(action, action.stage + 1), states)
        if states is None:
            return values
        # If the receive was posted before anybody knew what is missing, the sender filled in
        # zeros. They become None again here: a parameter that only they would reach keeps no
        # gradient, as in the unsplit model, and an optimizer leaves it alone.
        return [
            None if value is None or state == MISSING else seen_in_order(value, state)
            for value, state in zip(values, states, strict=True)
        ]

    def send(self, action: Action, values: Values) -> None:
        """Begin to send `values`."""
        self.settle()
        target = action.stage + 1
        if action.kind is Kind.SEND_BACKWARD:
            target = action.stage - 1
            values = self._gradients_to_send(action, values)
        elif any(each is not None and _lies_otherwise(each) for each in values):
            raise InputError(_other_layout(action.stage))
        plain = [None if each is None else _plain(each) for each in values]
        peer = peer_of(self._peers, target, action.microbatch)
        if action.kind is Kind.SEND_FORWARD:
            sent = self._values_sent[action.stage, action.microbatch]
        else:
            sent = self._gradients_sent[action.stage]
            # With two unread at most, as the gradient of microbatch 2 is sent those of 0 and 1
            # are here: that of 0 was read, so waiting for it takes no time, and its memory is
            # free before more is held.
            while self._unread is not None and len(sent) >= self._unread(action):
                self._wait_for(sent.popleft())
        sent.append(self._start(dist.isend, plain, peer))

    def free_values(self, stage: int, microbatch: int) -> None:
        """Free what a stage has sent forward of a microbatch, now that its backward is done.

        It was received: in every order of actions this backward is behind that of the next stage.
        """
        sent = self._values_sent[stage, microbatch]
        if sent:
            self._wait_for(sent.popleft())

    def _gradients_to_send(self, action: Action, values: Values) -> Values:
        """Return a message of gradients: zeros for those that are missing and not left out."""
        boundary = self._boundaries_of(action)[action.stage]
        if not any(shape.has_gradient for shape in boundary):
            return ()
        key, states = self._key(action, action.stage), tuple(map(state_of, values))
        known = self._states.known(key)
        if states != known:
            self._states.check(key, action.stage, states)
            self._states.note(key, states)
        sent: list[Tensor | None] = []
        for value, shape, state in zip(values, boundary, states, strict=True):
            if value is not None:
                sent.append(in_order(value, state))
            else:
                is_expected = shape.has_gradient and known is None
                sent.append(shape.zeros(self._device) if is_expected else None)
        if known is None:
            sent.append(torch.tensor(states, device=self._device))
        return sent

    def _key(self, action: Action, stage: int) -> _Key:
        """Return what names the boundary before `stage` to the two ranks that have the microbatch
        of `action` beside it: of a smaller microbatch it is another one.
        """
        # Replicas know only of their own messages, so each turn around both stages has its own.
        # With two ranks before the boundary and three behind it, microbatch j goes from rank j %
        # 2 to rank j % 3, and a pair of ranks meets at every sixth one.
        turns = len(self._peers[stage - 1]) * len(self._peers[stage])
        turn = 0 if turns == 1 else (action.microbatch or 0) % turns
        return stage, turn, tuple(self._boundaries_of(action)[stage])

    def _gradient_buffers(self, key: _Key, boundary: Sequence[BoundaryShape]) -> _Buffers:
        """Return the buffers for gradients over a boundary, and for what is told of them."""
        known = self._states.known(key)
        values = [
            shape.buffer(self._device) if shape.has_gradient and state != MISSING else None
            for shape, state in zip(boundary, known or (0,) * len(boundary), strict=True)
        ]
        if known is not None or not any(shape.has_gradient for shape in boundary):
            return _Buffers(values, known=known)
        return _Buffers(values, torch.empty(len(boundary), dtype=torch.int64, device=self._device))

    @property
    def steps(self) -> int:
        """The number of training steps of which it knows what is missing."""
        return self._states.steps

    def begin(
        self,
        deadline: Deadline,
        agreement: Agreement | None,
        remainder: tuple[int, Boundaries] | None = None,
        *,
        trains: bool = True,
        unread: CountUnread | None = None,
    ) -> None:
        """Begin a step that ends by `deadline`; forget what one that failed has left.

        No message is exchanged before the ranks' `agreement`; without it `agree` is called before
        the first message of gradients. `remainder` is the microbatch that is smaller than the
        others, and its boundaries. As many gradients are kept as are `unread`.
        """
        self._deadline = deadline
        self._agreement = agreement
        self._remainder = remainder
        self._trains = trains
        self._unread = unread
        # Operations go before the memory that they write to.
        self._receiving.clear()
        self._buffers.clear()
        self._states.begin_step()
        self._values_sent.clear()
        self._gradients_sent.clear()

    def agree(self, agreement: Agreement) -> None:
        """Wait for the ranks' `agreement` about the step."""
        self._agreement = agreement
        self.settle()

    def go_on(self, deadline: Deadline) -> None:
        """Go on with a run that has no end, whose next minibatch ends by `deadline`."""
        self._deadline = deadline

    def finish(self) -> None:
        """Wait until everything is sent."""
        self.settle()
        for sent in (*self._values_sent.values(), *self._gradients_sent.values()):
            for works in sent:
                self._wait_for(works)
        self._values_sent.clear()
        self._gradients_sent.clear()
        if self._trains:
            self._states.end_step()

    def _wait_for(self, works: list[dist.Work]) -> None:
        while works:
            self._deadline.wait(works.pop())

    def settle(self) -> None:
        """Wait for what the other ranks say of the step, before its first message."""
        if self._agreement is not None:
            self._agreement.settle()
            # A rank that failed in a step which others have ended knows less of what is left out:
            # its next receive would be of one tensor more than is sent to it.
            if not self._agreement.is_history_the_same:
                self._states.forget()
            self._agreement = None

    def _boundaries_of(self, action: Action) -> Boundaries:
        if self._remainder is not None and action.microbatch == self._remainder[0]:
            return self._remainder[1]
        return self._boundaries

    def _start(
        self,
        operation: Callable[..., dist.Work | None],
        tensors: Iterable[Tensor | None],
        peer: int,
    ) -> list[dist.Work]:
        """Begin `operation`, which is `isend` or `irecv`, for each tensor."""
        there = [tensor for tensor in tensors if tensor is not None]
        if self._device.type != "cpu":
            # As one batch, so that the tensors of a message cannot overtake each other: NCCL needs
            # that.
            operations = [
                dist.P2POp(operation, tensor, group=self._group, group_peer=peer)
                for tensor in there
            ]
            return dist.batch_isend_irecv(operations) if operations else []
        # A batch would do the same on a CPU, and check each operation several times.
        # All have the tag 0. Messages between two ranks are told apart by their order only, which
        # every checked schedule has alike at both ends. In another order a gradient would be read
        # as that of another microbatch of the same shape, without an error.
        sends = operation is dist.isend
        begin = self._group.send if sends else self._group.recv
        return [begin([_of_reals(tensor)], peer, 0) for tensor in there]


def _lies_otherwise(value: Tensor) -> bool:
    """Return whether a value would be rounded otherwise where it is received: stages return values
    that are contiguous if they lie in memory as planned.
    """
    return not value.is_contiguous() and rounds_by_layout(value)


def _other_layout(stage: int) -> str:
    """Return the refusal of a value that would not be received as it lies in memory."""
    return (
        f"what stage {stage} sends lies in memory in another way than when the model was compiled, "
        "and would be received as it lay then; give batches that lie in memory like the sample, "
        "and let modules that branch on data return tensors alike, for example by .contiguous()"
    )


def _plain(value: Tensor) -> Tensor:
    """Return `value` as the bytes that are sent: in order, also where data decides how a tensor
    lies in memory, and without the bits that say "conjugate" and "negative".
    """
    return value.resolve_conj().resolve_neg().contiguous()


def _of_reals(tensor: Tensor) -> Tensor:
    """Return the same memory as real numbers."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
