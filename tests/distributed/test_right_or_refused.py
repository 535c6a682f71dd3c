"""Two ranks are right, or every one of them refuses in one line and takes the next step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import refusal_jobs as jobs
from tests.distributed.workers import Workers

EXACT = 1e-6
KINDS = {"draws": jobs.DRAWS, "boundaries": jobs.BOUNDARIES}


@pytest.mark.parametrize("kinds", KINDS)
def test_ranks_that_are_seeded_apart_train_as_one_process(
    workers: Workers, tmp_path: Path, kinds: str
) -> None:
    names = list(KINDS[kinds])
    for found in workers.run(2, jobs.distances, kinds, names, folder=str(tmp_path)):
        far = {name: value for name, value in zip(names, found, strict=True) if value > EXACT}
        assert not far


def test_a_step_that_ranks_cannot_take_is_refused_by_all(workers: Workers, tmp_path: Path) -> None:
    names = list(jobs.STEPS)
    for found in workers.run(2, jobs.said_of_steps, names, folder=str(tmp_path)):
        for name, (kind, text, steps_well) in zip(names, found, strict=True):
            assert kind == "InputError", (name, kind, text)
            assert text and "\n" not in text and steps_well, name


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", jobs.LAYOUTS)
def test_what_lies_in_memory_otherwise_than_it_is_received_is_refused(
    workers: Workers, tmp_path: Path, name: str
) -> None:
    (kind, text), (other_kind, other_text) = workers.run(
        2, jobs.said_of_layout, name, folder=str(tmp_path)
    )
    assert kind == "InputError"
    assert "strides" in text or "lies in memory in another way" in text
    assert other_kind == "RankFaultError" and text in other_text


def test_what_one_rank_refuses_before_all_others_do_too(workers: Workers, tmp_path: Path) -> None:
    for kind, text in workers.run(2, jobs.said_of_no_module, folder=str(tmp_path)):
        assert kind == "InputError" and "the model is a str, but must be an nn.Module" in text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_model_on_meta_on_one_rank_is_refused(
    workers: Workers, tmp_path: Path, rank: int
) -> None:
    for kind, text in workers.run(2, jobs.said_of_a_model_on_meta, rank, folder=str(tmp_path)):
        assert kind == "InputError" and f"on the meta device on the ranks [{rank}]" in text


def test_evaluations_that_ranks_begin_otherwise_are_refused_by_all_replicas(
    workers: Workers, tmp_path: Path
) -> None:
    for found in workers.run(4, jobs.said_of_evaluations, folder=str(tmp_path)):
        for (kind, text, steps_well), name in zip(found, jobs.EVALUATIONS, strict=False):
            assert kind == "InputError" and steps_well, (name, kind, text)
            assert "whether it was given a target is" in text, name
        for kind, text, steps_well in found[len(jobs.EVALUATIONS) :]:
            assert kind == "InputError" and steps_well, (kind, text)


@pytest.mark.parametrize(
    "place",
    ["an attribute", "a table that it encloses", "what it encloses", "an object", "its class"],
)
def test_arrays_that_ranks_draw_apart_are_refused(
    workers: Workers, tmp_path: Path, place: str
) -> None:
    folder = str(tmp_path)
    for kind, text in workers.run(2, jobs.said_of_arrays, True, place, folder=folder):
        assert kind == "InputError" and "an array of numpy that has other values on rank" in text
    for kind, text in workers.run(2, jobs.said_of_arrays, False, place, folder=folder):
        assert (kind, text) == ("", "")
