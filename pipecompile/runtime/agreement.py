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

from collections.abc import Mapping
from hashlib import blake2b

import torch
import torch.distributed as dist

from pipecompile.errors import InputError
from pipecompile.runtime.watch import StepWatch

__all__ = ["REFUSAL", "Agreement", "Statement"]

REFUSAL = "the refusal"
"""Under this name a rank says why it does not begin."""
NUMBER = "the number of the step or evaluation"


class Statement:
    """What a rank says about a step or an evaluation: words by name, and a digest of them."""

    def __init__(self, said: Mapping[str, object]) -> None:
        # As text, since a rank must be able to print what another one has.
        self.words = {name: str(value) for name, value in said.items()}
        text = "\n".join(f"{name}: {value}" for name, value in self.words.items())
        # 62 bits, so that it is a whole number of torch.
        self.digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class Agreement:
    """What this rank says of its step, told to the ranks of `group`, and what they say.

    `said` has the same names on all of them, but only `REFUSAL` on one that refuses. `number` is
    that of the step or evaluation. `group` exchanges tensors on the host; None stands for all
    processes. `history` is how many steps of this kind the rank has ended: ranks differ in that if
    one failed in a step that others have ended. If it `is_refused`, all ranks know that they do not
    begin.
    """

    def __init__(
        self,
        said: Statement,
        group: dist.ProcessGroup | None,
        watch: StepWatch,
        number: int = 0,
        history: int = 0,
    ) -> None:
        self._said = said
        self._number = number
        self._group = group
        self._watch = watch
        self.is_history_the_same = True
        self.is_refused = False
        # A default device that the user has set is not for what goes through the host.
        own = torch.tensor([said.digest, number, history], device="cpu")
        self._all = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        self._work: dist.Work | None = watch.deadline.start_all_gather(self._all, own, group)

    def settle(self, moment: str = "beginning") -> None:
        """Wait for what the others say at this moment; InputError, on every rank, if one says
        something else.
        """
        if self._work is None:
            return
        with self._watch.waiting_for_all(moment):
            self._watch.deadline.wait(self._work)
            self._work = None
            told = [each.tolist() for each in self._all]
            if any(each[:2] != told[0][:2] for each in told):
                self._raise()
            self.is_history_the_same = told.count(told[0]) == len(told)

    def _raise(self) -> None:
        """Raise InputError for what differs. All ranks have read the same digests, so all come here
        and exchange the words.
        """
        self.is_refused = True
        by_rank: list[dict[str, str]] = [{} for _ in self._all]
        self._watch.deadline.wait_for(self._group)
        own = {**self._said.words, NUMBER: str(self._number)}
        dist.all_gather_object(by_rank, own, group=self._group)
        for rank, other in enumerate(by_rank):
            if REFUSAL in other:
                raise InputError(f"rank {rank} refuses what it was given: {other[REFUSAL]}")
        for name in own:
            values = [other.get(name) for other in by_rank]
            different = next(
                (rank for rank, value in enumerate(values) if value != values[0]), None
            )
            if different is not None:
                raise InputError(
                    f"ranks must step alike, but {name} is {values[0]} on rank 0 and "
                    f"{values[different]} on rank {different}; give all ranks the same plan, mode, "
                    "step and options, all ranks of a pipeline the same batch, and each replica "
                    "equally many samples"
                )
