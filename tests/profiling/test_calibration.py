"""A device file is written, read back and planned with; what it holds is what the fit gave."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from pipecompile.cli import commands
from pipecompile.cost_models.device import load_device
from pipecompile.errors import InputError
from pipecompile.profiling import calibration as calibrating
from pipecompile.profiling.calibration import CalibrationOperator, calibrate


def few(kind: str) -> Iterator[CalibrationOperator]:
    yield CalibrationOperator("product", lambda: nn.Linear(256, 256), ((256, 256),))
    yield CalibrationOperator("stream", nn.ReLU, ((512, 512),))
    yield CalibrationOperator("small", nn.GELU, ((8, 8),))
    yield CalibrationOperator("views", nn.Flatten, ((8, 8),))
    yield CalibrationOperator("lookup", lambda: nn.Embedding(64, 8), ((16,),), rows=64)


def test_forward_and_backward_of_every_operator_that_launches_something(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calibrating, "_operators", few)
    calibration = calibrate("cpu")
    names = {sample.name for sample in calibration.samples}
    assert {"product", "product backward", "stream", "lookup"} <= names
    assert not {"views", "views backward"} & names
    assert all(sample.measured_ns and sample.kernels for sample in calibration.samples)
    assert calibration.device.allocator == "cpu"
    assert "measured by pipecompile calibrate" in calibration.device.sources["peak_flop_per_s"]


def test_the_file_is_a_device_for_roofline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrating, "_operators", few)
    file = tmp_path / "mine.json"
    result = CliRunner().invoke(commands, ["calibrate", "-o", str(file)])
    assert result.exit_code == 0, result.output
    assert "median error" in result.output
    assert load_device(str(file)).name == "cpu"


def test_every_operator_runs_on_fakes_of_its_own_type() -> None:
    for operator in calibrating._operators("cpu"):
        graph = calibrating._graph_of(operator, torch.device("cpu"))
        assert [node.op for node in graph.graph.nodes][-2:] == ["call_module", "output"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="no CUDA device"):
        calibrate("cuda")
