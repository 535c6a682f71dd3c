"""Boards, on which ranks tell each other what they begin."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.runtime import board as board_module
from pipecompile.runtime.board import NUMBER_BITS, ROUNDS, WIDTH, HostBoard
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


def test_ranks_of_a_part_have_a_board_of_their_own(workers: Workers, tmp_path: Path) -> None:
    wanted = [[jobs.told(rank, number) for rank in (1, 2)] for number in range(20)]
    read = workers.run(3, jobs.rounds_of_a_part, 20, folder=str(tmp_path))
    assert read == [[], wanted, wanted]


def test_a_rank_that_fails_leaves_no_file(workers: Workers, tmp_path: Path) -> None:
    seen = workers.run(3, jobs.board_of_a_rank_that_cannot, folder=str(tmp_path))
    assert seen == [("RankFaultError", 0), ("RankFaultError", 0), ("ValueError", 0)]


def test_a_group_has_one_board(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, jobs.board_after_another, 50, folder=str(tmp_path)) == [(True, 0)] * 2


@pytest.mark.parametrize(
    ("what", "differs"),
    [
        (("a", "b"), "the plan is"),
        (("a", "a evaluates"), "what it begins is a step on rank 0 and an evaluation on rank 1"),
        (("b evaluates", "b"), "what it begins is an evaluation on rank 0 and a step on rank 1"),
    ],
)
def test_ranks_that_begin_different_things_meet(
    workers: Workers, tmp_path: Path, what: tuple[str, str], differs: str
) -> None:
    for said in workers.run(2, jobs.begins, what, folder=str(tmp_path)):
        assert differs in said


class HostBoards(list[HostBoard]):
    """The boards of as many ranks, all in this process."""

    def __init__(self, ranks: int) -> None:
        every = range(ranks)
        with tempfile.NamedTemporaryFile(buffering=0) as file:
            file.truncate(HostBoard.size(every))
            for rank in every:
                with patch.object(dist, "get_rank", return_value=rank):
                    self.append(HostBoard(Path(file.name), every, seconds=5))


@given(st.lists(st.tuples(st.integers(), st.integers()), min_size=WIDTH, max_size=WIDTH))
def test_numbers_are_told_apart_by_their_low_bits(pairs: list[tuple[int, int]]) -> None:
    readings = [
        board.tell([pair[rank] for pair in pairs], Deadline())
        for rank, board in enumerate(HostBoards(2))
    ]
    wanted = [[pair[rank] % 2**NUMBER_BITS for pair in pairs] for rank in range(2)]
    assert [reading() for reading in readings] == [wanted, wanted]


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=200),
    st.sampled_from([0, ROUNDS - 3, 5 * ROUNDS - 9]),
)
def test_in_any_order_of_ranks_each_reads_its_own_round(turns: list[int], before: int) -> None:
    every = HostBoards(3)
    for board in every:
        board._round = board._last_read = before
    rounds, pending = [before] * 3, [deque[Callable[[], list[list[int]]]]() for _ in every]
    for rank in turns:
        if pending[rank] and rounds[rank] <= min(rounds):
            number = rounds[rank]
            assert pending[rank].popleft()() == [[number, other, 0] for other in range(3)]
        elif not pending[rank]:
            rounds[rank] += 1
            pending[rank].append(every[rank].tell([rounds[rank], rank, 0], Deadline()))


def test_a_rank_that_does_not_read_is_not_ahead_of_others() -> None:
    one, other = HostBoards(2)
    one.tell([1, 0, 0], Deadline())
    # It would overwrite what the other has not read yet.
    with pytest.raises(dist.DistBackendError, match="rank 1 has told nothing in time"):
        one.tell([2, 0, 0], Deadline(0.01))
    assert other.tell([1, 1, 1], Deadline())() == [[1, 0, 0], [1, 1, 1]]
    assert one.tell([2, 0, 0], Deadline()) is not None


def test_what_a_rank_told_before_it_ended_is_read() -> None:
    # Whoever asks in this process gets the lock of each rank, as after its end.
    one, other = HostBoards(2)
    reading = one.tell([1, 2, 3], Deadline())
    with patch.object(board_module, "SHORT_NAPS", 0):
        with pytest.raises(dist.DistBackendError, match="the process of rank 1 has ended"):
            reading()

        def tells_and_ends(_: HostBoard, index: int) -> bool:
            other.tell([4, 5, 6], Deadline())
            return True

        with patch.object(HostBoard, "_has_ended", tells_and_ends):
            assert reading() == [[1, 2, 3], [4, 5, 6]]
