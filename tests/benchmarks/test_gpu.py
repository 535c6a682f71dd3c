"""The benchmark of one GPU, with tiny models on a CPU in the place of the device.

What only CUDA has is reported as that; everything else runs as it does on a GPU.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    attention,
    captures,
    graphs,
    messages,
    models,
    operators,
    peaks,
    rank_worker,
    run,
    steps,
    times,
)
from benchmarks.gpu.bench import Bench, CudaMeter, Usage, known_device
from benchmarks.gpu.cases import Case, Part, rows_of
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.rows import Row, described, markdown, merged
from pipecompile.cost_models.device import load_device
from pipecompile.cost_models.roofline import Roofline
from pipecompile.ir.amount import ZERO, Amount
from pipecompile.profiling import calibration
from tests import allocations

CPU = torch.device("cpu")
GIB = 1 << 30


class CpuMeter:
    """What the profiler saw of torch's CPU allocator; there are no segments."""

    def usage(self, measured: Callable[[], object]) -> Usage:
        gc.collect()
        with allocations.events() as sizes:
            result = measured()
        del result
        peak = max(accumulate(sizes[""], initial=0))
        return Usage(peak, peak, sum(sizes[""]), peak)

    def runs_within(self, measured: Callable[[], object], size: int) -> bool:
        return self.usage(measured).peak <= size


@pytest.fixture(scope="module", autouse=True)
def _frozen_imports() -> Iterator[None]:
    """Keep what imports have made out of each garbage collection, of which there are many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    # Half of what others wait; on this many profiles it adds up, and no event was ever missing.
    monkeypatch.setattr(allocations, "SETTLING_SECONDS", 0.1)
    scale = models.TINY._replace(layers=1)
    return Bench(CPU, CpuMeter(), "roofline:cpu", scale, tmp_path)


def rows(name: str, bench: Bench) -> list[Row]:
    found = list(rows_of(name, PARTS[name], bench))
    assert not [row.note for row in found if "ERROR" in row.note]
    assert all(row.part == name for row in found)
    return found


def only(name: str) -> dict[str, object]:
    return {name: models.MODELS[name]}


# -- the parts


def test_peaks_are_those_expected_and_within_their_bounds(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peaks, "MODELS", only("mlp"))
    workspaces, *measured = rows("memory", bench)
    assert workspaces.predicted is None
    assert {row.what.split(", ")[1] for row in measured} == {
        "plain", "stages recomputed", "regions recomputed", "split backward",
    }  # fmt: skip
    assert len(measured) == 4 * 2 * 2
    for row in measured:
        assert row.error is not None
        if row.prediction == "expected":
            assert abs(row.error) < 0.005, described(row)
        else:
            assert row.error >= 0
            assert row.note == "runs within it"


def test_a_bound_that_does_not_hold_is_said(bench: Bench) -> None:
    class Fragmented(CpuMeter):
        def usage(self, measured: Callable[[], object]) -> Usage:
            return Usage(peak=50, requested=40, kept=0, reserved=300)

        def runs_within(self, measured: Callable[[], object], size: int) -> bool:
            return size >= 310

    plan, alone = Mock(allocator="cpu"), Mock(resident_bytes=1000)
    plan.footprints.return_value = {0: Mock(outputs=ZERO, replica_peers=0)}
    plan.options.optimizer = "adamw"
    plan.prediction.memory = [Mock(total=Amount(expected=1050, bound=1299))]
    bench = Bench(CPU, Fragmented(), bench.costs, bench.scale, bench.folder)
    expected, bound = peaks._peak_rows(bench, plan, 0, alone, "a rank")
    assert (expected.predicted, expected.measured) == (1050, 1040)
    assert expected.note == "1,050 in blocks, reserved 1,300"
    assert (bound.predicted, bound.measured) == (1299, 1.05 * 1299)
    assert bound.note == "DOES NOT HOLD, runs within 1.05 of it"
    alone.clear.assert_called_once_with()


@pytest.mark.sweep
def test_each_rank_of_four_is_measured_alone(bench: Bench) -> None:
    measured = rows("rank", bench)
    assert len(measured) == 4 * 4
    expected = [row for row in measured if row.prediction == "expected"]
    assert [row.what[-1] for row in expected] == list("0123")
    assert all(row.error is not None and abs(row.error) < 0.005 for row in expected)
    assert {row.what.split(", ")[-1] for row in measured if row.unit == "ns"} == {
        "forward", "backward",
    }  # fmt: skip
    assert all(row.measured for row in measured)


@pytest.mark.sweep
def test_stages_are_timed_under_both_costs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "NAMES", ("bert",))
    measured = rows("times", bench)
    assert {row.prediction for row in measured} == {"roofline:cpu", "measured:cpu"}
    assert len(measured) == 2 * 2 * 2
    assert all(row.predicted and row.measured for row in measured)


def test_a_step_is_timed_beside_a_loop(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "NAMES", ("llama",))
    timed, compared = rows("step", bench)
    assert timed.measured is not None
    assert timed.measured > 0
    assert compared.predicted == compared.measured
    assert compared.measured is not None
    assert compared.measured > 10
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.sweep
def test_ranks_are_compared_with_the_unsplit_model(bench: Bench) -> None:
    measured = rows("ranks", bench)
    assert {row.what for row in measured} == {
        "1f1b, recomputed", "zb-v", "1f1b, recomputed, 2 replicas", "streams",
    }  # fmt: skip
    assert all(row.note.startswith(("passed", "needs CUDA")) for row in measured)


def test_a_trace_tells_waits_and_streams_apart() -> None:
    def event(category: str, name: str, ts: int, **args: int) -> dict[str, object]:
        return {"cat": category, "name": name, "ts": ts, "dur": 10, "args": args}

    trace = rank_worker._trace_of(
        [
            event("user_annotation", "steps", 100),
            event("cuda_runtime", "cudaStreamSynchronize", 105),
            event("cuda_runtime", "cudaStreamSynchronize", 111),  # after the steps
            event("cuda_runtime", "cudaLaunchKernel", 106),
            event("kernel", "ncclDevKernel_SendRecv", 107, stream=20),
            event("kernel", "gemm", 120, stream=7),
        ]
    )
    assert trace == rank_worker.Trace({"cudaStreamSynchronize": 1}, {20}, {7})


def test_rows_quote_no_path_of_this_run() -> None:
    assert times.costs_name("roofline:h100") == "roofline:h100"
    assert times.costs_name("roofline:/tmp/x/calibrated.json") == "roofline:fitted"


def test_kept_activations_and_the_kernel_are_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "KINDS", attention.KINDS[-2:])
    causal, dropout = rows("attention", bench)
    for row in (causal, dropout):
        assert row.error is not None
        assert abs(row.error) < 0.03
        assert row.note.startswith("expected on CUDA efficient; ran ")
    assert "ScaledDotProductFlashAttentionForCpu" in causal.note
    assert "none that is fused" in dropout.note


def test_everything_that_can_be_is_offloaded(bench: Bench) -> None:
    # Only for a GPU the planner offers it, so costs are those of one; bytes are not comparable.
    bench = Bench(CPU, bench.meter, "roofline:h100", bench.scale, bench.folder)
    copies, *measured = rows("offload", bench)
    assert copies.note == "needs CUDA"
    kept, offloaded = (row.predicted for row in measured[:2])
    assert kept is not None
    assert offloaded is not None
    assert offloaded < kept / 2
    assert not measured[-1].note.startswith("0 runs")
    assert [row.what for row in measured[2:]] == [
        "forward", "backward", "extra forward, offloaded", "extra backward, offloaded",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["graphs", "messages"])
def test_what_needs_cuda_says_so(name: str, bench: Bench) -> None:
    assert {row.note for row in rows(name, bench)} == {"needs CUDA"}


def test_gradients_of_eager_and_replayed_runs_are_compared(bench: Bench) -> None:
    torch.manual_seed(0)
    module, values = nn.Linear(4, 4), [torch.randn(2, 4)]
    taken, first = graphs.timed_gradients(bench, module, values)
    _, second = graphs.timed_gradients(bench, module, values)
    assert taken > 0
    assert len(first) == 2
    assert graphs.differences(first, second) == 0
    assert graphs.differences(first, [first[0] + 1, first[1]]) == 1


def test_graphs_are_timed_beside_eager_runs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bench, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, inputs: module)
    measured = rows("graphs", bench)
    assert [entry.what.split(", ")[1] for entry in measured] == 2 * ["eager", "CUDA graphs"]
    assert all(entry.predicted and entry.measured for entry in measured)
    counts = [entry.note for entry in measured[1::2]]
    assert counts == 2 * ["0 of 12 gradients differ from eager ones"]


def test_messages_by_size_and_the_memory_for_them(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = iter([10 * GIB, 10 * GIB - 4096])
    monkeypatch.setattr(Bench, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    groups: list[str] = []
    for name in ("init_process_group", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda *_, name=name, **options: groups.append(name))
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(messages, "_exchange", lambda message, arrived: arrived.copy_(message))
    memory, *sizes = rows("messages", bench)
    assert (memory.predicted, memory.measured) == (32 << 20, 4096)
    assert sum("bytes to itself" in entry.what for entry in sizes) == len(messages.SIZES)
    assert groups == ["init_process_group", "destroy_process_group"]


def test_captures_are_proven_and_compared(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "MODELS", only("mlp"))
    assert [(row.what, row.measured) for row in rows("capture", bench)] == [
        ("mlp, proven", 1),
        ("mlp, same graph", 1),
    ]


def test_operators_are_compared_with_both_devices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = [*list(calibration._products(1, torch.float32))[:2], *list(calibration._small())[:2]]
    monkeypatch.setattr(calibration, "_operators", lambda kind: few)
    measured = rows("operators", bench)
    by_device = {row.prediction for row in measured if row.unit == "ns"}
    assert by_device == {"roofline:cpu", "fitted"}
    fitted = bench.folder / operators.CALIBRATED
    assert load_device(str(fitted)).launch_ns > 0
    assert Roofline.of(str(fitted)).allocator == "cpu"


# -- sizes and devices


def test_gpt2_medium_is_the_published_one() -> None:
    with torch.device("meta"):
        model = models.gpt2_medium(models.GPU)["model"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 354_823_168


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "h100"),
        ("NVIDIA H100 PCIe", 79.1, None),
        ("NVIDIA H200", 139.8, "h200"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "a100"),
        ("NVIDIA A100-SXM4-40GB", 39.4, None),
        ("NVIDIA GeForce RTX 4090", 23.6, "rtx4090"),
        ("NVIDIA L40S", 44.4, None),
    ],
)
def test_devices_are_known_by_the_drivers_name(name: str, gib: float, known: str | None) -> None:
    assert known_device(name, round(gib * GIB)) == known


def test_the_meter_takes_rises_above_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def stats(current: int, peak: int) -> dict[str, int]:
        kinds = {"allocated": 1, "requested": 2, "reserved": 3}
        return {
            f"{kind}_bytes.all.{at}": factor * value
            for kind, factor in kinds.items()
            for at, value in (("current", current), ("peak", peak))
        }

    answers = iter([stats(100, 100), stats(130, 170)])
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: next(answers))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    usage = CudaMeter(torch.device("cuda")).usage(lambda: None)
    assert usage == Usage(peak=70, requested=140, kept=30, reserved=210)


def test_the_meter_lets_a_run_take_so_much_and_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []
    for name, answer in {
        "synchronize": None,
        "empty_cache": None,
        "memory_reserved": 100,
        "get_device_properties": Mock(total_memory=1000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *device, answer=answer: answer)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, device: fractions.append(part)
    )
    meter = CudaMeter(torch.device("cuda"))
    assert meter.runs_within(lambda: None, 200)
    assert not meter.runs_within(Mock(side_effect=torch.OutOfMemoryError), 5000)
    assert fractions == [0.3, 1.0, 1.0, 1.0]


# -- rows, cases and the runner


def row(what: str, predicted: float | None, measured: float | None, part: str = "p") -> Row:
    return Row(what, predicted, measured, "bytes", "bound", part=part)


def test_the_table_counts_what_is_too_low_and_lists_what_is_missing() -> None:
    failed = Row("x", None, None, "", note="ERROR: why", part="p")
    lines = markdown([row("a", 90, 100), row("b", 130, 100), failed]).splitlines()
    assert lines[2] == "| p | bound | memory | 2 | 20.0% | +30.0% (b) | 1 |"
    assert lines[3] == "| p | – | x | – | ERROR: why | | |"


def test_noise_has_no_error() -> None:
    assert Row("extra", 100, -3000, "ns").error is None
    assert Row("extra", 100, 200, "bytes").error == -0.5


def test_a_file_keeps_other_parts_of_the_same_device(tmp_path: Path) -> None:
    path, head = tmp_path / "gpu.json", {"device": "a"}
    for part in "pq":
        path.write_text(json.dumps(merged(path, head, [row(part, 1, 1, part)])))
    assert [entry["part"] for entry in json.loads(path.read_text())["rows"]] == ["p", "q"]
    again = merged(path, head, [row("new", 2, 2, "p")])["rows"]
    assert sorted(entry["what"] for entry in again) == ["new", "q"]
    assert len(merged(path, {"device": "b"}, [row("new", 2, 2)])["rows"]) == 1


def test_a_case_that_fails_does_not_stop_the_others(bench: Bench) -> None:
    def fail() -> Iterator[Row]:
        yield row("before", 1, 1)
        raise RuntimeError("it broke\nand more")

    part = Part(lambda bench: [Case("one", fail), Case("two", lambda: [row("after", 1, 1)])], 9)
    found = list(rows_of("p", part, bench))
    assert [entry.what for entry in found] == ["before", "one", "after"]
    assert found[1].note == "ERROR: RuntimeError: it broke"


def test_parts_get_what_is_left_of_the_time_or_are_skipped(tmp_path: Path) -> None:
    clock, given = iter([0.0, 0.0, 70.0, 95.0, 95.0]), dict[str, float]()

    def launch(name: str, share: run.Share, folder: Path, seconds: float) -> Iterator[Row]:
        given[name] = seconds
        yield row(name, 1, 1, name)

    parts = {name: Part(lambda bench: [], 60, is_timed=name != "a") for name in "abcd"}
    results = dict(
        run.run_parts(
            list(parts), tmp_path, launch, parts=parts, total_seconds=100, clock=clock.__next__
        )
    )
    assert given == {"b": 60, "c": 30}
    assert list(results) == ["b", "c", "d", "a"]
    assert results["d"][0].note == results["a"][0].note == "skipped: the 100 s of the run are over"


def test_parts_that_time_nothing_run_together_in_shares(tmp_path: Path) -> None:
    meeting = threading.Barrier(3, timeout=20)

    def launch(name: str, share: run.Share, folder: Path, seconds: float) -> Iterator[Row]:
        meeting.wait()  # which all of them reach, or none
        yield row(f"{share.index} of {share.count}", 1, 1, name)

    parts = {
        "a": Part(lambda bench: [], 60, is_timed=False, shares=2),
        "b": Part(lambda bench: [], 60, is_timed=False),
    }
    results = dict(run.run_parts(["a", "b"], tmp_path, launch, parts=parts))
    assert [entry.what for entry in results["a"]] == ["0 of 2", "1 of 2"]
    assert [entry.what for entry in results["b"]] == ["0 of 1"]


def test_shares_have_all_cases_between_them(bench: Bench) -> None:
    part = Part(lambda bench: [Case(str(number), list) for number in range(5)], 1)
    shares = [run.share_of(part, run.Share(index, 2)).cases(bench) for index in range(2)]
    assert [[case.what for case in share] for share in shares] == [["0", "2", "4"], ["1", "3"]]


def test_a_part_that_hangs_or_dies_leaves_its_rows() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send(row("first", 1, 1))
    first, last = run._received(receiver, "p", time.monotonic() + 0.1, 0.1)
    assert (first.what, last.note) == ("first", "stopped: its 0 s were over, after first")
    sender.close()
    (died,) = run._received(receiver, "p", time.monotonic() + 9, 9)
    assert died.note.startswith("ERROR: the process ended")


# -- the command


def test_the_docstring_lists_the_parts() -> None:
    assert command.part_names() == list(PARTS)


def test_an_unknown_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.chosen_parts(["rank", "memory"]) == ["rank", "memory"]
    with pytest.raises(SystemExit) as stopped:
        command.chosen_parts(["memroy"])
    assert stopped.value.code == 2
    assert "memory" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command.main([], tmp_path)
    assert capsys.readouterr().out == f"{command.NOTHING}\n"
    assert not list(tmp_path.iterdir())


def test_what_was_measured_is_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(
        run, "in_process", lambda name, share, folder, s: iter([row("a", 90, 100, name)])
    )
    command.main(["memory", "rank"], tmp_path)
    written = json.loads((tmp_path / "gpu_nvidia_h100_80gb_hbm3.json").read_text())
    assert written["device"] == "NVIDIA H100 80GB HBM3"
    assert [entry["part"] for entry in written["rows"]] == ["rank", "memory", "memory", "memory"]
    assert "| rank | bound | memory | 1 | 10.0% | -10.0% (a) | 1 |" in capsys.readouterr().out
