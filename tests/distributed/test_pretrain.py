"""The parts of `python -m examples.train`; all of it runs in the sweep."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from examples.corpus import ROOT, corpus, minibatch
from examples.loss_figure import Curve, loss_figure
from examples.pretrain import Run, train_rank, train_unsplit
from examples.train import losses_of
from tests.distributed.workers import Workers

STEPS = 4
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.sweep
def test_a_run_goes_on_with_another_cut_and_learns_what_the_plain_loop_learns(
    workers: Workers, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    wanted = train_unsplit(STEPS)
    for stages in (1, 2):  # two replicas, then two stages
        losses = tmp_path / f"losses-{stages}"
        run = Run(stages, STEPS, losses, tmp_path / "saved", resume=stages == 2, kill=None)
        workers.run(2, train_rank, run, folder=str(tmp_path))
    whole, resumed = losses_of(tmp_path, 1), losses_of(tmp_path, 2)
    assert [*whole] == [0, 1, 2, 3]
    assert [*resumed] == [2, 3]
    # The losses fall by 0.1 and more a step; rounding changes them by 1e-5.
    assert wanted[3] < wanted[0] - 0.5
    assert whole == pytest.approx(wanted, abs=1e-3)
    assert resumed == pytest.approx({step: wanted[step] for step in resumed}, abs=1e-3)


def test_targets_are_the_next_bytes() -> None:
    tokens = torch.arange(100)
    batch, target = minibatch(tokens, 3, size=5, length=8)
    assert batch.shape == target.shape == (5, 8)
    assert torch.equal(target, batch + 1)
    again, other = (minibatch(tokens, position, size=5, length=8)[0] for position in (3, 4))
    assert torch.equal(batch, again)
    assert not torch.equal(batch, other)
    assert bytes(corpus()[:13].tolist()) == b"# pipecompile"


def test_the_figure_draws_each_loss_where_it_is() -> None:
    reference = Curve("plain", {0: 4.0, 1: 3.0, 2: 2.0}, "#111111")
    other = Curve("other", {0: 4.0, 1: 3.0 + 1e-4}, "#222222", end="killed")
    text = loss_figure("title", reference, [other], tolerance=1e-2, checkpoint=1)
    lines = [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in ElementTree.fromstring(text).iter(f"{SVG}polyline")
    ]
    # Steps 0, 1, 2 over 900 pixels; losses of 4 to 2 over 260.
    assert lines[0] == [(76, 70), (526, 200), (976, 330)]
    # Distances of nothing and of 1e-4, where 1e-6 to 1e-2 have 150 pixels.
    distances = [line for line in lines if line[0] == (76, 540)]
    assert distances == [[(76, 540), (526, 465)]]


@pytest.mark.sweep
def test_the_whole_command(tmp_path: Path) -> None:
    figure = tmp_path / "figure.svg"
    command = [sys.executable, "-m", "examples.train", "--steps", "12", "--figure", str(figure)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps 0 to 10 " in done.stdout  # killed five steps after the checkpoint
    assert "steps 6 to 11 " in done.stdout
    assert figure.is_file()
