"""The pipeline on torch.distributed.pipelining: gloo ranks against the unsplit model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.cost_models.device import load_device
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.serialization import encode, write
from tests.distributed import jobs
from tests.distributed.workers import Workers
from tests.orders import BACKWARDS, PipelineOrder
from tests.sweeps import one_in, sweep

EFFECTS = ("data_branch", "hooks", "buffers", "no_grad", "in_place", "checkpointed", "clip")

PLACES = (
    (2, 1, "linear"),
    (4, 1, "linear"),
    (2, 2, "loop"),
    (2, 2, "v"),
    (2, 2, "linear"),
    (2, 3, "v"),
)
HAND_MADE = tuple(
    PipelineOrder(backwards, ranks, stages, shape, recompute=(index + place) % 2 == 1)
    for index, backwards in enumerate(BACKWARDS)
    for place, (ranks, stages, shape) in enumerate(PLACES)
    if backwards != "whole" or shape == "v"
)


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize(
    ("name", "k", "schedule"),  # tests/api/test_step.py has the other pairs
    [
        *((name, 4, "1f1b") for name in ("sequential", "unet", "gpt2")),
        *((name, 2, "gpipe") for name in ("llama", "resnet50")),
        *(sweep(name, 2, "gpipe") for name in ("sequential", "unet", "gpt2", "bert", "t5")),
        *(sweep(name, 4, "1f1b") for name in ("bert", "t5", "llama", "resnet50")),
    ],
)
def test_a_step_is_the_unsplit_step(
    workers: Workers, tmp_path: Path, name: str, k: int, schedule: str
) -> None:
    verdicts = workers.run(
        k, jobs.verify_model, name, {"k": k, "schedule": schedule}, folder=str(tmp_path)
    )
    for verdict in verdicts:
        assert verdict.passed, verdict
        assert {tensor for tensor, _ in verdict.unequal} <= verdict.tied
    # With random numbers the reference is the unsplit graph under the same seeds; without them it
    # is always the module itself.
    assert verdicts[0].references[-1] == "the original module"


PLANNED = [
    *((name, 1) for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "search")),
    *(
        (name, 2)
        for name in (
            "interleaved-1f1b",
            "looped-bfs",
            "zb-v",
            "v-half",
            "v-min",
            "dualpipe-v",
            "search",
        )
    ),
]


def assert_planned(
    workers: Workers,
    folder: Path,
    name: str,
    schedule: str,
    ranks: int,
    each: int,
    recompute: str = "none",
) -> None:
    options = {
        "k": ranks * each,
        "schedule": schedule,
        "stages_per_rank": each,
        "microbatches": 2 * ranks,
    }
    options |= {"recompute": recompute}
    for verdict in workers.run(ranks, jobs.verify_model, name, options, folder=str(folder)):
        assert verdict.passed, verdict
        assert {tensor for tensor, _ in verdict.unequal} <= verdict.tied


@pytest.mark.one_case_in(12)
@pytest.mark.parametrize(
    ("schedule", "each", "ranks", "recompute"),
    [
        *one_in(2, ((*planned, 2, "except-last") for planned in PLANNED)),
        *one_in(2, ((*planned, 4, "none") for planned in PLANNED[-1:] + PLANNED[:-1])),
    ],
)
def test_every_planned_schedule_is_the_unsplit_step(
    workers: Workers, tmp_path: Path, schedule: str, each: int, ranks: int, recompute: str
) -> None:
    if (schedule, recompute) == ("search", "except-last"):
        recompute = "stage"  # a searched order treats all microbatches alike
    assert_planned(workers, tmp_path, "sequential", schedule, ranks, each, recompute)


@pytest.mark.parametrize(("schedule", "each"), [("search", 1), ("zb-v", 2)])
@pytest.mark.sweep
def test_ties_and_dropout_under_planned_schedules(
    workers: Workers, tmp_path: Path, schedule: str, each: int
) -> None:
    assert_planned(workers, tmp_path, "gpt2", schedule, 4, each)


def assert_exact(workers: Workers, folder: Path, name: str, order: PipelineOrder) -> None:
    """Equal to the unsplit model, but for what the order of a sum over stages may change."""
    for verdict in workers.run(order.ranks, jobs.verify_order, name, order, folder=str(folder)):
        assert verdict.passed, verdict
        assert {tensor for tensor, _ in verdict.unequal} <= verdict.tied


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("order", HAND_MADE, ids=str)
def test_every_order_is_the_unsplit_step(
    workers: Workers, tmp_path: Path, order: PipelineOrder
) -> None:
    assert_exact(workers, tmp_path, "sequential", order)


MIXTURE = (
    PipelineOrder("late", 4),
    PipelineOrder("behind", 2, 2, "loop", recompute=True),
    PipelineOrder("mixed", 2, 2, "v"),
)


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("name", "order"),
    [
        *one_in(
            3, ((name, order) for name in ("gpt2", "unet") for order in (MIXTURE[2], *MIXTURE[:2]))
        ),
        ("t5", MIXTURE[0]),
        ("resnet50", MIXTURE[1]),
    ],
    ids=str,
)
def test_ties_skips_and_buffers_under_split_backwards(
    workers: Workers, tmp_path: Path, name: str, order: PipelineOrder
) -> None:
    assert_exact(workers, tmp_path, name, order)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    "order", [PipelineOrder("late", 2, 2, "v"), PipelineOrder("behind", 2, 2, "loop")], ids=str
)
def test_ranks_of_several_stages_train_evaluate_and_hold_state(
    workers: Workers, tmp_path: Path, order: PipelineOrder
) -> None:
    found = workers.run(2, jobs.several_stages, "unet", order, folder=str(tmp_path))
    last = 0 if order.shape == "v" else 1  # the rank of the last stage
    assert [losses is None for losses, *_ in found] == [rank != last for rank in range(2)]
    losses, unsplit, _, agrees = found[last]
    assert losses == unsplit and len(set(losses)) == 3
    assert agrees is True
    assert set().union(*(names for *_, names, _ in found)) == set(
        jobs.load("unet").model.state_dict()
    )


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    [
        sweep("unet", "gpipe", "stage"),
        sweep("gpt2", "1f1b", "stage"),
        ("unet", "1f1b", "except-last"),
        ("unet", "1f1b", "block"),
        sweep("gpt2", "gpipe", "sqrt"),
    ],
)
def test_recompute_is_exact(
    workers: Workers, tmp_path: Path, name: str, schedule: str, recompute: str
) -> None:
    options = {"k": 4, "schedule": schedule, "recompute": recompute}
    verdicts = workers.run(4, jobs.verify_model, name, options, folder=str(tmp_path))
    assert all(verdict.passed for verdict in verdicts), verdicts[0]


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["interleaved-1f1b", sweep("looped-bfs")])
def test_regions_on_ranks_of_several_stages(
    workers: Workers, tmp_path: Path, schedule: str
) -> None:
    assert_planned(workers, tmp_path, "unet", schedule, 2, 2, "block")


@pytest.mark.sweep
def test_regions_that_fit_a_rank_are_exact(workers: Workers, tmp_path: Path) -> None:
    """Only the rank that would hold too much recomputes anything."""
    target = jobs.load("unet")
    chosen = options_for(target, k=2, microbatches=4, costs="flops")
    plan = make_plan(target, chosen, capture_target(target, chosen, verify=False))
    memory = [int(0.95 * plan.prediction.memory[0].total.bound), "1GiB"]
    options = {"k": 2, "recompute": "auto", "memory": memory, "pin": plan.assignment}
    for verdict in workers.run(2, jobs.verify_model, "unet", options, folder=str(tmp_path)):
        assert verdict.passed and not verdict.unequal, verdict


@pytest.mark.parametrize(("name", "tolerance"), [("sequential", 0.0), sweep("gpt2", 1e-6)])
def test_losses_follow_over_optimizer_steps(
    workers: Workers, tmp_path: Path, name: str, tolerance: float
) -> None:
    found = workers.run(4, jobs.losses, name, 4, 5, folder=str(tmp_path))
    own, unsplit = found[-1]
    assert own == pytest.approx(unsplit, rel=tolerance, abs=0.0)
    assert len(set(own)) == 5  # it trains


@pytest.mark.one_case_in(9)
@pytest.mark.parametrize("name", [*EFFECTS, sweep("dispatch_moe")])
def test_models_that_do_more_than_compute_step_as_unsplit(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    for verdict in workers.run(2, jobs.verify_model, name, {"k": 2}, folder=str(tmp_path)):
        assert verdict.passed, verdict


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("name", ["t5", "buffers", "wav2vec2", "shared", "parametrized"])
def test_the_ranks_hold_the_original_state_together(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    names = workers.run(2, jobs.state_names, name, 2, folder=str(tmp_path))
    assert set().union(*names) == set(jobs.load(name).model.state_dict())


@pytest.mark.sweep
def test_both_holders_of_a_tie_answer_to_both_names(workers: Workers, tmp_path: Path) -> None:
    names = workers.run(4, jobs.state_names, "gpt2", 4, folder=str(tmp_path))
    assert set().union(*names) == set(jobs.load("gpt2").model.state_dict())
    assert "lm_head.weight" in names[0] and "lm_head.weight" in names[3]


@pytest.mark.sweep
def test_tied_copies_begin_equal(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(
        4, jobs.tied_values, "gpt2", 4, "transformer.wte.weight", folder=str(tmp_path)
    )
    assert found[1] is None and found[2] is None
    owner = dict(jobs.load("gpt2").model.named_parameters())["transformer.wte.weight"]
    assert torch.equal(found[0], found[3]) and torch.equal(found[0], owner)


def test_evaluate_is_the_model_in_eval_mode(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(4, jobs.evaluation, "unet", 4, folder=str(tmp_path)) == [
        None,
        None,
        None,
        True,
    ]


@pytest.mark.sweep
def test_train_and_eval_switch_the_steps_of_all_ranks(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, jobs.switched, "unet", 2, folder=str(tmp_path)) == [[True] * 3] * 2


def test_what_no_planned_stage_holds_is_refused_by_all_ranks(
    workers: Workers, tmp_path: Path
) -> None:
    for text in workers.run(2, jobs.head_of_evaluation, folder=str(tmp_path)):
        assert (
            "in this mode or shape other" in text
            and "compile the model in this mode or with this shape" in text
        )


@pytest.mark.parametrize("microbatches", [4, None])
def test_one_rank_plans_for_all_and_short_minibatches_run(
    microbatches: int | None, workers: Workers, tmp_path: Path
) -> None:
    # Without a number two plans are measured, in which the other ranks assist.
    found = workers.run(2, jobs.plans, "sequential", 2, microbatches, folder=str(tmp_path))
    assert found[0] == found[1], (
        "measured costs differ from rank to rank, so the plan must be rank 0's"
    )


def test_only_the_first_rank_reads_files_of_costs(workers: Workers, tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    write(path, encode(load_device("h100")))
    found = workers.run(
        2, jobs.refusal_on, 1, "sequential", f"roofline:{path}", folder=str(tmp_path)
    )
    assert found == ["accepted", "accepted"]
    found = workers.run(
        2, jobs.refusal_on, 0, "sequential", f"roofline:{path}", folder=str(tmp_path)
    )
    assert all("device.json.absent" in text for text in found)


def test_every_rank_refuses_alike(workers: Workers, tmp_path: Path) -> None:
    found = workers.run(
        2, jobs.refusal, "sequential", {"k": 99, "microbatches": 4}, folder=str(tmp_path)
    )
    assert all("InfeasibleError" in text and "k=99" in text for text in found)
    found = workers.run(
        3, jobs.refusal, "sequential", {"k": 2, "microbatches": 4}, folder=str(tmp_path)
    )
    assert all("2 ranks, but 3 processes" in text for text in found)
