"""The next-best cut against the list of all cuts, and what moves at the ends of a stage."""

from __future__ import annotations

from cuts import chain, cuts, letter_graph, problems, score
from hypothesis import assume, given

from pipecompile.partition.edge_moves import edge_parts, loads_after, next_best_pin
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.solver import solve


def _timed(problem: PartitionProblem, cut: dict[str, int]) -> dict[str, int]:
    """The stages of the nodes whose units take time."""
    units = (unit for unit in problem.units if problem.compute_ns(unit, last=True))
    return {name: cut[name] for unit in units for name in unit}


@given(problems())
def test_the_pin_gives_the_best_of_all_cuts_in_which_time_lies_elsewhere(
    problem: PartitionProblem,
) -> None:
    allowed = list(cuts(problem))
    assume(allowed)
    best = min(allowed, key=lambda cut: score(problem, cut))
    others = [cut for cut in allowed if _timed(problem, cut) != _timed(problem, best)]
    pin = next_best_pin(problem, best, seconds=1.0, may_go_on=lambda: True)
    if not others:
        assert pin is None
        return
    assert pin is not None
    node, stage = pin
    assert best[node] != stage
    with_pin = [score(problem, cut)[0] for cut in allowed if cut[node] == stage]
    assert min(with_pin) == min(score(problem, cut)[0] for cut in others)


def test_the_next_best_cut_of_a_chain() -> None:
    # 5 + 5 | 5 + 4 is best; the other cuts are 5 | 14 and 15 | 4.
    problem = PartitionProblem(chain([5, 5, 5, 4]), 2)
    best = solve(problem).assignment
    assert next_best_pin(problem, best, seconds=1.0, may_go_on=lambda: True) == ("n1", 1)
    assert next_best_pin(problem, best, seconds=1.0, may_go_on=lambda: False) is None


def test_nodes_without_time_make_no_other_cut() -> None:
    # n1 may lie in either stage; n0 and n2 may not.
    problem = PartitionProblem(chain([5, 0, 5]), 2)
    best = solve(problem).assignment
    assert next_best_pin(problem, best, seconds=1.0, may_go_on=lambda: True) is None


def test_a_pin_of_the_problem_is_kept() -> None:
    problem = PartitionProblem(chain([5, 5, 5, 5]), 2, pin={"n1": 0})
    best = solve(problem).assignment
    # 10 | 10 is best; 5 | 15 is as good as 15 | 5, but not allowed.
    assert next_best_pin(problem, best, seconds=1.0, may_go_on=lambda: True) == ("n2", 0)


def test_the_ends_of_a_stage_are_as_short_as_takes_time() -> None:
    problem = PartitionProblem(chain([2, 0, 3, 4, 0, 5]), 3)
    cut = {"n0": 0, "n1": 1, "n2": 1, "n3": 1, "n4": 1, "n5": 2}
    first, last = edge_parts(problem, cut, 1)
    assert (first.units, first.after) == ((("n1",), ("n2",)), 0)
    assert (last.units, last.after) == ((("n4",), ("n3",)), 2)
    assert loads_after(problem, cut, first).loads_ns == (5, 4, 5)
    assert loads_after(problem, cut, last).loads_ns == (2, 3, 9)
    # What is alone with nodes that take no time cannot leave its stage.
    assert [part.after for part in edge_parts(problem, cut, 0)] == []


def test_a_move_that_is_not_allowed_has_an_obstacle() -> None:
    graph = letter_graph("abcd", "ab bc cd")
    problem = PartitionProblem(graph, 2, pin={"b": 0})
    cut = {"a": 0, "b": 0, "c": 1, "d": 1}
    (last,) = edge_parts(problem, cut, 0)
    assert "b is pinned to stage 0" in loads_after(problem, cut, last).obstacle
    (first,) = edge_parts(problem, cut, 1)
    assert loads_after(problem, cut, first).obstacle == ""
