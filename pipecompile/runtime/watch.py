"""Watches the steps of this rank, and says on every rank which one is at fault when a step fails.

While a step or an evaluation runs, a thread publishes what the rank does in the store of the
process group. The step's own waits end with the time that it may take (`Deadline`). So every rank
comes to the point where it reads what the others have published:

    step      begin ──── 0F0 ──── wait 0B0 ····· time is over ──▶ read states ──▶ RankFaultError
    thread    ─ beat ─ beat ─ beat ─ beat ─ beat ─ beat ─ beat ─ beat ─────────────┘

A rank that hangs in a computation never comes there. Its thread then logs the same, and under
torchrun ends the process, since nothing else can.

One process hosts the store: rank 0, or the agent of torchrun. If it is gone, nobody can be asked,
and each rank ends with an error that says so.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from pipecompile.errors import InputError, PipecompileError, RankFaultError
from pipecompile.ir.schedule import BACKWARDS, TRANSFERS, Action, Kind
from pipecompile.runtime.faults import Phase, RankState, action_text, verdict
from pipecompile.runtime.peers import Peers, peer_of

__all__ = ["Deadline", "StepWatch"]

logger = logging.getLogger("pipecompile.runtime")
BEAT_SECONDS = 0.1
SETTLING_SECONDS = 1.0  # enough beats to tell a dead rank from one that lives
ANSWER_SECONDS = 2.0  # many times what a store takes that still answers
EXIT_STATUS = 70

_Options = TypeVar("_Options", AllreduceOptions, AllgatherOptions)


class Deadline:
    """The time that a step may take; without `seconds` it may take for ever.

    Collectives that it starts end soon after it by themselves. Else a thread of gloo would wait in
    them for its own half an hour, and a process cannot end before its threads do.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def is_over(self, by: float = 0.0) -> bool:
        """Return whether the step has taken `by` seconds longer than it may."""
        return self._end is not None and time.monotonic() > self._end + by

    def wait(self, work: dist.Work) -> None:
        """Wait for `work` as long as time is left."""
        if self._end is None:
            # Not as long as a timeout of years: torch then keeps the process group's own.
            work.wait()
        else:
            work.wait(timedelta(seconds=self._seconds_left()))

    def all_reduce(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> None:
        """Reduce `tensor` over `group` in place, as long as time is left."""
        self.wait(self.start_all_reduce(tensor, group, operation))

    def start_all_reduce(
        self,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
    ) -> dist.Work:
        """Begin to reduce `tensor` over `group` in place."""
        options = AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return _processes(group).allreduce([tensor], self._limit(options))

    def start_all_gather(
        self, parts: list[Tensor], own: Tensor, group: dist.ProcessGroup | None
    ) -> dist.Work:
        """Begin to fill `parts` with what each rank of `group` has as `own`."""
        return _processes(group).allgather([parts], [own], self._limit(AllgatherOptions()))

    def wait_for(self, group: dist.ProcessGroup | None) -> None:
        """Wait as long as time is left until all ranks of `group` are here.

        For exchanges of objects, which end only with the timeout of the process group.
        """
        if self._end is not None:
            device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
            self.all_reduce(torch.zeros(1, device=device), group)
            # A rank that comes late finds that the others were here, but they may have left since.
            if self.is_over():
                raise _OverdueError

    def _seconds_left(self) -> float:
        assert self._end is not None
        return max(0.01, self._end - time.monotonic())

    def _limit(self, options: _Options) -> _Options:
        """Return `options` of a collective that ends soon after the deadline."""
        if self._end is not None:
            # Later than the verdict: NCCL's own watchdog would end the process before it.
            options.timeout = timedelta(seconds=self._seconds_left() + 3 * SETTLING_SECONDS)
        return options


def _processes(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if group is not None:
        return group
    assert dist.group.WORLD is not None
    return dist.group.WORLD


class _Doing(NamedTuple):
    """What a rank does: an action, or something else in words; `peer` is whom it waits for."""

    phase: Phase
    what: Action | str
    peer: int | None = None


class StepWatch:
    """An observer of the actions of this rank.

    `ranks` are the global ranks of all replicas, and `peers[s]` are those that run stage s of this
    replica, in turns. `seconds` is how long a step may take; without it nothing is published, and
    an error names only what this rank did.
    """

    def __init__(self, ranks: Sequence[int], peers: Peers, seconds: float | None) -> None:
        self._ranks = ranks
        self._peers = peers
        self._seconds = seconds
        self._store = None if seconds is None else _own_store()
        self._own = dist.get_rank()
        self._begun = 0
        self._name = ""
        self._error = ""
        self._lost_in = ""  # the step whose messages are lost
        # One assignment changes it: the thread reads either the old or the new value.
        self._now = _Doing("done", "")
        self.deadline = Deadline()

    # -- what rank_step.py tells

    def begin(self, action: Action) -> None:
        """`action` is next; it may wait for a message."""
        peer = self._source(action)
        self._now = _Doing("computing" if peer is None else "waiting", action, peer)

    def ready(self, action: Action) -> None:
        """`action` has what it needs."""
        self._now = _Doing("computing", action)

    def end(self, action: Action) -> None:
        """`action` is done."""
        if self.deadline.is_over():
            raise _OverdueError

    def waits_in(self, exchange: str) -> None:
        """The rank takes part in an exchange with others."""
        self._now = _Doing("waiting", exchange)

    @contextmanager
    def waiting_for_all(self, moment: str = "beginning") -> Iterator[None]:
        """The rank waits in the block until all have begun, or come to another moment."""
        before, self._now = self._now, _Doing("waiting", f"the {moment} of {self._name}")
        yield
        # Not after an error, which came while it waited.
        self._now = before

    def actions_are_done(self) -> None:
        """What remains is to wait for sends and for sums of gradients."""
        self.waits_in(f"the exchanges at the end of {self._name}")

    def lose_messages(self) -> None:
        """The step fails with messages on their way, or still to come, that nobody receives: the
        next step would take them for its own.
        """
        self._lost_in = self._name

    @property
    def has_lost_messages(self) -> bool:
        """Whether messages of this step, or of an earlier one, were lost."""
        return bool(self._lost_in)

    def refuse_after_loss(self) -> None:
        """Raise InputError if messages of an earlier step were lost."""
        if self._lost_in:
            raise InputError(
                f"{self._lost_in} failed midway and its messages are lost, so that ranks cannot go "
                "on together; end the processes, and begin again from the last checkpoint"
            )

    # -- the step

    @contextmanager
    def watched(self, name: str, steps: int = 1) -> Iterator[None]:
        """Watch the step in the block, or something else that takes as long as `steps` steps.

        If it fails for another rank or takes too long, RankFaultError says which rank is at fault.
        Other errors get a note of the action. All ranks watch the same blocks, one after the other.
        """
        self.deadline = Deadline(None if self._seconds is None else self._seconds * steps)
        self._begun, self._name, self._error = self._begun + 1, name, ""
        # Until its first action it only waits for other ranks.
        self._now = _Doing("waiting", f"the beginning of {name}")
        beating = None if self._store is None else _Heartbeat(self, self._store)
        try:
            yield
        except PipecompileError as error:
            # Bad input: its message says what to do, and needs no note of the action.
            self._fail(str(error))
            raise
        except _OverdueError:
            raise self._fault(beating) from None
        except Exception as error:
            if self._is_of_another(error):
                # A rank that was late itself has been given up by the others.
                is_late = self._now.phase == "computing" and self.deadline.is_over()
                self._error = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                self._now = self._now._replace(phase="computing" if is_late else "lost")
                raise self._fault(beating) from error
            self._fail(f"{type(error).__name__}: {error}")
            error.add_note(f"rank {self._own} failed in {self._doing}")
            raise
        else:
            self._now = _Doing("done", "")
        finally:
            if beating is not None:
                beating.stop()

    def state(self, beat: int) -> RankState:
        """Return what is published of this rank."""
        now = self._now
        return RankState(
            begun=self._begun,
            name=self._name,
            beat=beat,
            phase=now.phase,
            action=_text(now.what),
            peer=now.peer,
            error=self._error,
        )

    def _is_of_another(self, error: Exception) -> bool:
        """Return whether the error says that another rank cannot be reached: torch raises
        RuntimeError.
        """
        if isinstance(error, torch.OutOfMemoryError):  # which is one as well
            return False
        what = self._now.what
        exchanges = isinstance(what, str) or what.kind in (*TRANSFERS, Kind.REDUCE)
        return isinstance(error, RuntimeError) and (exchanges or self._now.phase == "waiting")

    def _fail(self, error: str) -> None:
        self._error = error
        self._now = self._now._replace(phase="failed")

    @property
    def _doing(self) -> str:
        return _text(self._now.what)

    def _fault(self, beating: _Heartbeat | None) -> RankFaultError:
        # It gives up while an exchange is pending, which the others may still come to.
        self.lose_messages()
        if beating is None:
            peer = "" if self._now.peer is None else f" for rank {self._now.peer}"
            return RankFaultError(
                f"rank {self._own} waited in {self._doing}{peer}, which cannot be reached; "
                "step_timeout=SECONDS tells which rank is at fault"
            )
        found = beating.verdict(self._ranks)
        if found is None:
            how = "hung" if self._now.phase == "computing" else "waited"
            return RankFaultError(
                "the store of the process group no longer answers, so the process that hosts it is "
                f"gone or stopped (rank 0, or the agent of torchrun); rank {self._own} {how} in "
                f"{self._doing}"
            )
        return RankFaultError(found)

    def _source(self, action: Action) -> int | None:
        """Return the rank whose message `action` waits for; None if it needs none."""
        if action.kind is Kind.FORWARD and action.stage > 0:
            source = peer_of(self._peers, action.stage - 1, action.microbatch)
        elif action.kind in BACKWARDS and action.stage + 1 < len(self._peers):
            source = peer_of(self._peers, action.stage + 1, action.microbatch)
        else:
            return None
        return None if source == self._own else source


def _text(what: Action | str) -> str:
    return what if isinstance(what, str) else action_text(what)


class _OverdueError(Exception):
    """The step has taken longer than it may, though no wait of this rank has failed."""


def _own_store() -> Store:
    """Return the store of the process group by a connection of its own: a step may hold that of the
    group for long. Made before the first step, since nobody can connect to a host that is gone.
    """
    store = _get_default_store().clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=ANSWER_SECONDS))
    # What this rank said in the steps of an earlier pipeline is not what it does in this one's.
    number = store.add(f"pipecompile-watches/{dist.get_rank()}", 1)
    return PrefixStore(f"pipecompile-watch-{number}", store)


class _Heartbeat:
    """The thread that publishes the state of a watched step until it is stopped."""

    def __init__(self, watch: StepWatch, store: Store) -> None:
        self._watch = watch
        self._store = store
        self._is_store_lost = False
        self._over = threading.Event()
        self._publish(0)  # a rank that dies at once has begun the step nevertheless
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Publish the last state, and end the thread."""
        self._over.set()
        # A thread that asks a store which does not answer never ends.
        self._thread.join(0 if self._is_store_lost else ANSWER_SECONDS)

    def verdict(self, ranks: Sequence[int]) -> str | None:
        """Return which rank is at fault, once the ranks have had time to publish; None if the store
        does not answer.
        """
        found: list[str] = []
        # In a thread: torch's reads have no end if the machine of the store is gone.
        thread = threading.Thread(target=lambda: found.extend(self._find(ranks)), daemon=True)
        thread.start()
        thread.join(SETTLING_SECONDS + ANSWER_SECONDS)
        self._is_store_lost = not found
        return found[0] if found else None

    def _find(self, ranks: Sequence[int]) -> Iterator[str]:
        """Yield the verdict, or nothing if the store is lost."""
        # Whatever torch's stores raise is a RuntimeError.
        with suppress(RuntimeError):
            before = self._states(ranks)
            time.sleep(SETTLING_SECONDS)
            after = self._states(ranks)
            silent = [
                rank
                for rank, state in after.items()
                if state.phase in ("computing", "waiting") and state.beat == before[rank].beat
            ]
            yield verdict(after, silent)

    def _run(self) -> None:
        beat, has_told = 0, False
        # An event instead of a sleep: the end of the step is published at once.
        while not self._over.wait(BEAT_SECONDS):
            beat += 1
            self._publish(beat)
            if self._watch.deadline.is_over(by=SETTLING_SECONDS) and not has_told:
                has_told = True
                self._tell()
        self._publish(beat + 1)

    def _publish(self, beat: int) -> None:
        """Publish the state, unless the store has been lost: it does not come back."""
        if self._is_store_lost:
            return
        state = self._watch.state(beat)
        try:
            self._store.set(str(dist.get_rank()), msgspec.json.encode(state).decode())
        except RuntimeError:
            self._is_store_lost = True

    def _states(self, ranks: Sequence[int]) -> dict[int, RankState]:
        known = [rank for rank in ranks if self._store.check([str(rank)])]
        read = {rank: self._store.get(str(rank)) for rank in known}
        # A rank that never published is in no step: `get` of its key would block.
        states = {rank: msgspec.json.decode(text, type=RankState) for rank, text in read.items()}
        return {rank: states.get(rank, RankState()) for rank in ranks}

    def _tell(self) -> None:
        """Log what the step cannot raise, since it does not come back; under torchrun end it."""
        state = self._watch.state(0)
        if state.phase != "computing":
            return
        logger.critical("rank %d hangs in %s", dist.get_rank(), state.action)
        if dist.is_torchelastic_launched():
            os._exit(EXIT_STATUS)
