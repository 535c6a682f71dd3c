"""A drill: ranks that raise, hang or die in each kind of action, and what the others say."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from pipecompile.errors import InputError
from pipecompile.runtime.faults import RankState, verdict
from tests.distributed import board_jobs
from tests.distributed import fault_jobs as jobs
from tests.distributed.workers import FORKS, Workers
from tests.sweeps import one_in

WITHIN = jobs.TIMEOUT + 2.5  # two seconds to find out, and something for a busy machine

# By schedule and recompute, an action of every kind on every rank that has it. A reduction is not
# among them: nobody waits for a rank that fails there, unless it has replicas.
PLACES = [
    *(("1f1b", "stage", f"{stage}{kind}1") for stage in range(3) for kind in ("F", "B", "R")),
    *(("zb-h1", "none", f"{stage}{kind}1") for stage in range(3) for kind in ("I", "W")),
    *(("1f1b", "none", f"{stage}SEND_F1") for stage in range(2)),
    *(("1f1b", "none", f"{stage}RECV_F1") for stage in (1, 2)),
    *(("1f1b", "none", f"{stage}SEND_B1") for stage in (1, 2)),
    *(("1f1b", "none", f"{stage}RECV_B1") for stage in range(2)),
]
PLACES = [place for place in PLACES if place != ("1f1b", "stage", "2R1")]

IN_FLIGHT = ("pipedream", "pipedream-vertical-sync", "pipedream-2bw")
ACTIONS = (
    *(f"{stage}{kind}1" for stage in range(3) for kind in ("F", "B")),
    *("0SEND_F1", "1RECV_F1", "2SEND_B1", "1RECV_B1", "0RECV_B1"),
    *(f"{stage}STEP" for stage in range(3)),
)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("schedule", "recompute", "action", "fault"),
    [*one_in(12, ((*place, fault) for fault in ("raise", "hang") for place in PLACES))],
)
def test_every_rank_names_the_rank_at_fault(
    workers: Workers, tmp_path: Path, schedule: str, recompute: str, action: str, fault: str
) -> None:
    culprit = int(action[0])
    seen = workers.run(3, jobs.drill, 3, schedule, recompute, action, fault, folder=str(tmp_path))
    _assert_all_name(seen, culprit, fault, f"{action} (")


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("action", "fault"),
    [*one_in(5, product(("1REDUCE_GRAD", "0F1", "1B1", "0REDUCE_GRAD"), ("raise", "hang")))],
)
def test_all_ranks_name_the_rank_at_fault_in_a_replica(
    workers: Workers, tmp_path: Path, action: str, fault: str
) -> None:
    culprit = 2 + int(action[0])  # of the second replica
    seen = workers.run(
        4, jobs.drill, 2, "1f1b", "none", action, fault, culprit, folder=str(tmp_path)
    )
    _assert_all_name(seen, culprit, fault, f"{action} (")


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("schedule", "action", "fault"), [*one_in(6, product(IN_FLIGHT, ACTIONS, ("raise", "hang")))]
)
def test_every_rank_names_the_rank_at_fault_in_flight(
    workers: Workers, tmp_path: Path, schedule: str, action: str, fault: str
) -> None:
    culprit = int(action[0])
    seen = workers.run(3, jobs.drill_in_flight, schedule, action, fault, folder=str(tmp_path))
    _assert_all_name(seen, culprit, fault, action)  # of an update also which one


def _assert_all_name(seen: Sequence[jobs.Seen], culprit: int, fault: str, action: str) -> None:
    """Every rank names the rank at fault and its action, in time; a rank that hangs does so once it
    goes on.
    """
    words = "failed" if fault == "raise" else "hangs"
    for rank, (error, text, seconds) in enumerate(seen):
        own = fault == "raise" and rank == culprit
        assert error == ("ValueError" if own else "RankFaultError")
        assert f"rank {culprit} {words} in {action}" in text
        assert seconds < WITHIN + (2 if fault == "hang" and rank == culprit else 0)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("schedule", "action"), [*one_in(4, product(IN_FLIGHT, ACTIONS))])
def test_a_rank_that_dies_in_flight_is_named(tmp_path: Path, schedule: str, action: str) -> None:
    arguments = schedule, action, "kill"
    started = _start(3, _store_in(tmp_path), jobs.drill_in_flight, *arguments)
    _expect_death(int(action[0]), *started, action=action)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("schedule", "recompute", "action"), [*one_in(8, PLACES)])
def test_a_rank_that_dies_is_named(
    tmp_path: Path, schedule: str, recompute: str, action: str
) -> None:
    culprit = int(action[0])
    arguments = 3, schedule, recompute, action, "kill"
    started = _start(3, _store_in(tmp_path), jobs.drill, *arguments)
    _expect_death(culprit, *started, action=f"{action} (")


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("action", ["1REDUCE_GRAD", "0REDUCE_GRAD", "0F1", "1B1"])
def test_a_rank_of_a_replica_that_dies_is_named(tmp_path: Path, action: str) -> None:
    culprit = 2 + int(action[0])  # of the second replica
    arguments = 2, "1f1b", "none", action, "kill", culprit
    started = _start(4, _store_in(tmp_path), jobs.drill, *arguments)
    _expect_death(culprit, *started, action=f"{action} (")


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("culprit", [1, 0, 2])
def test_a_rank_that_dies_in_an_evaluation_is_named(tmp_path: Path, culprit: int) -> None:
    arguments = 3, culprit, "kill"
    _expect_death(culprit, *_start(3, _store_in(tmp_path), jobs.drill_of_evaluation, *arguments))


@pytest.mark.parametrize(("ranks", "error"), [(2, ValueError), (3, InputError)])
def test_every_rank_says_that_an_evaluation_failed_at_its_end(
    workers: Workers, tmp_path: Path, ranks: int, error: type[Exception]
) -> None:
    every = workers.run(ranks, jobs.evaluated_badly, error, folder=str(tmp_path))
    for rank, ((kind, text, seconds), *others) in enumerate(every):
        assert kind == (error if rank == ranks - 1 else InputError).__name__
        assert "planted" in text
        assert seconds < jobs.TIMEOUT
        # Nothing of it was on its way, so the ranks go on.
        assert [each.error for each in others] == ["", ""]


def _store_in(folder: Path) -> str:
    return f"file://{folder}/store"


def _expect_death(
    culprit: int,
    processes: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    *,
    action: str = "",
) -> None:
    """Only the culprit dies, and all others name it and its `action` in time."""
    for rank, pipe in enumerate(pipes):
        if rank != culprit:
            seen = pipe.recv()
            assert seen.error == "RankFaultError"
            assert f"rank {culprit} no longer answers; it was last seen in {action}" in seen.text
            assert seen.seconds < WITHIN
    for rank, process in enumerate(processes):
        process.join(timeout=20)
        assert process.exitcode == (-signal.SIGKILL if rank == culprit else 0)


@pytest.mark.parametrize(
    ("fault", "seconds", "text"),
    [
        ("kill", None, "rank 1 has ended"),
        ("hang", 0.5, "rank 1 has told nothing in time"),
        ("hang", None, "rank 1 has told nothing in time"),
    ],
)
def test_nobody_waits_for_what_a_rank_does_not_tell(
    tmp_path: Path, fault: str, seconds: float | None, text: str
) -> None:
    _, pipes = _start(2, _store_in(tmp_path), board_jobs.waits_for, fault, seconds)
    said, after = pipes[0].recv()
    assert text in said
    assert after < 2


def test_a_rank_that_gives_up_can_end_while_another_hangs(tmp_path: Path) -> None:
    processes, pipes = _start(2, _store_in(tmp_path), jobs.begins_alone)
    assert "rank 1 has not begun step 1" in pipes[0].recv().text
    processes[0].join(timeout=20)
    assert processes[0].exitcode == 0
    processes[1].kill()


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_the_others_go_on_to_an_error_without_the_host_of_their_store(fault: str) -> None:
    store = f"tcp://127.0.0.1:{_free_port()}"  # which rank 0 hosts
    processes, pipes = _start(3, store, jobs.drill, 3, "1f1b", "stage", "0F1", fault)
    try:
        for rank in (1, 2):
            assert pipes[rank].poll(120)
            seen = pipes[rank].recv()
            assert seen.error == "RankFaultError"
            assert seen.text.startswith("the store of the process group no longer answers, so the ")
            assert f"(rank 0, or the agent of torchrun); rank {rank} waited in {rank}" in seen.text
            assert seen.seconds < WITHIN + 2
            processes[rank].join(timeout=20)
            assert processes[rank].exitcode == 0
    finally:
        for process in processes:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(
    ranks: int, store: str, job: Callable[..., object], *arguments: object
) -> tuple[list[BaseProcess], list[Connection]]:
    """Processes of their own for a job that ends some, and the pipe on which each answers; `store`
    is where they meet, as torch's `init_method`.
    """
    pipes = [FORKS.Pipe() for _ in range(ranks)]
    processes: list[BaseProcess] = [
        FORKS.Process(target=_work, args=(rank, ranks, store, theirs, job, *arguments))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    return processes, [own for own, _ in pipes]


def _work(
    rank: int,
    ranks: int,
    store: str,
    pipe: Connection,
    job: Callable[..., object],
    *arguments: object,
) -> None:
    import torch.distributed as dist

    from tests.device import BACKEND, prepare_rank

    prepare_rank(rank)
    dist.init_process_group(BACKEND, init_method=store, rank=rank, world_size=ranks)
    pipe.send(job(*arguments))


def test_a_rank_that_hangs_in_an_evaluation_is_named(workers: Workers, tmp_path: Path) -> None:
    for rank, seen in enumerate(
        workers.run(3, jobs.drill_of_evaluation, 3, 1, "hang", folder=str(tmp_path))
    ):
        assert seen.error == "RankFaultError"
        assert "rank 1 hangs in 1F1 (forward of microbatch 1, stage 1)" in seen.text
        assert jobs.TIMEOUT < seen.seconds < WITHIN + 2 * (rank == 1)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("schedule", "action", "error"),
    [
        ("gpipe", "1F2", "ValueError"),
        ("1f1b", "1F2", "ValueError"),
        # The other rank has nothing left but to wait for the last message.
        ("1f1b", "1B3", "ValueError"),
        ("1f1b", "1F2", "KeyboardInterrupt"),
    ],
)
def test_nothing_follows_a_step_that_failed_midway(
    workers: Workers, tmp_path: Path, schedule: str, action: str, error: str
) -> None:
    found = workers.run(2, jobs.after_a_loss, schedule, action, error, folder=str(tmp_path))
    for kind, said in zip(("RankFaultError", error), found, strict=True):
        assert said[0].startswith(kind)
        for later in said[1:]:
            assert later.startswith("InputError: step 1 failed midway and its messages are lost")


def test_weights_that_one_rank_gathers_alone(workers: Workers, tmp_path: Path) -> None:
    first, _ = workers.run(2, jobs.gathered_by_one, folder=str(tmp_path))
    assert first.startswith("RankFaultError: rank 0 waited in the beginning of the gathering of")


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("another pipeline's", "step 0"),
        ("the first agreement", "step 0"),
        ("the clipping", "the clipping to 1.0 by norm 2.0 after 1 steps"),
        ("the save", "the save of a checkpoint to no-folder"),
        ("the load", "the loading of the checkpoint no-folder"),
        ("the whole state", "the gathering of the whole state"),
    ],
)
def test_a_rank_that_does_not_come_to_an_exchange(
    workers: Workers, tmp_path: Path, what: str, name: str
) -> None:
    seen, _ = workers.run(2, jobs.late_for_exchange, what, folder=str(tmp_path))
    assert seen.error == "RankFaultError"
    assert f"rank 1 has not begun {name}; rank 0 waited in the beginning of {name}" in seen.text
    assert seen.seconds < WITHIN


def test_an_interrupt_behind_the_actions_ends_the_run(workers: Workers, tmp_path: Path) -> None:
    first, last = workers.run(2, jobs.interrupted_in_sums, folder=str(tmp_path))
    assert first[0].startswith("KeyboardInterrupt") and last[0] == ""
    assert first[1].startswith("InputError: step 1 failed midway and its messages are lost")
    assert last[1].startswith("InputError: rank 0 refuses what it was given") or last[1].startswith(
        "RankFaultError"
    )


def test_two_pipelines_in_another_order_are_told(workers: Workers, tmp_path: Path) -> None:
    for seen in workers.run(2, jobs.steps_of_two_pipelines, folder=str(tmp_path)):
        assert seen.error == "InputError"
        assert "but the number of its pipeline is " in seen.text


def test_scales_that_go_apart_later_are_told(workers: Workers, tmp_path: Path) -> None:
    for seen in workers.run(2, jobs.scales_that_go_apart, folder=str(tmp_path)):
        assert seen.error == "InputError"
        assert seen.text.startswith("the scalers of ranks have other scales, from 4 to 8")


def test_scalers_of_other_scales_are_told(workers: Workers, tmp_path: Path) -> None:
    for seen in workers.run(2, jobs.other_scales, folder=str(tmp_path)):
        assert seen.error == "InputError"
        assert seen.text.startswith("the scale of the scaler has other values on some ranks")


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (jobs.clipped_by_one, "max_norm=-1.0, but it is a number, 0 or more"),
        (jobs.clipped_apart, "the clipping to 1.0 by norm 2.0 after 1 steps on rank 0 and the"),
    ],
)
def test_ranks_that_clip_otherwise_are_told(
    workers: Workers, tmp_path: Path, job: Callable[[], jobs.Seen], text: str
) -> None:
    for seen in workers.run(2, job, folder=str(tmp_path)):
        assert seen.error == "InputError" and text in seen.text
        assert seen.seconds < jobs.TIMEOUT


def test_a_hook_that_fails_is_named(workers: Workers, tmp_path: Path) -> None:
    for seen in workers.run(2, jobs.hook_that_fails, folder=str(tmp_path)):
        assert seen.text.startswith("the communication hook failed: RuntimeError: planted")


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("another folder", "0 on rank 0 and the save of a checkpoint to "),
        ("another way", "saved on rank 0 and the asynchronous save of a checkpoint to "),
        ("nothing", "what it begins is the save of a checkpoint to "),
    ],
)
def test_ranks_that_save_otherwise_are_told(
    workers: Workers, tmp_path: Path, what: str, text: str
) -> None:
    for seen in workers.run(2, jobs.different_saves, what, str(tmp_path), folder=str(tmp_path)):
        assert seen.error == "InputError"
        assert text in seen.text
    assert not list(tmp_path.glob("**/.metadata"))


def test_what_cannot_be_sent_to_all_ranks_is_told_to_all(workers: Workers, tmp_path: Path) -> None:
    for seen in workers.run(2, jobs.returned_with_a_function, folder=str(tmp_path)):
        assert seen.error == "InputError"
        assert seen.text.startswith("what a step returns cannot be sent to all ranks: ")


def test_a_replica_that_does_not_come_to_the_averages(workers: Workers, tmp_path: Path) -> None:
    seen, _ = workers.run(2, jobs.late_for_averages, folder=str(tmp_path))
    assert seen.error == "RankFaultError"
    assert "rank 0 waited in the exchanges at the end of step 1" in seen.text
    assert seen.seconds < WITHIN


def test_ranks_that_begin_different_steps_are_told(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(3, jobs.different_batches, folder=str(tmp_path)):
        assert text.startswith("InputError: ranks must step alike, but the number of samples is ")


def test_ranks_that_compile_different_models_are_told(workers: Workers, tmp_path: Path) -> None:
    first, last = workers.run(2, jobs.different_models, folder=str(tmp_path))
    assert first.startswith(
        "InputError: rank 1: this rank has another graph of the model than rank 0"
    )
    assert last.startswith("StalePlanError: this rank has another graph of the model than rank 0")


def test_a_pipeline_that_is_made_after_a_fault_says_so(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(2, jobs.compiled_after_a_fault, folder=str(tmp_path)):
        assert text.startswith("RankFaultError: a call that all ranks make exchanges values")
        assert text.endswith("after a step that failed midway start the processes anew")


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("too many samples", "microbatches, but the plan was made for"),
        ("another type", "is of type torch.float64"),
        ("another shape", "only the number of samples may differ"),
        ("an evaluation", "only the number of samples may differ"),
        ("no gradients", "gradients are switched off"),
    ],
)
def test_what_one_rank_refuses_the_others_refuse_too(
    workers: Workers, tmp_path: Path, what: str, words: str
) -> None:
    *others, (own, loss) = workers.run(3, jobs.refused_by_one, what, folder=str(tmp_path))
    assert own.startswith("InputError: ") and words in own
    for text, same in others:
        assert text == own.replace("InputError: ", "InputError: rank 2 refuses what it was given: ")
        assert same == loss


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("what", "sharded", "words"),
    [
        ("the loss of an evaluation", False, "InputError: "),
        ("an evaluation", True, "InputError: "),
        ("a batch that raises", False, "TypeError: planted"),
        ("a target that raises", False, "TypeError: planted"),
    ],
)
def test_what_a_rank_of_a_replica_refuses_all_replicas_refuse(
    workers: Workers, tmp_path: Path, what: str, sharded: bool, words: str
) -> None:
    job, folder = jobs.refused_by_last, str(tmp_path)
    *others, (own, seconds, loss) = workers.run(4, job, what, 2, sharded=sharded, folder=folder)
    assert own.startswith(words)
    assert seconds < WITHIN
    told = own.removeprefix("InputError: ")
    for text, seconds, same in others:
        assert text == f"InputError: rank 3 refuses what it was given: {told}"
        assert seconds < WITHIN
        assert same == loss


def test_replicas_evaluate_different_numbers_of_batches(workers: Workers, tmp_path: Path) -> None:
    results = workers.run(4, jobs.evaluated_apart, 2, folder=str(tmp_path))
    assert [count for count, _, _ in results] == [0, 1, 0, 3]
    for _, loss, step in results:
        assert loss == pytest.approx(step, rel=1e-6)


def test_the_culprit_is_of_the_surest_kind() -> None:
    waits = RankState(begun=3, name="step 2", phase="waiting", action="0B0", peer=1)
    hangs = RankState(begun=3, phase="computing", action="1F1")
    fails = RankState(begun=3, phase="failed", action="2F1", error="ValueError: no")
    text = verdict({0: waits, 1: hangs}, [])
    assert text == "rank 1 hangs in 1F1; rank 0 waited in 0B0 for rank 1"
    assert verdict({0: waits, 1: hangs}, [1]).startswith("rank 1 no longer answers; it was last")
    assert verdict({0: waits, 1: hangs, 2: fails}, [1]).startswith("rank 2 failed in 2F1: ValueE")
    late = RankState(begun=2)
    assert verdict({0: waits, 1: late}, []).startswith("rank 1 has not begun step 2; rank 0 waited")
    assert verdict({0: waits}, []).startswith("the ranks wait for each other; rank 0 waited in 0B0")
