"""`make bench` runs the benchmarks, each in a process of its own, after the sweeps of the tests."""

import subprocess
import sys

NAMES = (
    "time_prediction",
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
)

for name in NAMES:
    print(f"== {name}", flush=True)
    subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)
