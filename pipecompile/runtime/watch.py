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

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist

from pipecompile.errors import InputError, PipecompileError, RankFaultError
from pipecompile.ir.schedule import BACKWARDS, TRANSFERS, Action, Kind
from pipecompile.runtime.board import Board
from pipecompile.runtime.deadline import Deadline, OverdueError
from pipecompile.runtime.faults import Phase, RankState, action_text
from pipecompile.runtime.heartbeat import Heartbeat, own_store
from pipecompile.runtime.peers import Peers, peer_of

__all__ = ["StepWatch"]

KINDS = tuple(Kind)
MICROBATCHES = 2**24
"""More than a run has."""


class _Doing(NamedTuple):
    """What a rank does: an action, or something else in words; `peer` is whom it waits for."""

    phase: Phase
    what: Action | str
    peer: int | None = None


class StepWatch:
    """An observer of the actions of this rank.

    `ranks` are the global ranks of all replicas, and `peers[s]` are those that run stage s of this
    replica, in turns. `seconds` is how long a step may take; without it nothing is published, and
    an error names only what this rank did. On the `board` each rank notes its actions.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        peers: Peers,
        seconds: float | None,
        board: Board | None = None,
    ) -> None:
        self._ranks = ranks
        self._peers = peers
        self._seconds = seconds
        self._store = None if seconds is None else own_store()
        self._board = None if seconds is None else board
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
        if self._board is not None:
            self._board.note(_number_of(action))

    def ready(self, action: Action) -> None:
        """`action` has what it needs."""
        self._now = _Doing("computing", action)

    def end(self, action: Action) -> None:
        """`action` is done."""
        if self.deadline.is_over():
            raise OverdueError

    def waits_in(self, exchange: str) -> None:
        """The rank takes part in an exchange with others."""
        self._now = _Doing("waiting", exchange)
        self._note_no_action()

    @contextmanager
    def waiting_for_all(self, moment: str = "beginning") -> Iterator[None]:
        """The rank waits in the block until all have begun, or come to another moment."""
        before, self._now = self._now, _Doing("waiting", f"the {moment} of {self._name}")
        yield
        # Not after an error, which came while it waited.
        self._now = before

    def actions_are_done(self) -> None:
        """Note that the rank only waits for sends and for sums of gradients from now on."""
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
        self._note_no_action()
        beating = None
        if self._store is not None:
            beating = Heartbeat(self.state, self.deadline, self._store, self._last_action)
        try:
            yield
        except PipecompileError as error:
            # Bad input: its message says what to do, and needs no note of the action.
            self._fail(str(error))
            raise
        except OverdueError:
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
        except BaseException:
            # An interrupt may come amid any exchange, whose other end waits or goes on.
            self.lose_messages()
            raise
        else:
            self._now = _Doing("done", "")
            self._note_no_action()
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

    def _note_no_action(self) -> None:
        if self._board is not None:
            self._board.note(0)

    def _last_action(self, rank: int) -> str:
        """Return the action that a rank has begun last, "" if it is in none or on another host."""
        number = 0 if self._board is None else self._board.noted(rank)
        return action_text(_action_of(number)) if number else ""

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

    def _fault(self, beating: Heartbeat | None) -> RankFaultError:
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


def _number_of(action: Action) -> int:
    """Return an action as a number that is not 0, without its weight version."""
    microbatch = 0 if action.microbatch is None else action.microbatch + 1
    return 1 + KINDS.index(action.kind) + len(KINDS) * (microbatch + MICROBATCHES * action.stage)


def _action_of(number: int) -> Action:
    rest, kind = divmod(number - 1, len(KINDS))
    stage, microbatch = divmod(rest, MICROBATCHES)
    return Action(stage, KINDS[kind], microbatch - 1 if microbatch else None)


def _text(what: Action | str) -> str:
    return what if isinstance(what, str) else action_text(what)
