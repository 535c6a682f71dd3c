from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipecompile.errors import FormatError
from pipecompile.ir.amount import Amount
from pipecompile.ir.footprint import AMOUNT_FIELDS, Footprint
from pipecompile.ir.links import FREE, Link
from pipecompile.ir.plan import (
    Fingerprint,
    Options,
    Plan,
    Prediction,
    Provenance,
    Search,
)
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.schedule import Idle, Schedule
from pipecompile.ir.serialization import decode, encode
from pipecompile.ir.stage import Boundary, Stage

EMPTY_FOOTPRINT = Amount(expected=0, bound=0)
EDGE = Boundary(name="a", bytes=4, gradient_bytes=4)


def _stage(node: str, inputs: tuple[Boundary, ...], outputs: tuple[Boundary, ...]) -> Stage:
    return Stage(
        blocks=((node,),),
        modules=(node,),
        groups=(),
        forward_ns=1,
        backward_ns=2,
        backward_input_ns=None,
        backward_weight_ns=None,
        recompute_ns=0,
        inputs=inputs,
        outputs=outputs,
        recompute="none",
        footprint=Footprint(**dict.fromkeys(AMOUNT_FIELDS, EMPTY_FOOTPRINT)),
    )


def _plan(**changes: Any) -> Plan:
    """Two stages of one node each; `changes` replace fields."""
    plan = {
        "fingerprint": Fingerprint(graph="g", costs="c"),
        "options": Options(
            k=2,
            microbatches=1,
            schedule="gpipe",
            objective="variance",
            recompute="none",
            memory_bytes=None,
            costs="flops",
        ),
        "capture": Provenance(verified=True),
        "k": 2,
        "ranks": 2,
        "stages_per_rank": 1,
        "replicas": 1,
        "microbatches": 1,
        "microbatch_shapes": ((2, 3),),
        "links": FREE,
        "allocator": "cpu",
        "stages": (_stage("a", (), (EDGE,)), _stage("b", (EDGE,), ())),
        "routes": (),
        "parameters": (),
        "schedule": Schedule(
            name="gpipe", microbatches=1, placement=(0, 1), actions=(("0F0",), ("1F0",))
        ),
        "prediction": Prediction(
            step_ns=6,
            span_ns=6,
            bubble=0.5,
            loads_ns=(3, 3),
            idle=(Idle(dependency_ns=3, transfer_ns=0),) * 2,
            memory=(RankMemory(**dict.fromkeys(RankMemory.__struct_fields__, EMPTY_FOOTPRINT)),)
            * 2,
        ),
        "search": Search(
            objective="variance",
            method="linear-dp",
            value=18,
            bound=18,
            gap=0.0,
            proven=True,
            values={"max_load_ns": 3},
        ),
    }
    return Plan(**{**plan, **changes})


def test_a_plan_is_read_as_it_was_written_and_has_one_form() -> None:
    plan = _plan()
    data = encode(plan)
    assert decode(data, Plan, origin="plan.json") == plan
    assert encode(decode(data, Plan, origin="plan.json")) == data
    begin = b'{\n "schema": "pipecompile/plan/1",\n "allocator": "cpu",\n "capture": {"'
    assert data.startswith(begin)


def test_a_plan_is_saved_and_loaded_as_the_commands_do_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan = _plan()
    plan.save(path)
    assert path.read_bytes() == encode(plan)
    assert Plan.load(str(path)) == plan
    path.write_text('{"schema": "pipecompile/links/1"}')
    with pytest.raises(FormatError, match=r"plan\.json: is a links file"):
        Plan.load(path)


def test_a_plan_knows_the_stage_of_each_node_and_what_a_rank_holds() -> None:
    plan = _plan()
    assert plan.assignment == {"a": 0, "b": 1}
    assert list(plan.footprints(1)) == [1]


def test_a_copied_node_is_in_its_first_stage_and_runs_in_others() -> None:
    first, second = _plan().stages
    copying = msgspec.structs.replace(second, blocks=(("a", "b"),), copies=("a",))
    plan = _plan(stages=(first, copying))
    assert plan.assignment == {"a": 0, "b": 1}
    assert plan.copied == {"a"}
    assert copying.own_nodes == ("b",)
    unknown = msgspec.structs.replace(second, blocks=(("c", "b"),), copies=("c",))
    with pytest.raises(ValueError, match="stage 1 copies c, which no earlier stage runs"):
        _plan(stages=(first, unknown))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 3}, r"stages \(2\) and k \(3\) must be equal"),
        ({"ranks": 1}, r"ranks of the schedule \(2\) and ranks \(1\) must be equal"),
        (
            {"microbatches": 2},
            r"microbatches of the schedule \(1\) and microbatches \(2\) must be equal",
        ),
        ({"stages_per_rank": 2}, r"ranks × stages per rank \(4\) and k \(2\) must be equal"),
        ({"stages": (_stage("a", (), (EDGE,)), _stage("a", (EDGE,), ()))}, r"distinct nodes \(1\)"),
        (
            {"stages": (_stage("a", (), ()), _stage("b", (EDGE,), ()))},
            "a stage's outputs are not the next one's inputs",
        ),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _plan(**changes)


def test_a_damaged_plan_is_answered_with_the_place() -> None:
    document = msgspec.json.decode(encode(_plan()))
    document["stages"][1]["footprint"]["activations"][1] = -1
    with pytest.raises(
        FormatError, match=r"^plan\.json: .*`\$\.stages\[1\]\.footprint\.activations\[1\]`"
    ):
        decode(encode(document), Plan, origin="plan.json")


def test_a_contradiction_in_a_file_is_answered_with_the_file() -> None:
    with pytest.raises(FormatError, match=r"^plan\.json: stages \(2\) and k \(3\) must be equal"):
        decode(encode(_plan()).replace(b'\n "k": 2', b'\n "k": 3'), Plan, origin="plan.json")


def test_a_transfer_takes_its_bytes_over_the_bandwidth_rounded_up_plus_the_latency() -> None:
    link = Link(bandwidth_bytes_per_s=3 * 10**9, latency_ns=5)
    assert [link.transfer_ns(size) for size in (0, 1, 3, 4)] == [0, 6, 6, 7]
    assert [Link(latency_ns=5).transfer_ns(size) for size in (0, 1)] == [0, 5]


@given(st.integers(1, 10**15), st.integers(1, 10**12))
def test_a_transfer_is_exact(size: int, bandwidth: int) -> None:
    time = Link(bandwidth_bytes_per_s=bandwidth).transfer_ns(size)
    assert (time - 1) * bandwidth < size * 10**9 <= time * bandwidth
