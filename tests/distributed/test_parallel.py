"""Stages that `parallelize=` divides, on gloo ranks against the unsplit model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipecompile.ir.plan import ShardLevel
from tests.distributed import checkpoint_jobs
from tests.distributed import parallel_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-12
sweep = pytest.mark.sweep


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize(
    ("ranks", "replicas", "schedule", "reshard"),
    [
        (2, 2, "1f1b", None),
        pytest.param(2, 2, "1f1b", True, marks=sweep),
        (2, 2, "zb-h1", False),
        (2, 2, "zb-h1", True),
        (2, 1, "zb-h1", None),
        (4, 1, "1f1b", None),
        pytest.param(2, 1, "1f1b", None, marks=sweep),
        pytest.param(4, 1, "zb-h1", None, marks=sweep),
    ],
)
def test_a_step_of_sharded_stages_is_the_unsplit_step(
    workers: Workers,
    tmp_path: Path,
    ranks: int,
    replicas: int,
    schedule: str,
    reshard: bool | None,
) -> None:
    arguments = ranks, replicas, schedule, reshard
    results = workers.run(ranks * replicas, jobs.sharded_step, *arguments, folder=str(tmp_path))
    for distances, (gathers, sums) in results:
        assert max(distances) <= EXACT
        if replicas > 1:
            assert sums == 1
            # For each action of 4 microbatches, or once.
            actions = {"1f1b": 8, "zb-h1": 12}[schedule]
            assert gathers == (actions if reshard else 1)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_so_is_that_of_stages_that_shard_more_than_the_optimizer(
    workers: Workers, tmp_path: Path, schedule: str, shard: ShardLevel
) -> None:
    arguments = 2, 2, schedule, None, shard
    actions = {"1f1b": 8, "zb-h1": 12}[schedule]
    for distances, exchanges in workers.run(4, jobs.sharded_step, *arguments, folder=str(tmp_path)):
        assert max(distances) <= EXACT
        # Gradients are summed in each of 4 microbatches.
        assert exchanges == (actions if shard == "parameters" else 1, 4)


def test_plans_count_the_replicas_that_run_and_say_what_they_do_not_count(
    workers: Workers, tmp_path: Path
) -> None:
    results = workers.run(4, jobs.counted_replicas, folder=str(tmp_path))
    assert [replicas for replicas, _ in results] == [2] * 4
    (_, warned), *others = results
    without_mesh = "4 processes are 2 replicas of a pipeline of 2 ranks"
    first = [text for text in warned if not text.startswith(without_mesh)]
    assert (len(first), len(warned)) == (3, 5)
    assert "plan with shard='optimizer'" in first[0]
    assert "the plan counts 1 replica, but 2 run" in first[1]
    # The table is read on both ranks.
    assert "rank 0 holds more of 1 parameter" in first[2]
    for rank, (_, warnings) in enumerate(others, 1):
        assert [f"rank {rank} holds more of 1 parameter" in text for text in warnings] == [True]


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_steps_that_accumulate_sum_over_replicas_only_what_they_must(
    workers: Workers, tmp_path: Path, shard: ShardLevel
) -> None:
    assert max(workers.run(4, jobs.accumulated, shard, folder=str(tmp_path))) <= EXACT


def test_sharded_replicas_step_on_equally_many_samples(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(4, jobs.stepped_unequally, folder=str(tmp_path)):
        assert "the number of samples is 16 on rank 0 and 14 on rank 2" in text


def test_an_overflow_in_one_shard_is_one_on_all_ranks(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(4, jobs.overflowed, folder=str(tmp_path)) == [(4.0, False)] * 4


def test_sharded_stages_evaluate_and_read_weights(workers: Workers, tmp_path: Path) -> None:
    file = str(tmp_path / "model.safetensors")
    for distances in workers.run(4, jobs.evaluated, file, folder=str(tmp_path)):
        assert max(distances) <= EXACT


@pytest.mark.sweep
@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("reshard", [None, True])
def test_sharded_replicas_evaluate_unequally_many_samples(
    workers: Workers, tmp_path: Path, reshard: bool | None
) -> None:
    assert max(workers.run(4, jobs.evaluated_unequally, reshard, folder=str(tmp_path))) <= EXACT


def test_a_model_from_the_meta_device_is_sharded(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(4, jobs.from_meta, folder=str(tmp_path))) <= EXACT


def test_sharded_stages_take_batches_of_two_shapes(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(4, jobs.of_two_shapes, folder=str(tmp_path))) <= EXACT


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("job", [jobs.partly_sharded, jobs.hybrid])
def test_what_is_sharded_in_parts_or_on_parts_of_the_replicas(
    workers: Workers, tmp_path: Path, job: Any
) -> None:
    for distances in workers.run(4, job, folder=str(tmp_path)):
        assert max(distances) <= EXACT


@pytest.mark.sweep
def test_a_sharded_run_goes_on_unsplit_and_sharded_again(workers: Workers, tmp_path: Path) -> None:
    def on(layout: tuple[int, int], steps: int, **files: str) -> Any:
        processes = max(layout[0] * layout[1], 1)
        options = {"sharded": layout[0] > 0, **files}
        job, folder = checkpoint_jobs.trained, str(tmp_path)
        return workers.run(processes, job, *layout, steps, folder=folder, **options)[0]

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    on((2, 2), 2, save=first)
    on((0, 1), 2, load=first, save=second)
    progress, state = on((2, 2), 2, load=second)
    wanted_progress, wanted = on((0, 1), 6)
    assert progress == wanted_progress
    assert max((state[name] - wanted[name]).abs().max().item() for name in wanted) <= EXACT


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ({"pp": 2, "tp": 2}, "1f1b"),
        ({"pp": 2, "tp": 2}, "zb-h1"),
        ({"dp": 2, "pp": 1, "tp": 2}, "1f1b"),
    ],
)
def test_columns_and_rows_of_a_stage_are_on_several_ranks(
    workers: Workers, tmp_path: Path, sizes: dict[str, int], schedule: str
) -> None:
    arguments = sizes, schedule, str(tmp_path / "checkpoint")
    for distances in workers.run(4, jobs.tensor_parallel, *arguments, folder=str(tmp_path)):
        assert max(distances) <= EXACT


def test_ranks_that_divide_a_layer_are_given_one_batch(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(4, jobs.other_batches_along_tp, folder=str(tmp_path)):
        assert text.startswith("the input of microbatch 0 has other values on some ranks")


def test_heads_of_attention_are_on_several_ranks(workers: Workers, tmp_path: Path) -> None:
    assert max(workers.run(4, jobs.divided_heads, folder=str(tmp_path))) <= EXACT


def test_what_cannot_be_exact_is_refused_on_all_ranks(workers: Workers, tmp_path: Path) -> None:
    texts = {
        "ddp": "hooks do not fire under torch.autograd.grad",
        "mesh": "the replicas of this stage are the ranks",
        "types": "give pipecompile autocast= instead",
        "tie": "'table.weight' is divided differently",
        "no mesh": "divides stages over a mesh, but there is none",
        "no parallelize": "would all compute the same",
        "dropout": "what dropout draws for, must be whole",
        "softmax": "computes something else",
        "hooks": "which would never run",
        "wrapped": "a module that holds it was wrapped or replaced",
    }
    for messages in workers.run(4, jobs.refusals, folder=str(tmp_path)):
        assert messages.keys() == texts.keys()
        for mistake, text in texts.items():
            assert text in messages[mistake], mistake
    for message in workers.run(4, jobs.two_copies_on_a_rank, folder=str(tmp_path)):
        assert "two tensors of the tied parameter 'table.weight'" in message
