"""Errors: one line that says what to do; from Python an exception, from the command line an exit
code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from zoo import MODELS, example

from pipecompile import (
    CaptureError,
    FormatError,
    InfeasibleError,
    InputError,
    PipecompileError,
    Pipeline,
    pipecompile,
)
from pipecompile.api.target import load_target
from pipecompile.cli import commands
from pipecompile.ir.serialization import encode, write

SEQUENTIAL = f"{MODELS}:sequential"


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


def refused(result: Result, code: int) -> str:
    """The line that a refused command ends with; nothing is on standard output."""
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    *before, line = result.stderr.splitlines()
    assert all(text.startswith("self-check: ") for text in before), before
    assert line.startswith("pipecompile: ")
    return line.removeprefix("pipecompile: ")


def planned(output: Path, *arguments: str, target: str = SEQUENTIAL) -> Result:
    return invoke("plan", target, "--costs", "flops", "-o", str(output), *arguments)


def compiled(**options: Any) -> Pipeline:
    target = example("sequential")
    return pipecompile(
        target.model, target.call, loss_fn=target.loss_fn, **{"costs": "flops", **options}
    )


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Where a refused command must leave nothing, not even half a file."""
    return tmp_path / "out" / "plan.json"


@pytest.fixture(autouse=True)
def _nothing_half_written(output: Path) -> Any:
    output.parent.mkdir()
    yield
    assert list(output.parent.iterdir()) == []


REFUSALS: dict[str, tuple[type[PipecompileError], int, list[str], dict[str, Any], str]] = {
    "k too large": (
        InfeasibleError,
        1,
        ["-k", "99", "--microbatches", "4"],
        {"k": 99, "microbatches": 4},
        r"k=99, but the graph can be cut into at most 20 stages .*; choose k ≤ 20",
    ),
    "no stages": (
        InputError,
        2,
        ["-k", "0"],
        {"k": 0},
        r"k=0, but a pipeline has at least one stage",
    ),
    "not whole microbatches": (
        InputError,
        2,
        ["-k", "3", "--microbatches", "3"],
        {"k": 3, "microbatches": 3},
        r"a batch of 8 cannot be cut into 3 microbatches of one size; choose microbatches from 1, "
        r"2, 4, 8, leave it out, or choose another batch",
    ),
    "memory": (
        InfeasibleError,
        1,
        ["-k", "2", "--microbatches", "2", "--memory", "65KiB"],
        {"k": 2, "microbatches": 2, "memory": "65KiB"},
        r"may hold 65.0 KiB, but the best cut into k=2 stages that was found needs .*bytes\), "
        r".* more, in stage \d",
    ),
    "memory below what is fixed": (
        InfeasibleError,
        1,
        ["-k", "2", "--microbatches", "2", "--memory", "2KB"],
        {"k": 2, "microbatches": 2, "memory": "2KB"},
        r"rank 0 may hold 2.0 KiB, but the allocator and .* take 64.0 KiB there for any model; "
        r"allow more",
    ),
    "memory text": (InputError, 2, ["--memory", "lots"], {"memory": "lots"}, r"lots"),
    "memory beside a comma": (
        InputError,
        2,
        ["--memory", "1MB,"],
        {"memory": "1MB,"},
        r"'1MB,' lacks a size beside",
    ),
    "memory of other ranks": (
        InputError,
        2,
        ["--memory", "1GiB,2GiB"],
        {"memory": ["1GiB", 2 << 30]},
        r"memory lists 2 caps, but there are 4 ranks; give one for each, or one for all",
    ),
    "schedule": (
        InputError,
        2,
        ["--schedule", "fast"],
        {"schedule": "fast"},
        r"unknown schedule 'fast'; choose from gpipe",
    ),
    "objective": (
        InputError,
        2,
        ["--objective", "best"],
        {"objective": "best"},
        r"best.*variance.*max-load",
    ),
    "costs": (
        InputError,
        2,
        ["--costs", "guess"],
        {"costs": "guess"},
        r"unknown costs 'guess'; choose from flops",
    ),
    "recompute": (
        InputError,
        2,
        ["--recompute", "some"],
        {"recompute": "some"},
        r"unknown recompute 'some'; .* none, stage",
    ),
    "pin": (
        InputError,
        2,
        ["--pin", "nowhere=1", "--microbatches", "4"],
        {"microbatches": 4, "pin": {"nowhere": 1}},
        r"unknown node to pin 'nowhere'",
    ),
    "pin stage": (
        InputError,
        2,
        ["--pin", "_2=7", "--microbatches", "4"],
        {"microbatches": 4, "pin": {"_2": 7}},
        r"pin _2=7: the stages are 0 … 3",
    ),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("case", REFUSALS)
def test_options_that_cannot_be_met(case: str, output: Path) -> None:
    kind, code, arguments, options, message = REFUSALS[case]
    with pytest.raises(kind) as caught:
        compiled(**options)
    assert type(caught.value) is kind
    assert re.search(message, str(caught.value)), str(caught.value)
    assert re.search(message, refused(planned(output, *arguments), code))


def test_a_memory_cap_that_nobody_can_meet_says_by_how_much_and_which_node() -> None:
    with pytest.raises(InfeasibleError) as caught:
        compiled(k=2, microbatches=2, memory=66_000)
    match = re.search(
        r"needs .* \(([\d,]+) bytes\), .* more, in stage \d, where (\w+) is the largest",
        str(caught.value),
    )
    assert match is not None
    needed = int(match[1].replace(",", ""))
    more = needed - 66_000
    assert match[2] in compiled(k=2, microbatches=2).plan.assignment
    assert compiled(k=2, microbatches=2, memory=needed).plan.options.memory_bytes == needed
    # What is short is found by bisection, to a hundredth.
    with pytest.raises(InfeasibleError, match="more, in stage"):
        compiled(k=2, microbatches=2, memory=needed - max(1, more // 100))


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (0, "input has no samples; leave an empty batch out"),
        (9, "the batch holds 5 microbatches, but the plan was made for 4"),
    ],
)
def test_a_batch_of_no_or_too_many_samples(batch: int, message: str) -> None:
    pipeline = compiled(k=2, microbatches=4)
    with pytest.raises(InputError, match=message):
        pipeline.step(torch.randn(batch, 16), torch.zeros(batch, dtype=torch.long))
    assert pipeline.steps == 0


def test_another_shape_on_a_later_step() -> None:
    target = example("sequential")
    pipeline = pipecompile(
        target.model, target.call, 2, loss_fn=target.loss_fn, costs="flops", microbatches=2
    )
    pipeline.step(target.call, target.targets)
    before = [parameter.grad.clone() for parameter in pipeline.parameters()]
    with pytest.raises(
        InputError,
        match=r"the batch has input \(8, 15\), but the pipeline runs microbatches of input \(4, 1",
    ):
        pipeline.step(torch.randn(8, 15), target.targets)
    with pytest.raises(
        InputError, match=r"input is of type torch.float64, but the plan was made for torch.float32"
    ):
        pipeline.step(torch.randn(8, 16).double(), target.targets)
    with pytest.raises(
        InputError, match=r"the target is of shape \(7,\), but the batch has 8 samples"
    ):
        pipeline.step(target.call, torch.zeros(7, dtype=torch.long))
    assert all(torch.equal(p.grad, g) for p, g in zip(pipeline.parameters(), before, strict=True))
    assert pipeline.steps == 1


def test_another_call_on_a_later_step() -> None:
    pipeline = compiled(k=2)
    with pytest.raises(InputError, match=r"Sequential.forward cannot be called with these inputs"):
        pipeline.step((torch.randn(8, 16), torch.randn(8, 16)))
    with pytest.raises(InputError, match=r"another structure .* it lacks argument\[0\]"):
        pipeline.step({"input": torch.randn(8, 16)})


def test_a_model_without_a_loss() -> None:
    target = example("sequential")
    pipeline = pipecompile(target.model, target.call, 2, costs="flops", microbatches=2)
    with pytest.raises(
        InputError, match="the model has no `loss` output that is a scalar tensor; give loss_fn"
    ):
        pipeline.step(target.call)


def test_a_schedule_without_backwards_trains_nothing() -> None:
    target = example("sequential")
    pipeline = compiled(k=2, schedule="forward-only")
    assert pipeline.evaluate(target.call).shape == (8, 4)
    with pytest.raises(
        InputError, match=r"the plan's schedule is forward-only, which trains nothing; evaluate, or"
    ):
        pipeline.step(target.call, target.targets)


FACTORIES: dict[str, tuple[str, str]] = {
    "no colon": (
        "examples",
        r"'examples' is not a target; write package.module:factory or path/file.py:factory",
    ),
    "no module": (
        "no.such.place:model",
        r"no.such.place cannot be imported: there is no module .no.",
    ),
    "no file": ("nowhere.py:model", r"there is no file nowhere.py"),
    "no factory": (f"{MODELS}:gpt17", r"unknown factory 'gpt17'; did you mean 'gpt2'"),
    "broken file": ("broken.py:model", r"broken.py cannot be imported: SyntaxError"),
    "failing": ("made.py:failing", r"the factory failed: ZeroDivisionError"),
    "no mapping": (
        "made.py:number",
        r"must return \(model, sample_input\) or a mapping .* it returned a int",
    ),
    "no model": ("made.py:no_model", r"model is a str, but must be an nn.Module"),
    "unknown field": (
        "made.py:unknown",
        r"it returned a mapping with \['colour', 'model', 'sample_input'\]",
    ),
    "wrong input": (
        "made.py:wrong_input",
        r"Linear.forward cannot be called with these inputs",
    ),
}
MADE = """
import torch
from torch import nn
def failing(): return 1 / 0
def number(): return 3
def no_model(): return "model", torch.zeros(4, 4)
def unknown(): return {"model": nn.Linear(4, 4), "sample_input": torch.zeros(4, 4), "colour": "red"}
def wrong_input(): return nn.Linear(4, 4), {"image": torch.zeros(4, 4)}
class Branch(nn.Linear):
    def forward(self, x):
        if x.sum() > 0:
            return super().forward(x)
        return x
def branch(): return Branch(4, 4), torch.zeros(4, 4)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "made.py").write_text(MADE)
    (tmp_path / "broken.py").write_text("def model(:\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", FACTORIES)
def test_a_factory_that_does_not_work(case: str, output: Path, here: Path) -> None:
    target, message = FACTORIES[case]
    with pytest.raises(InputError) as caught:
        load_target(target)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert re.search(message, refused(planned(output, target=target), 2))


def test_a_model_that_branches_on_data(output: Path, here: Path) -> None:
    target = load_target("made.py:branch")
    message = (
        r"^Branch \(.*made.py:\d+\): the forward branches on the values of a tensor.*torch.where"
    )
    with pytest.raises(CaptureError, match=message):
        pipecompile(target.model, target.call, 1, costs="flops", microbatches=1)
    for command in (["plan", "made.py:branch", "-o", str(output)], ["verify", "made.py:branch"]):
        assert re.search(message, refused(invoke(*command, "-k", "1", "--costs", "flops"), 2))


# -- plan files


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    write(tmp_path / "plan.json", encode(compiled(k=2, microbatches=2).plan))
    return tmp_path / "plan.json"


def edited(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """The file after a change of its JSON."""

    def damage(data: bytes) -> bytes:
        tree = json.loads(data)
        change(tree)
        return json.dumps(tree).encode()

    return damage


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut off": (lambda data: data[: len(data) // 2], r"truncated"),
    "empty": (lambda data: b"", r"truncated"),
    "not text": (lambda data: b"\xff\xfe" + data, r"is not JSON, but a plan is expected"),
    "not JSON": (lambda data: b"{plan}", r"is not valid JSON"),
    "of another program": (
        lambda data: b'{"name": "web", "version": "1.0"}',
        r"is no file of pipecompile, but a plan is expected; name a plan",
    ),
    "without schema": (
        lambda data: b'{"k": 4, "plam": 1}',
        r"unknown field `plam`; correct it",
    ),
    "type": (
        edited(lambda tree: tree["stages"][1].update(forward_ns="fast")),
        r"\$\.stages\[1\]\.forward_ns",
    ),
    "range": (
        edited(lambda tree: tree["stages"][0].update(forward_ns=-1)),
        r">= 0.*\$\.stages\[0\]\.forward_ns",
    ),
    "missing": (
        edited(lambda tree: tree["search"].pop("bound")),
        r"missing required field `bound` - at `\$\.search`",
    ),
    "unknown": (
        edited(lambda tree: tree["options"].update(colour=1)),
        r"unknown field `colour` - at `\$\.options`",
    ),
    "version": (
        edited(lambda tree: tree.update(schema="pipecompile/plan/9")),
        r"is a plan of version 9 \(pipecompile/plan/9\)",
    ),
    "action": (
        edited(lambda tree: tree["schedule"]["actions"][0].append("0X1")),
        r"'0X1' is not an action.*\$\.sch",
    ),
    "stages": (edited(lambda tree: tree.update(k=3)), r"stages \(2\) and k \(3\) must be equal"),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_plan(case: str, plan_file: Path) -> None:
    damage, message = DAMAGES[case]
    plan_file.write_bytes(damage(plan_file.read_bytes()))
    target = example("sequential")
    with pytest.raises(FormatError) as caught:
        pipecompile(target.model, target.call, plan=plan_file, loss_fn=target.loss_fn)
    assert re.search(message, str(caught.value)), str(caught.value)
    for command in ("show", "check", "simulate"):
        line = refused(invoke(command, str(plan_file)), 2)
        assert line.startswith(f"{plan_file}: ")
        assert re.search(message, line), line


def test_a_plan_that_is_not_there(tmp_path: Path) -> None:
    missing = tmp_path / "nothing.json"
    with pytest.raises(
        FormatError, match=r"nothing.json: there is no such file; `pipecompile plan"
    ):
        compiled(plan=missing)
    assert "there is no such file" in refused(invoke("show", str(missing)), 2)


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    result = planned(tmp_path / "no" / "plan.json", "-k", "2", "--microbatches", "2")
    assert f"cannot be written, as the folder {tmp_path / 'no'} does not exist" in refused(
        result, 2
    )


def test_a_stale_plan(plan_file: Path) -> None:
    result = invoke("check", str(plan_file), f"{MODELS}:unet")
    assert result.exit_code == 1
    assert "the plan was made for" in result.output


def test_a_bad_pin_is_told_as_it_was_written(output: Path) -> None:
    assert (
        refused(planned(output, "--pin", "head"), 2)
        == "--pin head: write NODE=STAGE, for example lm_head=-1"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatch": 4}, "unknown option 'microbatch'; did you mean 'microbatches'?"),
        ({"leaf": "Linear"}, "leaf='Linear' is not a list of names"),
        (
            {"no_split": ["0"]},
            r"no_split=\['0'\] is not a list of lists; write no_split=\[\['0'\]\]",
        ),
        ({"stages_per_rank": "2"}, "stages_per_rank='2' must be a whole number"),
        ({"k": 2.0}, r"k=2\.0 must be a whole number"),
    ],
)
def test_choices_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(**options)


def test_a_committed_plan_takes_no_choices() -> None:
    plan = compiled(k=2, costs="flops", microbatches=2).plan
    with pytest.raises(
        InputError, match="a committed plan has its choices already; leave out schedule"
    ):
        compiled(plan=plan, schedule="gpipe")
