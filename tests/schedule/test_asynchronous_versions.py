from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.schedule import Action, Kind
from pipecompile.schedule.asynchronous_versions import (
    DOUBLE_BUFFERED,
    STASHED,
    VERTICAL_SYNC,
    PipelineSize,
    with_versions,
)
from pipecompile.schedule.named_orders import ASYNCHRONOUS, generate

NAMES = sorted(ASYNCHRONOUS)


def test_pipedream_steps_after_every_backward() -> None:
    schedule = generate("pipedream", range(2), 3)
    assert schedule.weight_versions == "stashed"
    assert [" ".join(row) for row in schedule.actions] == [
        "0F0@0 0F1@0 0B0@0 0STEP0@1 0F2@1 0B1@0 0STEP1@2 0B2@1 0STEP2@3",
        "1F0@0 1B0@0 1STEP0@1 1F1@1 1B1@1 1STEP1@2 1F2@2 1B2@2 1STEP2@3",
    ]


def test_vertical_sync_keeps_the_version_of_the_first_stage() -> None:
    schedule = generate("pipedream-vertical-sync", range(2), 4, recompute=True)
    assert schedule.weight_versions == "vertical-sync"
    assert " ".join(schedule.actions[0]).endswith("0R2@1 0B2@1 0STEP2@3 0R3@2 0B3@2 0STEP3@4")
    assert " ".join(schedule.actions[1]) == (
        "1F0@0 1B0@0 1STEP0@1 1F1@0 1B1@0 1STEP1@2 1F2@1 1B2@1 1STEP2@3 1F3@2 1B3@2 1STEP3@4"
    )


def test_two_buffered_weights_are_stepped_once_a_minibatch() -> None:
    schedule = generate("pipedream-2bw", range(2), 3)
    assert schedule.weight_versions == "double-buffered"
    assert " ".join(schedule.actions[1]) == "1F0@0 1B0@0 1F1@0 1B1@0 1F2@0 1B2@0 1STEP2@1"


def test_double_buffers_need_nearly_as_many_microbatches_as_ranks() -> None:
    """Else the first rank begins a minibatch before the version that it reads has been made."""
    generate("pipedream-2bw", range(4), 3)
    with pytest.raises(InputError, match="at least 3 microbatches on 4 ranks, but there are 2"):
        generate("pipedream-2bw", range(4), 2)


def _walk(
    name: str, ranks: int, microbatches: int
) -> Iterator[tuple[int, list[tuple[Action, int]]]]:
    """Return for each stage its actions, each with the newest version as it begins.

    With double buffers they are those of minibatches of `ranks` microbatches.
    """
    rule = {"stashed": STASHED, "vertical-sync": VERTICAL_SYNC, "double-buffered": DOUBLE_BUFFERED}
    compute = generate("1f1b", range(ranks), microbatches)
    weight_versions = generate(name, range(ranks), ranks).weight_versions
    for stage, plain in enumerate(compute.rows):
        row = with_versions(plain, rule[weight_versions], PipelineSize((1,) * ranks, ranks))
        newest, seen = 0, []
        for action in row:
            seen.append((action, newest))
            if action.kind is Kind.STEP:
                newest += 1
                assert action.version == newest, "each step makes the next version"
        yield stage, seen


SIZES = list(product(range(1, 7), (1, 2, 5, 6, 7, 12, 13, 20)))


@pytest.mark.parametrize("name", NAMES)
def test_a_microbatch_sees_one_version_there_and_back_that_exists(name: str) -> None:
    for ranks, microbatches in SIZES:
        for _, seen in _walk(name, ranks, microbatches):
            used = {}
            for action, newest in seen:
                if action.kind is Kind.FORWARD:
                    used[action.microbatch] = action.version
                    assert action.version is not None
                    assert action.version <= newest
                if action.kind is Kind.BACKWARD:
                    assert action.version == used[action.microbatch]


def test_pipedream_is_stale_by_the_ranks_that_follow() -> None:
    """PipeDream, section 3.3: the last of n stages updates with gradients of its newest weights,
    those of the first are n − 1 older.
    """
    for ranks, microbatches in SIZES:
        for stage, seen in _walk("pipedream", ranks, microbatches):
            for action, newest in seen:
                if action.kind is Kind.FORWARD:
                    assert action.version == newest, "a forward uses the latest"
                if action.kind is Kind.BACKWARD and newest >= ranks - 1 - stage:
                    assert newest - action.version == ranks - 1 - stage


def test_vertical_sync_is_stale_by_all_other_ranks_on_every_stage() -> None:
    """PipeDream, section 3.3: with vertical sync gradients are of weights n − 1 steps before."""
    for ranks, microbatches in SIZES:
        for _, seen in _walk("pipedream-vertical-sync", ranks, microbatches):
            stale = [newest - a.version for a, newest in seen if a.kind is Kind.BACKWARD]
            assert stale == [min(step, ranks - 1) for step in range(microbatches)]


def test_two_buffers_are_enough_and_the_delay_is_one() -> None:
    """PipeDream-2BW, section 3.1: W(u + 1) = W(u) − ν ∇f(W(u − 1)); two versions at most live."""
    for ranks, microbatches in SIZES:
        for _, seen in _walk("pipedream-2bw", ranks, microbatches):
            gradients: set[int | None] = set()
            for place, (action, newest) in enumerate(seen):
                if action.kind is Kind.BACKWARD:
                    gradients.add(action.version)
                if action.kind is Kind.STEP:
                    assert gradients == {max(0, newest - 1)}, (
                        "one version in each update, one step old"
                    )
                    gradients.clear()
                used = {a.version for a, _ in seen[place:] if a.kind is not Kind.STEP}
                alive = {
                    version for version in used if version is not None and version <= newest
                } | {newest}
                assert len(alive) <= 2
