"""What is asked of a plan is checked before a model is captured, and before PyTorch is imported."""

from __future__ import annotations

import pydoc
from typing import Any

import pytest

import pipecompile
from pipecompile.api.choices import requested_options
from pipecompile.errors import InputError
from pipecompile.ir.options import OPTIONS


def test_help_lists_the_choices_and_no_methods_of_dict() -> None:
    text = pydoc.render_doc(pipecompile.Choices, renderer=pydoc.plaintext)
    for option in OPTIONS:
        assert (f"{option.name}  (default: {option.shown_default})" in text) == option.is_choice
        assert all(repr(name) in text for name in option.choices)
    assert "builtins.dict" not in text
    assert "popitem" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_choices_are_a_dict_of_known_names() -> None:
    choices = pipecompile.Choices(schedule="gpipe", ranks=2)
    assert choices == {"schedule": "gpipe", "ranks": 2}
    with pytest.raises(InputError, match=r"unknown option 'schedul'; did you mean 'schedule'\?"):
        pipecompile.Choices(schedul="gpipe")  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("choices", "k", "ranks"),
    [
        ({}, 4, 4),
        ({"k": 6}, 6, 6),
        ({"ranks": 2}, 2, 2),
        ({"ranks": 4, "schedule": "zb-v"}, 8, 4),
        ({"ranks": 4, "schedule": "interleaved-1f1b"}, 8, 4),
        ({"ranks": 3, "schedule": "interleaved-1f1b", "stages_per_rank": 3}, 9, 3),
        ({"ranks": 3, "k": 6, "schedule": "ZB-V"}, 6, 3),
        ({"ranks": 2, "schedule": "search", "stages_per_rank": 2}, 4, 2),
    ],
)
def test_ranks_stand_for_as_many_stages_as_the_schedule_has_on_them(
    choices: dict[str, Any], k: int, ranks: int
) -> None:
    from pipecompile.schedule.selection import placements

    options = requested_options(**choices)
    assert options.k == k
    assert {max(placement) + 1 for placement in placements(options)} == {ranks}


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {"k": 4, "ranks": 4, "schedule": "zb-v"},
        "k=4 and ranks=4 disagree: schedule 'zb-v' has 2 on each rank, which is k=8",
    ),
    ({"ranks": 0}, "ranks=0, but a pipeline has at least one rank"),
    ({"k": "4"}, "k='4' must be a whole number"),
    ({"k": True}, "k=True must be a whole number"),
    ({"noise": 1}, "noise=1 is not a share from 0 to 1; write 5% or 0.05"),
    ({"noise": True}, "noise=True is not a share"),
    ({"noise": "five"}, "'five' is not a share; write 5% or 0.05"),
    ({"noise": 0.05, "schedule": "forward-only"}, "noise is of training"),
    ({"microbatches": 0}, "microbatches=0, but a step has at least one microbatch"),
    ({"schedule": "1f1v"}, "unknown schedule '1f1v'; did you mean '1f1b'?"),
    ({"schedule": "pipedreem"}, "unknown schedule 'pipedreem'; did you mean 'pipedream'?"),
    ({"objective": "max_load"}, "unknown objective 'max_load'; did you mean 'max-load'?"),
    ({"recompute": "blocks"}, "unknown recompute 'blocks'; did you mean 'block'?"),
    ({"granularity": "operator"}, "unknown granularity 'operator'; did you mean 'operators'?"),
    ({"placement": "lop"}, "unknown placement 'lop'; did you mean 'loop'?"),
    ({"optimizer": "adamv"}, "unknown optimizer 'adamv'; did you mean 'adam"),
    ({"encodings": ["relo"]}, "unknown encoding 'relo'; did you mean 'relu'?"),
    ({"encodings": "relu"}, "encodings='relu' is not a list of names"),
    ({"no_split": 3}, "no_split=3 is not a list; write no_split=[…]"),
    ({"no_split": [0, 1]}, "no_split=0 is not a list"),
    ({"no_split": [[0]]}, "no_split=[0] is not a list of names; give texts"),
    ({"leaf": 1.5}, "leaf=1.5 is not a list"),
    ({"costs": "flop"}, "unknown costs 'flop'; did you mean 'flops'?"),
    ({"objective": "latency", "comm": "overlap"}, "latency is that of one alone"),
    ({"costs": "roofline:h99"}, "h99"),
    ({"memory": "much"}, "write 16GiB"),
    ({"shard": "grads"}, "unknown shard 'grads'; did you mean 'gradients'?"),
    ({"colour": "red"}, "unknown option 'colour'"),
    ({"pin": ["head"]}, "pin=['head'] must map names of nodes or modules to stages"),
    ({"pin": {"head": "1"}}, "pin={'head': '1'} must map names"),
    ({"replicas": 0}, "replicas=0, but there is at least one replica"),
    (
        {"shard": "optimizer"},
        "shard='optimizer' divides stages over replicas, but the plan is",
    ),
]


@pytest.mark.parametrize(("choices", "message"), REFUSALS)
def test_what_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        requested_options(**choices)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("choices", "communication"),
    [
        ({}, "relay"),
        ({"comm": "overlap"}, "overlap"),
        ({"objective": "throughput"}, "overlap"),
        ({"objective": "throughput", "comm": "relay"}, "relay"),
        ({"objective": "latency"}, "relay"),
    ],
)
def test_comm_says_what_loads_pay_for_transfers(
    choices: dict[str, Any], communication: str
) -> None:
    from pipecompile.ir.graph import CostGraph, Node
    from pipecompile.ir.links import FREE
    from pipecompile.planner.partition_problem import problem_of

    nodes = (
        Node(name=n, forward_ns=1, backward_ns=1, parameter_bytes=0, saved_bytes=0, group=None)
        for n in "ab"
    )
    graph = CostGraph(nodes=tuple(nodes), tensors=())
    options = requested_options(k=2, costs="flops", **choices)
    assert problem_of(graph, options, FREE).communication == communication
