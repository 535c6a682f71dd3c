"""torchrun restarts ranks of which one was killed, and they go on from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.distributed import restart_jobs as jobs
from tests.distributed.workers import Workers

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_a_run_that_is_restarted_ends_as_one_that_is_not(workers: Workers, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    begin, wanted = workers.run(2, jobs.train, str(whole), folder=str(tmp_path))[0]
    assert begin == 0
    restarting = ["--max-restarts", "1", "-m", "tests.distributed.restart_jobs", str(killed)]
    done = subprocess.run(
        [sys.executable, *TORCHRUN, *restarting],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout
    begin, got = torch.load(killed / "trained")
    assert begin == jobs.KILLED_IN - jobs.KILLED_IN % jobs.STEPS_PER_CHECKPOINT
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], value) for name, value in wanted.items())
