"""Run the benchmarks one after another, each in a process of its own.

    python -m benchmarks

`make bench` runs this after the sweeps of the tests. The first benchmark that fails ends the run.
"""

import subprocess
import sys

from benchmarks.command_line import no_arguments

NAMES = (
    "time_prediction",
    "recording",
    "memory_prediction",
    "profile_large",
    "recompute",
    "recompute_speed",
    "recompute_gpt2",
    "joint",
    "partition",
    "schedules",
    "gpipe_models",
    "gpipe_memory",
    "capture",
    "capture_large",
    "verify_zoo",
    "runtime",
    "faults",
    "gpu",
)

if __name__ == "__main__":
    no_arguments(__doc__)
    for name in NAMES:
        print(f"== {name}", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
