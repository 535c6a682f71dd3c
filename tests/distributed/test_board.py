"""Boards, on which ranks tell each other what they begin."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.runtime.board import NUMBER_BITS, WIDTH, HostBoard
from pipecompile.runtime.deadline import Deadline
from tests.distributed import board_jobs as jobs
from tests.distributed.workers import Workers


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (jobs.rounds, "HostBoard"),
        (jobs.rounds_without_shared_memory, "GroupBoard"),
        (jobs.rounds_on_two_hosts, "GroupBoard"),
        (jobs.rounds_without_room, "GroupBoard"),
    ],
)
def test_each_rank_reads_what_all_told_in_that_round(
    workers: Workers, tmp_path: Path, job: Callable[..., object], kind: str
) -> None:
    wanted = [[jobs.told(rank, number) for rank in range(3)] for number in range(60)]
    assert workers.run(3, job, 60, folder=str(tmp_path)) == [(kind, wanted, 0)] * 3


@contextmanager
def boards(ranks: int) -> Iterator[list[HostBoard]]:
    """The boards of as many ranks, all in this process."""
    with tempfile.NamedTemporaryFile(buffering=0) as file:
        file.truncate(HostBoard.size(ranks))
        yield [HostBoard(Path(file.name), rank, ranks) for rank in range(ranks)]


@given(st.lists(st.tuples(st.integers(), st.integers()), min_size=1, max_size=WIDTH))
def test_numbers_are_told_apart_by_their_low_bits(pairs: list[tuple[int, int]]) -> None:
    with boards(2) as (one, other):
        readings = [
            board.tell([int(pair[rank]) % 2**63 for pair in pairs], Deadline())
            for rank, board in enumerate((one, other))
        ]
        wanted = [[pair[rank] % 2**63 % 2**NUMBER_BITS for pair in pairs] for rank in range(2)]
        assert [reading() for reading in readings] == [wanted, wanted]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200))
def test_in_any_order_of_ranks_each_reads_its_own_round(turns: list[int]) -> None:
    with boards(3) as every:
        rounds, pending = [0, 0, 0], [deque[Callable[[], list[list[int]]]]() for _ in every]
        for rank in turns:
            if pending[rank] and rounds[rank] <= min(rounds):
                number = rounds[rank]
                assert pending[rank].popleft()() == [[number, other] for other in range(3)]
            elif not pending[rank]:
                rounds[rank] += 1
                pending[rank].append(every[rank].tell([rounds[rank], rank], Deadline()))
