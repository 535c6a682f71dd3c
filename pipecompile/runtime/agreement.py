"""Do all ranks begin the same step? What they say is compared while the step begins.

Ranks that differ would wait for messages that nobody sends, or take one tensor for another. So each
tells the others a digest of what it is about to do, and reads theirs before its first message:

    rank 0    tell ── 0F0 ── read ── 0SEND_F0 …
    rank 1    tell ── read ── 1RECV_F0 …

Only if digests differ, ranks exchange the words and say what it is. A rank that refuses what it was
given tells that instead, so that the others do not wait for it.

All of this goes through the memory of hosts. A digest on a GPU could be read only when all kernels
before it have run, so that the host could never run ahead of its GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b

import torch.distributed as dist

from pipecompile.errors import InputError
from pipecompile.runtime.board import NUMBER_BITS, Reading, board_of
from pipecompile.runtime.watch import StepWatch

__all__ = ["REFUSAL", "Agreement", "AgreementOfReplicas", "Forum", "Statement"]

REFUSAL = "the refusal"
"""Under this name a rank says that it, or another one, does not begin, and why."""
NUMBER = "the number of the step or evaluation"


class Statement:
    """What a rank says about a step or an evaluation: words by name, and a digest of them."""

    def __init__(self, said: Mapping[str, object]) -> None:
        # As text, since a rank must be able to print what another one has.
        self.words = {name: str(value) for name, value in said.items()}
        text = "\n".join(f"{name}: {value}" for name, value in self.words.items())
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
        self.digest = digest >> (64 - NUMBER_BITS)


class Forum:
    """The `ranks` of a `group` that exchanges tensors on the host, and their board; None stands for
    all processes. All of them must make it.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.ranks = (
            range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        )
        self.board = board_of(group)


class Agreement:
    """What this rank says of its step, told to the ranks of a `forum`, and what they say.

    `said` has the same names on all of them, but only `REFUSAL` on one that refuses. `number` is
    that of the step or evaluation. `history` is how many steps of this kind the rank has ended:
    ranks differ in that if one failed in a step that others have ended, and `histories` are those
    of all once it is settled. If it `is_refused`, all ranks know that they do not begin.
    """

    def __init__(
        self,
        said: Statement,
        forum: Forum,
        watch: StepWatch,
        number: int = 0,
        history: int = 0,
    ) -> None:
        self._said = said
        self._number = number
        self._forum = forum
        self._watch = watch
        self.is_history_the_same = True
        self.is_refused = False
        self.histories: Sequence[int] = ()
        numbers = said.digest, number, history
        self._read: Reading | None = forum.board.tell(numbers, watch.deadline)

    def settle(self, moment: str = "beginning") -> None:
        """Wait for what the others say at this moment; InputError, on every rank, if one says
        something else.
        """
        if self._read is None:
            return
        with self._watch.waiting_for_all(moment):
            told = self._read()
            self._read = None
            self.histories = [each[2] for each in told]
            if any(each[:2] != told[0][:2] for each in told):
                self._raise()
            self.is_history_the_same = told.count(told[0]) == len(told)

    def _raise(self) -> None:
        """Raise InputError for what differs. All ranks have read the same digests, so all come here
        and exchange the words.
        """
        self.is_refused = True
        ranks, group = self._forum.ranks, self._forum.group
        by_rank: list[dict[str, str]] = [{} for _ in ranks]
        self._watch.deadline.wait_for(group)
        own = {**self._said.words, NUMBER: str(self._number)}
        dist.all_gather_object(by_rank, own, group=group)
        for other in by_rank:
            if REFUSAL in other:
                raise InputError(other[REFUSAL])
        for name in own:
            values = [other.get(name) for other in by_rank]
            different = next((each for each in enumerate(values) if each[1] != values[0]), None)
            if different is not None:
                index, value = different
                raise InputError(
                    f"ranks must step alike, but {name} is {values[0]} on rank {ranks[0]} and "
                    f"{value} on rank {ranks[index]}; give all ranks the same plan, mode, "
                    "step and options, all ranks of a pipeline the same batch, and each replica "
                    "equally many samples"
                )


class AgreementOfReplicas(Agreement):
    """An agreement of the ranks of one pipeline, and then, if they have `said_to_all` anything, of
    the ranks of all replicas.

    Replicas may evaluate different numbers of batches, so that not all ranks come to everyone's
    board. Two ranks of a pipeline, of which only one would go there, would miss each other:

        rank                       0                1              2, 3 (another replica)
        the pipeline's board       step, to all     evaluation
                                   they differ, and 0 goes on to all
        everyone's board           step             refusal        step      all raise InputError

    So each goes to its pipeline's board first, and says there whether it goes on. `tell_all` tells
    all ranks something; with `at_once` that is done before the pipeline has agreed.
    """

    def __init__(
        self,
        said: Statement,
        pipeline: Forum,
        watch: StepWatch,
        number: int,
        said_to_all: Statement | None,
        tell_all: Callable[[Statement], Agreement],
        *,
        at_once: bool = False,
    ) -> None:
        super().__init__(said, pipeline, watch, number, int(said_to_all is not None))
        self._said_to_all = said_to_all
        self._tell_all = tell_all
        self._with_all: Agreement | None = None
        if at_once and said_to_all is not None:
            self._with_all = tell_all(said_to_all)

    def settle(self, moment: str = "beginning") -> None:
        """Settle within the pipeline and with all; what one pipeline refuses all ranks hear of, if
        any rank of it would have gone to them.
        """
        if self._read is None:
            return
        try:
            super().settle(moment)
        except InputError as error:
            if any(self.histories):
                with_all = self._with_all or self._tell_all(Statement({REFUSAL: str(error)}))
                with suppress(InputError):  # the own one says more
                    with_all.settle(moment)
            raise
        if self._said_to_all is not None:
            with_all = self._with_all or self._tell_all(self._said_to_all)
            self.is_refused = True  # unless all agree
            with_all.settle(moment)
            self.is_refused = False
            self.is_history_the_same = with_all.is_history_the_same
