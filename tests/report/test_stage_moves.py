"""What lies in other stages, as ranges."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.ir.plan import Plan
from pipecompile.report.stage_moves import StageMove, move_text, moved_modules, moved_nodes, moves

MakePlan = Callable[..., Plan]
Places = dict[str, tuple[int, ...]]


def places(**stages: int) -> Places:
    return {name: (stage,) for name, stage in stages.items()}


def test_a_layer_that_moves_is_one_move() -> None:
    old, new = places(a=0, b=0, c=1, d=1), places(a=0, b=0, c=0, d=1)
    assert moves(old, new) == [StageMove("c", "c", (1,), (0,))]
    assert moves(new, new) == []


def test_neighbours_that_move_alike_are_a_range() -> None:
    old = places(a=0, b=0, c=0, d=1, e=1, f=1)
    new = places(a=0, b=1, c=1, d=1, e=2, f=2)
    assert moves(old, new) == [StageMove("b", "c", (0,), (1,)), StageMove("e", "f", (1,), (2,))]


def test_what_stays_ends_a_range() -> None:
    old, new = places(a=0, b=1, c=0), places(a=1, b=1, c=1)
    assert moves(old, new) == [StageMove("a", "a", (0,), (1,)), StageMove("c", "c", (0,), (1,))]


def test_what_only_one_plan_has_was_added_or_is_gone() -> None:
    old, new = places(a=0, x=0, y=0, b=1), places(a=0, b=1, c=1, d=1)
    assert moves(old, new) == [StageMove("x", "y", (0,), ()), StageMove("c", "d", (), (1,))]


def applied(found: list[StageMove], old: Places, new: Places) -> Places:
    """The stages of `old` after the moves. The names in a range are those between its ends."""
    result = dict(old)
    for move in found:
        order = list(old if move.before else new)
        for name in order[order.index(move.first) : order.index(move.last) + 1]:
            assert old.get(name, ()) == move.before
            if move.after:
                result[name] = move.after
            else:
                del result[name]
    return result


STAGES = st.lists(st.integers(0, 3), min_size=1, max_size=2, unique=True).map(tuple)
PLACES = st.lists(st.tuples(st.integers(0, 9), STAGES), unique_by=lambda pair: pair[0]).map(
    lambda pairs: {f"layers.{number}": stages for number, stages in sorted(pairs)}
)


@given(PLACES, PLACES)
def test_moves_make_the_new_stages_out_of_the_old(old: Places, new: Places) -> None:
    found = moves(old, new)
    assert applied(found, old, new) == new
    assert all(move.before != move.after for move in found)


def cut(plan: Plan, stages: list[int]) -> Plan:
    """The plan with node i, which is a module of its own, in stage `stages[i]`."""
    names = [f"block.{number}" for number in range(len(stages))]
    return msgspec.structs.replace(
        plan,
        stages=tuple(
            msgspec.structs.replace(
                stage,
                blocks=tuple((n,) for n, s in zip(names, stages, strict=True) if s == index),
                module_runs=(),
                modules=tuple(
                    f"model.{n}" for n, s in zip(names, stages, strict=True) if s == index
                ),
            )
            for index, stage in enumerate(plan.stages)
        ),
    )


ASSIGNMENT = st.lists(st.integers(0, 3), min_size=14, max_size=14)


@pytest.fixture(scope="module")
def plan(make_plan: MakePlan) -> Plan:
    return make_plan()


@given(old=ASSIGNMENT, new=ASSIGNMENT)
def test_the_ranges_that_are_printed_make_the_new_cut(
    plan: Plan, old: list[int], new: list[int]
) -> None:
    before, after = cut(plan, old), cut(plan, new)
    # In the order of the old plan: stage by stage, each in the order of the forward.
    order = [f"model.{name}" for stage in before.stages for name in stage.nodes]
    result = {f"model.{name}": stage for name, stage in before.assignment.items()}
    for move in moved_nodes(before, after):
        first, _, last = move_text(move, before).partition(" … ")
        for name in order[order.index(first) : order.index(last or first) + 1]:
            assert (result[name],) == move.before
            (result[name],) = move.after
    assert result == {f"model.{name}": stage for name, stage in after.assignment.items()}


def with_runs(plan: Plan, *stages: tuple[list[str], list[str]]) -> Plan:
    """A plan with these runs (names of nodes between spaces) and modules in its first stages."""
    made = [
        msgspec.structs.replace(
            stage,
            blocks=tuple(tuple(run.split()) for run in runs),
            modules=tuple(modules),
            module_runs=(),
        )
        for stage, (runs, modules) in zip(plan.stages, stages, strict=False)
    ]
    rest = [
        msgspec.structs.replace(stage, blocks=(), modules=(), module_runs=())
        for stage in plan.stages[len(made) :]
    ]
    return msgspec.structs.replace(plan, stages=(*made, *rest))


def moved(old: Plan, new: Plan) -> list[str]:
    return [
        f"{move_text(move, old)}: {move.before[0]} → {move.after[0]}"
        for move in moved_nodes(old, new)
    ]


def test_a_part_of_a_module_is_told_by_its_nodes(plan: Plan) -> None:
    old = with_runs(
        plan,
        (["emb", "add mul", "add_1 mul_1 gelu"], ["emb", "h.0-1"]),
        (["add_2 mul_2"], ["h.2"]),
    )
    assert moved(
        old,
        with_runs(
            plan,
            (["emb", "add mul", "add_1 mul_1"], ["emb", "h.0-1"]),
            (["gelu", "add_2 mul_2"], ["h.1-2"]),
        ),
    ) == ["h.1 (gelu): 0 → 1"]
    assert moved(
        old,
        with_runs(
            plan,
            (["emb", "add"], ["emb", "h.0"]),
            (["mul", "add_1 mul_1 gelu", "add_2 mul_2"], ["h.0-2"]),
        ),
    ) == ["h.0 (from mul) … h.1: 0 → 1"]
    assert moved(
        old,
        with_runs(
            plan,
            (["emb", "add mul", "add_1 mul_1 gelu", "add_2"], ["emb", "h.0-2"]),
            (["mul_2"], ["h.2"]),
        ),
    ) == ["h.2 (add_2): 1 → 0"]
    assert moved(
        old,
        with_runs(
            plan,
            ([], []),
            (
                ["emb", "add mul", "add_1 mul_1", "gelu add_2 mul_2"],
                ["emb", "h.0-2"],
            ),
        ),
    ) == ["emb … h.1: 0 → 1"]


def test_nodes_outside_of_all_modules_have_their_own_names(plan: Plan) -> None:
    # Runs and modules are not equally many: those are known that a node is named after, and those
    # between them, of which there are as many as modules.
    runs = ["x", "h_0_norm add", "add_1", "h_2_norm", "mean"]
    old = with_runs(plan, (runs, ["h.0-2"]))
    new = with_runs(plan, ([], []), (runs, ["h.0-2"]))
    assert moved(old, new) == ["x … mean: 0 → 1"]
    for number, expected in enumerate(["x", "h.0", "h.1", "h.2", "mean"]):
        rest = [run for run in runs if run != runs[number]]
        one = with_runs(plan, (rest, ["h.0-2"]), ([runs[number]], [expected]))
        assert moved(old, one) == [f"{expected}: 0 → 1"]


def test_plans_of_different_models_are_compared_by_module(plan: Plan) -> None:
    old = with_runs(plan, (["a", "b"], ["h.0-1"]), (["c", "d"], ["h.2", "head"]))
    new = with_runs(plan, (["q", "r", "s"], ["h.0-2"]), (["t", "u"], ["h.2-3"]))
    assert moved_modules(old, new) == [
        StageMove("h.2", "h.2", (1,), (0, 1)),
        StageMove("head", "head", (1,), ()),
        StageMove("h.3", "h.3", (), (1,)),
    ]
    assert moved_modules(old, with_runs(plan, (["v"], ["other"]))) is None
