"""Rooflines give the same plan whatever order a process hashes in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def planned(seed: int, output: Path) -> bytes:
    command = [
        sys.executable,
        "-m",
        "pipecompile",
        "plan",
        "examples/models.py:unet",
        "-k",
        "2",
        "-o",
        str(output),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    subprocess.run(
        [*command, "--costs", "roofline:h100"],
        cwd=ROOT,
        env=environment,
        check=True,
        capture_output=True,
    )
    return output.read_bytes()


def test_two_hash_seeds_give_the_same_bytes(tmp_path: Path) -> None:
    assert planned(1, tmp_path / "one.json") == planned(2, tmp_path / "two.json")
