"""The commands: what they print, write and answer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from zoo import MODELS, ROOT

from pipecompile.cli import commands
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import decode, encode, read
from pipecompile.ir.size import size_text

UNET = f"{MODELS}:unet"
FORMATS = ("text", "json", "github")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(commands, list(arguments))


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A plan of the U-Net in four stages."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    result = invoke(
        "plan", UNET, "-k", "4", "--microbatches", "4", "--costs", "flops", "-o", str(path)
    )
    assert result.exit_code == 0, result.output
    return str(path)


def fresh(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command in an interpreter of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "3"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.sweep
def test_a_second_plan_is_the_same_bytes_in_another_process(plan_file: str, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    result = fresh(
        "-m",
        "pipecompile",
        "plan",
        UNET,
        "-k",
        "4",
        "--microbatches",
        "4",
        "--costs",
        "flops",
        "-o",
        str(again),
    )
    assert result.returncode == 0, result.stderr
    assert again.read_bytes() == Path(plan_file).read_bytes()


def test_a_plan_says_nothing_of_the_machine_or_the_time(plan_file: str) -> None:
    text = Path(plan_file).read_text()
    assert str(ROOT) not in text
    assert read(plan_file, Plan).schema == "pipecompile/plan/1"
    assert decode(text.encode(), Plan, origin="test") == read(plan_file, Plan)
    assert encode(read(plan_file, Plan)) == text.encode()


def test_plan_prints_the_plan_and_tells_beside_it_what_made_it(tmp_path: Path) -> None:
    target = f"{MODELS}:sequential"
    result = invoke(
        "plan", target, "-k", "2", "--microbatches", "2", "--costs", "flops", "--format", "json"
    )
    assert result.exit_code == 0
    made = decode(result.stdout.encode(), Plan, origin="stdout")
    assert (made.k, made.capture.verified) == (2, True)
    assert "self-check: the graph is the model, bit for bit, at batches of 4 and 2" in result.stderr
    assert "\nmade with pipecompile " in result.stderr


def test_options_reach_the_plan() -> None:
    result = invoke(
        *("plan", f"{MODELS}:sequential", "-k", "3", "--microbatches", "8", "--schedule", "gpipe"),
        *(
            "--objective",
            "max-load",
            "--memory",
            "1GiB,2GiB,1GB",
            "--recompute",
            "stage",
            "--costs",
            "flops",
        ),
        *("--pin", "_4=-1", "--no-split", "1,2", "--format", "json"),
    )
    assert result.exit_code == 0, result.output
    made = decode(result.stdout.encode(), Plan, origin="stdout")
    options = made.options
    assert (options.k, options.microbatches, options.schedule, options.objective) == (
        3,
        8,
        "gpipe",
        "max-load",
    )
    assert (options.memory_bytes, options.recompute, options.costs) == (
        (1 << 30, 1 << 31, 10**9),
        "stage",
        "flops",
    )
    assert (options.pin, options.groups) == ({"_4": -1}, (("1", "2"),))
    assert made.assignment["_4"] == 2
    assert made.assignment["_1"] == made.assignment["_2"]


@pytest.mark.parametrize("form", FORMATS)
def test_show(plan_file: str, form: str) -> None:
    result = invoke("show", plan_file, "--format", form)
    assert result.exit_code == 0
    assert result.stderr == ""
    if form == "json":
        assert result.stdout.encode() == Path(plan_file).read_bytes()
    else:
        assert result.stdout.startswith("```\n") == (form == "github")
        assert "4 stages" in result.stdout
        assert "bubble" in result.stdout


def test_view(plan_file: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert read(plan_file, Plan).capture.target == "models.py:unet"
    result = invoke("view", plan_file, "-o", str(page))
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"wrote {page}: open it in a browser\n"
    assert (
        page.read_text().startswith("<!DOCTYPE html>")
        and "<h1>models.py:unet: UNet</h1>" in page.read_text()
        and "1f1b: 4 stages on 4 ranks" in page.read_text()
    )
    assert invoke("view", plan_file, "-o", str(tmp_path / "nowhere" / "plan.html")).exit_code == 2


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("form", FORMATS)
def test_check_of_a_sound_plan(plan_file: str, form: str) -> None:
    result = invoke("check", plan_file, UNET, "--format", form)
    ticked = f"✓ sound: schedule, stages and prediction agree\n✓ current: {UNET} gives this plan\n"
    assert result.exit_code == 0, result.output
    if form == "json":
        answer = json.loads(result.stdout)
        assert (answer["plan"], answer["sound"], answer["findings"]) == (plan_file, True, [])
        assert [check["code"] for check in answer["checks"]] == ["schedule", "stale"]
    elif form == "github":
        # The workflow of docs/how-to/ci.md adds standard output to the page of the run.
        title = f"### {plan_file}: all 2 checks passed"
        assert result.stdout == f"{title}\n\n```\n{ticked}```\n"
        assert result.stderr.endswith(f"::notice file={plan_file}::all 2 checks passed\n")
    else:
        assert result.stdout == ticked


@pytest.mark.parametrize("form", FORMATS)
def test_check_of_a_plan_over_its_limits(plan_file: str, form: str) -> None:
    limits = ("--max-imbalance", "1.0", "--max-bubble", "0.01", "--max-memory", "1KB")
    result = invoke("check", plan_file, *limits, "--format", form)
    assert result.exit_code == 1
    if form == "json":
        answer = json.loads(result.stdout)
        assert not answer["sound"]
        assert len(answer["findings"]) == 6
        assert len(answer["checks"]) == 7
        imbalance, _, first, *_ = answer["findings"]
        assert (imbalance["code"], imbalance["rank"], imbalance["limit"]) == ("imbalance", None, 1)
        assert imbalance["value"] > 1
        assert (first["code"], first["rank"], first["limit"]) == ("memory", 0, 1000)
        assert first["value"] == read(plan_file, Plan).prediction.memory[0].total.bound
    else:
        lines = result.stdout.splitlines()
        if form == "github":
            # Annotations lie on the other stream: standard output is redirected.
            annotations = result.stderr.splitlines()
            assert len(annotations) == 6
            assert all(line.startswith(f"::error file={plan_file}::") for line in annotations)
            title, empty, fence, *lines, end = lines
            assert title == f"### {plan_file}: 6 of 7 checks failed"
            assert (empty, fence, end) == ("", "```", "```")
            # A percent sign is escaped, as GitHub asks.
            escaped = lines[2].removeprefix("✗ ").replace("%", "%25")
            assert annotations[1].endswith(escaped)
        marks = ("✓ sound", *("✗ ",) * 6)
        assert [line.startswith(mark) for line, mark in zip(lines, marks, strict=True)] == [
            True
        ] * len(marks)
        assert any("imbalance" in line for line in lines)
        assert any("bubble" in line for line in lines)
        assert any("rank 3 may need" in line for line in lines)


def test_check_holds_each_rank_to_its_cap_and_the_plan_to_its_policy(plan_file: str) -> None:
    needed = [rank.total.bound for rank in read(plan_file, Plan).prediction.memory]
    caps = ",".join(map(str, needed))
    assert invoke("check", plan_file, "--memory", caps, "--recompute", "none").exit_code == 0
    short = ",".join(map(str, [*needed[:2], needed[2] - 1, needed[3]]))
    result = invoke("check", plan_file, "--memory", short, "--recompute", "auto")
    assert result.exit_code == 1
    sizes = [size_text(size) for size in needed]
    within = [f"✓ rank {r} may need {s}, within its cap of {s}" for r, s in enumerate(sizes)]
    assert result.stdout.splitlines() == [
        "✓ sound: schedule, stages and prediction agree",
        *within[:2],
        f"✗ rank 2 may need {sizes[2]}, 1 B over its cap of {size_text(needed[2] - 1)}; "
        "plan again for that cap",
        within[3],
        "✗ recompute is 'none' in the plan, not 'auto'; plan again",
    ]
    wrong = invoke("check", plan_file, "--memory", "1GiB,1GiB")
    assert wrong.exit_code == 2
    assert (
        "memory lists 2 caps, but there are 4 ranks; give one for each, or one for all"
        in wrong.stderr
    )


def test_check_limits_what_stages_relay(plan_file: str) -> None:
    plan = read(plan_file, Plan)
    sizes = {
        tensor.name: tensor.bytes + tensor.gradient_bytes
        for stage in plan.stages
        for tensor in stage.outputs
    }
    # A route of n stages has a producer, a last reader, and n − 2 between them.
    relayed = sum(sizes[route.name] * (len(route.stages) - 2) for route in plan.routes)
    assert relayed > 0
    assert invoke("check", plan_file, "--max-relayed", str(relayed)).exit_code == 0
    result = invoke("check", plan_file, "--max-relayed", str(relayed - 1), "--format", "json")
    assert result.exit_code == 1
    (over,) = json.loads(result.stdout)["findings"]
    assert (over["code"], over["value"], over["limit"]) == ("relayed", relayed, relayed - 1)


def test_check_finds_an_edited_plan(plan_file: str, tmp_path: Path) -> None:
    tree = json.loads(Path(plan_file).read_text())
    tree["prediction"]["step_ns"] += 1
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    result = invoke("check", str(tmp_path / "plan.json"))
    assert result.exit_code == 1
    assert "the file was edited; plan again" in result.stdout


def test_check_finds_a_deadlock(plan_file: str, tmp_path: Path) -> None:
    tree = json.loads(Path(plan_file).read_text())
    tree["schedule"]["actions"][1].reverse()
    (tmp_path / "plan.json").write_text(json.dumps(tree))
    result = invoke("check", str(tmp_path / "plan.json"))
    assert result.exit_code == 1
    assert result.stdout.startswith("✗ ")


@pytest.mark.parametrize("form", FORMATS)
def test_simulate(plan_file: str, form: str, tmp_path: Path) -> None:
    trace, svg = tmp_path / "trace.json", tmp_path / "timeline.svg"
    result = invoke(
        "simulate", plan_file, "--trace", str(trace), "--svg", str(svg), "--format", form
    )
    assert result.exit_code == 0
    made = read(plan_file, Plan)
    if form == "json":
        found = json.loads(result.stdout)
        assert found["makespan_ns"] == made.prediction.step_ns
        assert found["bubble"] == made.prediction.bubble
        assert len(found["idle"]) == 4
        assert len(found["memory"]) == 4
        curves = found["activation_bounds"]
        assert all(
            curve[-1][1] == 0 and curve == sorted(curve, key=lambda point: point[0])
            for curve in curves
        )
        assert found["critical_path"][-1][3] == found["makespan_ns"]
    else:
        assert result.stdout.startswith("```\nstep " if form == "github" else "step ")
    assert json.loads(trace.read_text())
    assert svg.read_text().startswith("<svg")


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("form", FORMATS)
def test_verify(form: str) -> None:
    target = f"{MODELS}:sequential"
    result = invoke(
        "verify", target, "-k", "3", "--microbatches", "4", "--costs", "flops", "--format", form
    )
    assert result.exit_code == 0, result.output
    if form == "json":
        found = json.loads(result.stdout)
        assert found["passed"]
        assert all(
            c["bit_equal"] == c["tensors"] and c["loss"] == c["loss_unsplit"]
            for c in found["comparisons"]
        )
    else:
        assert "equal bit for bit" in result.stdout
        assert result.stdout.rstrip().endswith("equal\n```" if form == "github" else "equal")


def test_half_precision_is_named_where_plans_and_verdicts_are_shown() -> None:
    options = (
        f"{MODELS}:sequential",
        "-k",
        "1",
        "--microbatches",
        "4",
        "--costs",
        "flops",
        "--no-self-check",
    )
    plain = decode(
        invoke("plan", *options, "--format", "json").stdout.encode(), Plan, origin="stdout"
    )
    cap = str(plain.prediction.memory[0].total.bound * 99 // 100)
    result = invoke("verify", *options, "--memory", cap, "--encodings", "half,mask")
    assert result.exit_code == 0, result.output
    assert "relative (saved in half precision)" in result.stdout
    assert "not exact, as saved in half precision: gradients differ by" in result.stdout
    shown = invoke("plan", *options, "--memory", cap, "--encodings", "half,mask")
    assert re.search("^  encodings  .*half, not exact$", shown.stdout, re.MULTILINE)


def imported(*arguments: str) -> list[str]:
    """Which of the large libraries a command has imported when it is done."""
    code = (
        "import sys\nfrom pipecompile.cli import commands\n"
        "try:\n    commands([*sys.argv[1:]])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print(*sorted({'torch', 'ortools', 'transformers'} & set(sys.modules)), file=sys.stderr)"
    )
    result = fresh("-c", code, *arguments)
    assert result.returncode == 0, result.stderr
    assert result.stdout or "-o" in arguments
    return result.stderr.splitlines()[-1].split()  # the log comes before


@pytest.mark.parametrize("command", ["show", "check", "diff", "simulate", "view", "export"])
def test_reading_a_plan_needs_no_torch(plan_file: str, command: str, tmp_path: Path) -> None:
    output = ["-o", str(tmp_path / "output")]
    more = {"view": output, "diff": [plan_file], "export": [*output, "--to", "json"]}
    assert imported(command, plan_file, *more.get(command, [])) == []


def linked(bandwidth: int | None) -> str:
    """A file of links between two ranks."""
    rows = [[None, bandwidth], [bandwidth, None]]
    return json.dumps(
        {
            "schema": "pipecompile/links/1",
            "bandwidth_bytes_per_s": rows,
            "latency_ns": [[0, 50], [50, 0]],
        }
    )


@pytest.fixture
def graph_file(tmp_path: Path) -> str:
    """A cost graph of eight nodes in a chain, and a file of links beside it."""
    names = [f"n{index}" for index in range(8)]
    nodes = [
        {
            "name": name,
            "forward_ns": 100 + 7 * index,
            "backward_ns": 200,
            "parameter_bytes": 100,
            "saved_bytes": 10,
        }
        for index, name in enumerate(names)
    ]
    tensors = [
        {"producer": a, "consumers": [b], "bytes": 1000, "gradient_bytes": 1000}
        for a, b in pairwise(names)
    ]
    graph = {
        "schema": "pipecompile/cost-graph/1",
        "nodes": [{**node, "group": None} for node in nodes],
    }
    (tmp_path / "links.json").write_text(linked(10**9))
    (tmp_path / "graph.json").write_text(json.dumps({**graph, "tensors": tensors}))
    return str(tmp_path / "graph.json")


@pytest.mark.parametrize("form", FORMATS)
def test_partition(graph_file: str, form: str) -> None:
    result = invoke("partition", graph_file, "-k", "3", "--format", form)
    assert (result.exit_code, result.stderr) == (0, "")
    if form == "json":
        found = json.loads(result.stdout)
        # loads of 3, 3 and 2 nodes; times of node i are 300 + 7 i
        assert found["stages"] == dict(
            zip([f"n{i}" for i in range(8)], [0, 0, 0, 1, 1, 1, 2, 2], strict=True)
        )
        assert found["loads_with_transfers_ns"] == [921, 984, 691]
        assert (
            found["value"]
            == found["bound"]
            == found["sum_of_squares_ns2"]
            == 921**2 + 984**2 + 691**2
        )
        assert (found["max_load_ns"], found["gap"], found["proven"]) == (984, 0.0, True)
        assert found["variance_ns2"] == (3 * found["value"] - 2596**2) // 9
    else:
        assert result.stdout.startswith("```\n") == (form == "github")
        assert "3 stages of 8 nodes on 3 ranks" in result.stdout
        assert "proven" in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_fields_of_a_partition(graph_file: str) -> None:
    result = invoke("partition", graph_file, "-k", "2", "--format", "json")
    assert set(json.loads(result.stdout)) == {
        *(
            "stages",
            "loads_with_transfers_ns",
            "max_load_ns",
            "sum_of_squares_ns2",
            "variance_ns2",
            "objective",
            "value",
            "bound",
        ),
        *("gap", "proven", "method", "seconds", "replicas", "time_unit"),
    }


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    "arguments",
    [
        ["-k", "3"],
        [
            "-k",
            "4",
            "--objective",
            "max-load",
            "--comm",
            "relay",
            "--bandwidth",
            "1e9",
            "--latency",
            "20",
        ],
        ["-k", "2", "--comm", "relay", "--links", "links.json", "--speeds", "1,1/2"],
        [
            "-k",
            "3",
            "--objective",
            "step-time",
            "--schedule",
            "1f1b",
            "--microbatches",
            "4",
            "--memory",
            "1KiB",
        ],
        ["-k", "4", "--stages-per-rank", "2", "--placement", "v"],
        ["-k", "3", "--ranks", "5", "--bandwidth", "1e9"],
        ["-k", "3", "--time-limit", "0.001", "--no-split", "n2,n4", "--pin", "n7=-1"],
    ],
)
def test_the_same_graph_is_cut_in_the_same_way(graph_file: str, arguments: list[str]) -> None:
    with_path = [
        str(Path(graph_file).parent / word) if word.endswith(".json") else word
        for word in arguments
    ]

    def cut() -> dict[str, object]:
        result = fresh("-m", "pipecompile", "partition", graph_file, *with_path, "--format", "json")
        assert result.returncode == 0, result.stderr
        return {
            name: value for name, value in json.loads(result.stdout).items() if name != "seconds"
        }

    assert cut() == cut()


def test_options_reach_the_partition(graph_file: str) -> None:
    def cut(*arguments: str) -> dict[str, Any]:
        result = invoke("partition", graph_file, *arguments, "--format", "json")
        assert result.exit_code == 0, result.output
        found: dict[str, Any] = json.loads(result.stdout)
        return found

    free = cut("-k", "2")["loads_with_transfers_ns"]
    # each stage pays 1000 bytes and as many of gradient at 1 ns each, and twice the latency
    assert cut("-k", "2", "--bandwidth", "1e9", "--latency", "50")["loads_with_transfers_ns"] == [
        load + 2100 for load in free
    ]
    links = str(Path(graph_file).parent / "links.json")
    assert cut("-k", "2", "--links", links, "--comm", "relay")["loads_with_transfers_ns"] == [
        load + 2100 for load in free
    ]
    assert cut("-k", "2", "--bandwidth", "1e9", "--comm", "overlap")["loads_with_transfers_ns"] == [
        2000,
        2000,
    ]
    assert cut("-k", "2", "--bandwidth", "1e9", "--comm", "none")["loads_with_transfers_ns"] == free
    assert cut("-k", "2", "--pin", "n1=-1")["stages"]["n1"] == 1
    assert (
        len(set(map(cut("-k", "2", "--no-split", "n0,n5")["stages"].get, ("n0", "n3", "n5")))) == 1
    )
    assert sum(cut("-k", "2", "--ranks", "5")["replicas"]) <= 5
    assert len(cut("-k", "4", "--stages-per-rank", "2")["loads_with_transfers_ns"]) == 2
    assert cut("-k", "2", "--speeds", "1/2,1")["stages"]["n3"] == 1
    # in flight two microbatches in stage 0 and one in stage 1: 3 · 120 ≤ 360, 5 · 110 ≤ 550
    memory = ("--memory", "360,550", "--schedule", "1f1b", "--microbatches", "4")
    assert sum(cut("-k", "2", *memory)["stages"].values()) == 5


@pytest.mark.parametrize("form", FORMATS)
def test_a_partition_that_does_not_fit_is_answered_with_what_would(
    graph_file: str, form: str
) -> None:
    result = invoke("partition", graph_file, "-k", "2", "--memory", "400", "--format", form)
    assert (result.exit_code, result.stdout) == (1, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("pipecompile: a rank may hold 400 B, but ")
    assert "needs 440 B, 40 B more, in stage 0, where n0 is the largest node (110 B alone)" in line
    assert line.endswith("this would fit: k=3 or k=4")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-k", "2", "--objective", "fastest"], 2, "choose from variance, max-load, step-time"),
        (["-k", "2", "--comm", "smoke"], 2, "relay, endpoint, overlap, none"),
        (["-k", "2", "--speeds", "1,1,1"], 2, "one value, or one for each of the 2 ranks"),
        (["-k", "2", "--speeds", "1,fast"], 2, "'fast' is not a number; write 1, 0.5 or 3/2"),
        (["-k", "2", "--speeds", "1,0"], 2, "must be 2 positive numbers, one a rank"),
        (
            ["-k", "2", "--links", "links.json", "--bandwidth", "1e9"],
            2,
            "leave --bandwidth and --latency out",
        ),
        (["-k", "2", "--links", "nothing.json"], 2, "there is no such file"),
        (
            ["-k", "3", "--links", "links.json", "--comm", "relay"],
            2,
            "the links are for 2 ranks, but there are 3",
        ),
        (["-k", "2", "--bandwidth", "0"], 2, "at least 1, or leave it out"),
        (["-k", "2", "--latency", "-1"], 2, "give nanoseconds, 0 or more"),
        (["-k", "2", "--memory", "much"], 2, "write 16GiB"),
        (["-k", "2", "--memory", "1KB", "--state-factor", "x"], 2, "'x' is not a number"),
        (["-k", "2", "--schedule", "1f1b"], 2, "--schedule and --microbatches go together"),
        (["-k", "2", "--microbatches", "4"], 2, "--schedule and --microbatches go together"),
        (["-k", "2", "--objective", "step-time"], 2, "needs a schedule to simulate"),
        (["-k", "4", "--stages-per-rank", "3"], 2, "choose a divisor of k"),
        (["-k", "2", "--ranks", "1"], 2, "fewer than the k=2 stages"),
        (["-k", "2", "--pin", "nobody=1"], 2, "unknown node to pin 'nobody'"),
        (["-k", "2", "--pin", "n0"], 2, "write NODE=STAGE"),
        (["-k", "2", "--pin", "n0=2"], 2, "the stages are 0 … 1"),
        (["-k", "2", "--pin", "n0=1"], 1, "no cut into k=2 non-empty stages meets the pins n0=1"),
        (["-k", "2", "--pin", "n7=0", "--pin", "n0=1"], 1, "but n7 comes after n0"),
        (
            ["-k", "2", "--no-split", "nobody"],
            2,
            "unknown node to keep together with others 'nobody'",
        ),
        (["-k", "0"], 2, "k=0"),
        (["-k", "-1"], 2, "k=-1"),
        (["-k", "9"], 1, "at most 8 stages; choose k ≤ 8"),
        (["-k", "2", "--time-limit", "0"], 2, "give a positive number"),
    ],
)
def test_what_cannot_be_cut_is_answered_in_one_line(
    graph_file: str, arguments: list[str], code: int, message: str
) -> None:
    with_path = [
        str(Path(graph_file).parent / word) if word.endswith(".json") else word
        for word in arguments
    ]
    result = invoke("partition", graph_file, *with_path)
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("pipecompile: ")
    assert message in line
    assert "PIPECOMPILE_DEBUG" not in line


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (None, "there is no such file; `pipecompile profile TARGET -o FILE` writes a"),
        ("{", "truncated"),
        ('{"schema": "pipecompile/cost-graph/2"}', "is a cost graph of version 2"),
        ('{"nodes": [], "tensors": [], "edges": []}', "unknown field `edges`"),
        ('{"nodes": [{"name": "a", "forward_ns": -1}], "tensors": []}', "`$.nodes[0].forward_ns`"),
    ],
)
@pytest.mark.parametrize("number", [("-k", "2"), ()])
def test_a_damaged_cost_graph_is_answered_with_the_place(
    tmp_path: Path, graph: str | None, message: str, number: tuple[str, ...]
) -> None:
    path = tmp_path / "graph.json"
    if graph is not None:
        path.write_text(graph)
    result = invoke("partition", str(path), *number)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"pipecompile: {path}: ")
    assert message in line


@pytest.mark.parametrize("form", FORMATS)
def test_a_partition_needs_no_torch(graph_file: str, form: str) -> None:
    assert "torch" not in imported("partition", graph_file, "-k", "3", "--format", form)


def schedule_problem(**more: Any) -> str:
    """Two stages on each of two ranks, round and round, and four microbatches."""
    costs = {
        "backward_input_ns": 10,
        "backward_weight_ns": 8,
        "activation_bytes": 4,
        "weight_gradient_bytes": 2,
    }
    stages = [
        {**costs, "rank": rank, "forward_ns": 10 + 3 * index}
        for index, rank in enumerate([0, 1, 0, 1])
    ]
    fields = {
        "ranks": 2,
        "microbatches": 4,
        "transfer_ns": 1,
        "memory_bytes": None,
        "split_backward": True,
        **more,
    }
    return json.dumps({"schema": "pipecompile/schedule-problem/1", "stages": stages, **fields})


@pytest.fixture
def problem_file(tmp_path: Path) -> str:
    """A schedule problem."""
    (tmp_path / "problem.json").write_text(schedule_problem())
    return str(tmp_path / "problem.json")


@pytest.mark.parametrize("form", FORMATS)
def test_schedule(problem_file: str, form: str) -> None:
    result = invoke("schedule", problem_file, "--time-limit", "0.2", "--format", form)
    assert (result.exit_code, result.stderr) == (0, "")
    if form == "json":
        found = json.loads(result.stdout)
        assert (found["request"], found["fits"], found["violations"], found["placement"]) == (
            "search",
            True,
            [],
            [0, 1, 0, 1],
        )
        assert found["lower_bound_ns"] <= found["makespan_ns"] <= found["best_named"]["value_ns"]
        assert sum(map(len, found["orders"])) >= 2 * 4 * 4
        for rank in range(2):
            busy = 4 * sum(10 + 3 * stage + 10 + 8 for stage in (rank, rank + 2))
            assert busy + sum(found["idle"][rank].values()) == found["makespan_ns"]
    else:
        assert result.stdout.startswith("```\n") == (form == "github")
        assert "4 stages on 2 ranks, 4 microbatches (loop)" in result.stdout
        assert "interleaved-1f1b loop" in result.stdout
        assert "\nrank  0 " in result.stdout
        assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_fields_of_a_schedule(problem_file: str) -> None:
    result = invoke("schedule", problem_file, "--name", "gpipe", "--format", "json")
    assert set(json.loads(result.stdout)) == {
        *(
            "request",
            "name",
            "weight_versions",
            "microbatches",
            "placement",
            "placement_shape",
            "orders",
            "objective",
        ),
        *(
            "makespan_ns",
            "span_ns",
            "lower_bound_ns",
            "proven",
            "bubble",
            "idle",
            "peak_bytes",
            "memory_bytes",
            "fits",
        ),
        *("violations", "best_named", "named", "seconds"),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--time-limit", "0.3"],
        ["--placement", "open", "--objective", "span"],
        ["--name", "looped-bfs"],
    ],
)
def test_the_same_problem_is_scheduled_in_the_same_way(
    problem_file: str, arguments: list[str]
) -> None:
    def order() -> dict[str, object]:
        result = fresh(
            "-m", "pipecompile", "schedule", problem_file, *arguments, "--format", "json"
        )
        assert result.returncode == 0, result.stderr
        return {
            name: value for name, value in json.loads(result.stdout).items() if name != "seconds"
        }

    assert order() == order()


def test_an_order_goes_to_torch_and_back(problem_file: str, tmp_path: Path) -> None:
    csv, svg = tmp_path / "order.csv", tmp_path / "order.svg"
    options = (
        "--name",
        "zb-v",
        "--placement",
        "v",
        "--csv",
        str(csv),
        "--svg",
        str(svg),
        "--format",
        "json",
    )
    made = json.loads(invoke("schedule", problem_file, *options).stdout)
    assert [line.split(",") for line in csv.read_text().splitlines()] == made["orders"]
    assert "<title>zb-v: 4 stages on 2 ranks, 4 microbatches</title>" in svg.read_text()
    read_again = invoke(
        "schedule", problem_file, "--order", str(csv), "--placement", "open", "--format", "json"
    )
    assert read_again.exit_code == 0, read_again.output
    found = json.loads(read_again.stdout)
    assert (found["request"], found["orders"], found["makespan_ns"]) == (
        "csv",
        made["orders"],
        made["makespan_ns"],
    )


def test_asynchronous_schedules_show_their_versions(tmp_path: Path) -> None:
    stages = [json.loads(schedule_problem())["stages"][rank] for rank in (0, 1)]
    (tmp_path / "problem.json").write_text(schedule_problem(stages=stages))
    problem, csv = str(tmp_path / "problem.json"), tmp_path / "order.csv"
    result = invoke("schedule", problem, "--name", "pipedream")
    assert result.exit_code == 0, result.output
    assert "weights    stashed" in result.stdout
    assert "0F0@0 0F1@0 0B0@0 0STEP0@1 0F2@1" in result.stdout
    assert "bound" not in result.stdout
    result = invoke("schedule", problem, "--name", "pipedream", "--csv", str(csv))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "weight versions cannot be written" in result.stderr
    assert not csv.exists()


@pytest.mark.parametrize("form", FORMATS)
def test_a_named_order_over_the_caps_is_the_answer_no(tmp_path: Path, form: str) -> None:
    path, csv = tmp_path / "problem.json", tmp_path / "order.csv"
    path.write_text(schedule_problem(memory_bytes=[12, 100]))
    result = invoke("schedule", str(path), "--name", "gpipe", "--csv", str(csv), "--format", form)
    assert (result.exit_code, result.stderr) == (1, "")
    assert "rank 0: from 0F3 on it holds up to 32 B, 20 B over its cap of 12 B" in result.stdout
    assert not csv.exists()
    assert invoke("schedule", str(path), "--time-limit", "0.2").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "more", "code", "message"),
    [
        (["--name", "2f2b"], {}, 2, "search, gpipe, 1f1b"),
        (["--objective", "speed"], {}, 2, "makespan, span"),
        (["--placement", "zigzag"], {}, 2, "linear, loop, v, open"),
        (["--placement", "v", "--name", "1f1b"], {}, 2, "'1f1b' needs the stages placed as linear"),
        (["--name", "zb-h1", "--placement", "open"], {}, 2, "needs one stage on each rank"),
        (
            ["--name", "dualpipe-v", "--placement", "v"],
            {"microbatches": 3},
            2,
            "needs at least 4 microbatches",
        ),
        (["--time-limit", "-1"], {}, 2, "give a positive number"),
        (["--order", "nothing.csv"], {}, 2, "nothing.csv: cannot be read"),
        (["--order", "problem.json"], {}, 2, "problem.json: line 1, column 1: "),
        (
            ["--csv", "nowhere/order.csv", "--name", "gpipe"],
            {},
            2,
            "nowhere/order.csv: cannot be written",
        ),
        (
            [],
            {"memory_bytes": [7, 100]},
            1,
            "one microbatch alone holds 8 B on rank 0, whose cap is 7 B",
        ),
        ([], {"memory_bytes": [7]}, 2, "memory_bytes has 1 caps for 2 ranks"),
        ([], {"ranks": 3}, 2, "rank 2 has no stage"),
        ([], {"microbatches": 0}, 2, "`$.microbatches`"),
        ([], {"schema": "pipecompile/schedule-problem/2"}, 2, "is a schedule problem of version 2"),
        (
            [],
            {"schema": "pipecompile/cost-graph/1"},
            2,
            "name a schedule problem or a plan",
        ),
        ([], {"speed": 1}, 2, "unknown field `speed`"),
    ],
)
def test_what_cannot_be_scheduled_is_answered_in_one_line(
    tmp_path: Path, arguments: list[str], more: dict[str, Any], code: int, message: str
) -> None:
    (tmp_path / "problem.json").write_text(schedule_problem(**more))
    with_path = [
        str(tmp_path / word) if word.endswith((".csv", ".json")) else word for word in arguments
    ]
    result = invoke("schedule", str(tmp_path / "problem.json"), *with_path)
    assert (result.exit_code, result.stdout) == (code, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("pipecompile: ")
    assert message in line
    assert "PIPECOMPILE_DEBUG" not in line


def test_recomputation_is_not_written_for_torch(tmp_path: Path) -> None:
    tree = json.loads(schedule_problem())
    for stage in tree["stages"]:
        stage["recompute_ns"] = 9
    path, csv = tmp_path / "problem.json", tmp_path / "order.csv"
    path.write_text(json.dumps(tree))
    result = invoke(
        "schedule",
        str(path),
        "--name",
        "gpipe",
        "--csv",
        str(csv),
        "--svg",
        str(tmp_path / "order.svg"),
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert "R0 is not F, I, W or B: a recompute cannot be written" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["problem.json"]


def test_a_problem_that_is_not_there(tmp_path: Path) -> None:
    result = invoke("schedule", str(tmp_path / "problem.json"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "problem.json: there is no such file; `pipecompile plan" in result.stderr


def test_named_orders_need_neither_torch_nor_a_solver(problem_file: str) -> None:
    assert imported("schedule", problem_file, "--name", "gpipe") == []
    assert "torch" not in imported("schedule", problem_file, "--time-limit", "0.5")


def test_help_says_which_options_take_a_file_and_what_quiet_leaves() -> None:
    files = {"output", "page", "order", "csv_path", "svg_path", "trace_path", "links"}
    shown = {
        (name, option.name): option.metavar
        for name, command in commands.commands.items()
        for option in command.params
        if isinstance(option, click.Option) and option.name in files
    }
    assert ("schedule", "csv_path") in shown
    assert set(shown.values()) == {"FILE"}
    assert "Print the result and warnings only." in invoke("show", "--help").stdout


def test_help_lists_the_commands() -> None:
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(
        name in result.stdout
        for name in ("plan", "show", "check", "simulate", "partition", "schedule", "verify")
    )


MISTAKES = {
    "schedule": (["plan", UNET, "--schedule", "1f1v"], "did you mean '1f1b'?"),
    "costs": (["plan", UNET, "--costs", "flop"], "did you mean 'flops'?"),
    "cost file": (["plan", UNET, "--costs", "table:none.json"], "none.json: there is no such file"),
    "device": (["plan", UNET, "--costs", "roofline:h99"], "h99"),
    "stages": (["plan", UNET, "-k", "0"], "k=0, but a pipeline has at least one stage"),
    "ranks": (["verify", UNET, "-k", "3", "--ranks", "2"], "k=3 and ranks=2 disagree"),
    "together": (["plan", UNET, "-k", "3", "--schedule", "zb-v"], "k=3"),
    "links": (["plan", UNET, "--links", "none.json"], "none.json: there is no such file"),
    "pin": (["plan", UNET, "--pin", "mean"], "write NODE=STAGE"),
    "format": (["plan", UNET, "--format", "jsn"], "did you mean 'json'?"),
    "target": (["plan", "unet"], "'unet' is not a target"),
    "target file": (["verify", "nowhere.py:unet"], "there is no file nowhere.py"),
    "target module": (["plan", "no_such_package.module:unet"], "there is no module"),
    "profile": (["profile", UNET, "--optimizer", "adamm"], "did you mean 'adam"),
    "plan file": (["check", "none.json", UNET], "none.json: there is no such file"),
    "limit": (["check", "none.json", UNET, "--recompute", "blocks"], "did you mean 'block'?"),
    "output": (["plan", UNET, "-o", "nowhere/plan.json"], "nowhere/plan.json: cannot be written"),
}


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["schedule", "problem.json", "--schedule", "1f1b"], "'--schedule'; see"),
        (["check", "plan.json", "--json"], "'--json'. Did you mean '--format json'? See"),
        (["plan", UNET, "--max-memory", "3"], "'--max-memory'. Did you mean '--memory'? See"),
        (["plan", UNET, "--no-self-chek"], "'--no-self-chek'. Did you mean '--no-self-check'"),
    ],
)
def test_an_unknown_option_is_answered_with_those_that_are_near(
    arguments: list[str], hint: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"pipecompile: No such option {hint}")


@pytest.mark.parametrize("memory", [(), ("--memory", "1GiB")])
def test_too_many_stages_are_refused_without_a_word_of_other_settings(
    memory: tuple[str, ...],
) -> None:
    result = invoke("plan", f"{MODELS}:sequential", "-k", "40", "--costs", "flops", *memory)
    assert result.exit_code == 1
    (line,) = (each for each in result.stderr.splitlines() if each.startswith("pipecompile: "))
    assert re.search(r"at most (\d+) stages.*; choose k ≤ \1$", line), line


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_before_torch_is_imported(mistake: str) -> None:
    arguments, message = MISTAKES[mistake]
    code = (
        "import sys\nfrom pipecompile.cli import commands\n"
        "try:\n    commands([*sys.argv[1:]])\nexcept SystemExit as end:\n"
        "    print(end.code, sorted({'torch', 'ortools', 'numpy'} & set(sys.modules)))"
    )
    result = fresh("-c", code, *arguments)
    assert result.stdout == "2 []\n", result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("pipecompile: ")
    assert message in line


def test_names_are_known_in_any_case() -> None:
    target = f"{MODELS}:sequential"
    options = ("--schedule", "GPipe", "--objective", "Max-Load", "--format", "JSON")
    result = invoke("plan", target, "-k", "2", "--microbatches", "2", "--costs", "flops", *options)
    assert result.exit_code == 0, result.output
    options = decode(result.stdout.encode(), Plan, origin="stdout").options
    assert (options.schedule, options.objective) == ("gpipe", "max-load")


def test_ranks_stand_for_the_stages_that_a_schedule_has_on_them() -> None:
    target = f"{MODELS}:sequential"
    common = ("--schedule", "zb-v", "--costs", "flops", "--no-self-check", "--format", "json")
    plans = [
        decode(invoke("plan", target, *count, *common).stdout.encode(), Plan, origin="stdout")
        for count in (("--ranks", "2"), ("-k", "4"))
    ]
    assert (plans[0].k, plans[0].ranks) == (4, 2)
    assert plans[0] == plans[1]


def test_what_is_said_beside_the_answer_is_as_much_as_asked_for(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    command = (
        "plan",
        f"{MODELS}:sequential",
        "-k",
        "2",
        "--microbatches",
        "2",
        "--costs",
        "flops",
        "-o",
        plan,
    )
    usual, quiet, verbose = (invoke(*command, *flag) for flag in ((), ("-q",), ("-v",)))
    assert f"wrote {plan}" in usual.stderr.splitlines()
    assert "self-check: the graph is the model" in usual.stderr
    assert quiet.stderr == ""
    assert set(usual.stderr.splitlines()[1:]) < set(verbose.stderr.splitlines())
    assert "flops costs: 1 of " in verbose.stderr
    assert usual.stdout == quiet.stdout == verbose.stdout


def test_python_is_quiet() -> None:
    code = (
        "import torch\nfrom pipecompile import pipecompile\n"
        "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))\n"
        "pipeline = pipecompile(model, torch.ones(4, 4), k=2, costs='flops',\n"
        "                       loss_fn=lambda output, _: output.mean())\n"
        "print(repr(pipeline.plan), repr(pipeline), sep='\\n')"
    )
    result = fresh("-c", code)
    assert (result.returncode, result.stderr) == (0, "")
    plan = "Plan(2 stages on 2 ranks, 1f1b, 2 microbatches, costs flops)"
    assert result.stdout.splitlines() == [
        plan,
        f"Pipeline({plan}, all stages in this process, 0 steps taken)",
    ]


def test_the_stages_of_a_plan_are_scheduled_anew(plan_file: str, tmp_path: Path) -> None:
    plan, svg = read(plan_file, Plan), tmp_path / "order.svg"
    result = invoke("schedule", plan_file, "--name", "1f1b", "--svg", str(svg), "--format", "json")
    assert result.exit_code == 0, result.output
    order = json.loads(result.stdout)
    assert (order["makespan_ns"], order["placement"]) == (plan.prediction.step_ns, [0, 1, 2, 3])
    assert svg.read_text().startswith("<svg")
    searched = invoke("schedule", plan_file, "--time-limit", "0.2", "--format", "json")
    assert json.loads(searched.stdout)["makespan_ns"] <= plan.prediction.step_ns
    assert "torch" not in imported("schedule", plan_file, "--name", "gpipe")
    refused = invoke("schedule", plan_file, "--order", "order.csv")
    assert refused.exit_code == 2
    assert "checked against a schedule problem, not a plan" in refused.stderr


def test_verify_needs_no_measured_costs_and_explains_its_two_losses(tmp_path: Path) -> None:
    result = invoke("verify", f"{MODELS}:sequential", "-k", "2", "--microbatches", "2")
    assert result.exit_code == 0, result.output
    assert "measured" not in result.stderr
    assert "the model draws random numbers" in result.stdout
    lines = [line for line in result.stdout.splitlines() if line.startswith("against ")]
    assert [line.partition(":")[0] for line in lines] == [
        "against the unsplit graph under the same seeds, modules in the modes that they have",
        "against the original module, modules in eval mode, where nothing is drawn",
    ]


NORM_AND_DROPOUT = """
import torch
from torch import nn

def target():
    layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 8)]
    return nn.Sequential(*layers), torch.randn(8, 8)
"""


def test_verify_says_what_is_special_about_a_model_once_and_nothing_of_a_search(
    tmp_path: Path,
) -> None:
    (tmp_path / "norm.py").write_text(NORM_AND_DROPOUT)
    result = invoke("verify", f"{tmp_path / 'norm.py'}:target", "-k", "2")
    assert result.exit_code == 0, result.output
    norm, self_check = result.stderr.splitlines()
    assert norm.startswith("batch norm 1: each microbatch is normalised by itself")
    assert self_check.startswith("self-check: the graph is the model, bit for bit")


@pytest.mark.parametrize("command", ["show", "simulate"])
def test_figures_of_an_unsound_plan_come_with_a_warning(
    plan_file: str, tmp_path: Path, command: str
) -> None:
    edited = tmp_path / "edited.json"
    edited.write_text(Path(plan_file).read_text().replace('"0REDUCE_GRAD"', '"0SEND_B0"'))
    result = invoke(command, str(edited))
    assert "is not sound: rank 0: 0REDUCE_GRAD is missing" in result.stderr
    assert "see pipecompile check" in result.stderr


OUTPUTS = {
    "plan -o": ("plan", "missing.py:model"),
    "profile -o": ("profile", "missing.py:model"),
    "profile --page": ("profile", "missing.py:model"),
    "calibrate -o": ("calibrate",),
    "links -o": ("links",),
    "export -o": ("export", "missing.json", "--to", "json"),
    "simulate --svg": ("simulate", "missing.json"),
    "simulate --trace": ("simulate", "missing.json"),
    "schedule --csv": ("schedule", "missing.json"),
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_where_nothing_can_be_written_is_refused_before_any_work(
    output: str, tmp_path: Path
) -> None:
    option = output.split()[1]
    for place, said in [
        (tmp_path / "none" / "file", "does not exist"),
        (tmp_path, "is a folder; name a file"),
    ]:
        result = invoke(*OUTPUTS[output], option, str(place))
        assert result.exit_code == 2
        assert said in result.stderr, "and not that the target or the plan is missing"


def test_a_profile_whose_page_cannot_be_written_writes_nothing(tmp_path: Path) -> None:
    costs, page = tmp_path / "costs.json", tmp_path / "none" / "page.html"
    assert (
        invoke(
            "profile",
            f"{MODELS}:sequential",
            "--costs",
            "flops",
            "-o",
            str(costs),
            "--page",
            str(page),
        ).exit_code
        == 2
    )
    assert not list(tmp_path.iterdir())
