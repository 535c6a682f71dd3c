"""What does one GPU show of all that is predicted for GPUs?

    python -m benchmarks.gpu [PART …]

Needs one CUDA device and no network, and takes less than nine minutes. On a machine without one it
says so, writes nothing and exits with 0. The parts:

    operators  each operator of a calibration against the device's roofline, and the device fitted
    rank       GPT-2 medium on four ranks, each alone with recorded receives: peaks and times
    times      whole stages against the sum of their nodes, by the roofline and as measured
    step       a step of four stages in one process, beside a loop over microbatches
    attention  what attention keeps for its backward, and which kernel ran
    offload    saved tensors moved to the host on copy streams: bytes kept, and extra time
    graphs     a stage as CUDA graphs
    messages   NCCL to itself: time of messages, and memory outside of PyTorch's allocator
    memory     peaks of the ten models at GPU sizes against `expected` and `bound`, rank by rank
    ranks      ranks that share the device over NCCL: gradients, streams, waits of hosts
    capture    the ten models captured on the device, proven, and compared with a CPU's graph

Costs are `roofline:DEVICE` of the device's name if devices.json has it, else of a calibration made
here. Memory is what PyTorch's allocator says (`CudaMeter` in bench.py). What fails, or has no time
left, is a row that says so. Prints all rows and a table for docs/results.md; writes
results/gpu_DEVICE.json. Parts that are not named keep their figures there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.command_line import checked_names, parser_of

RESULTS = Path(__file__).parents[1] / "results"
NOTHING = "no GPU here: nothing is measured"


def main(names: list[str], folder: Path = RESULTS) -> None:
    """Run these parts, or all; print and write their rows."""
    if not torch.cuda.is_available():
        print(NOTHING)
        return
    # Imported here: transformers, which all parts need, takes seconds.
    from benchmarks.gpu.parts import PARTS
    from benchmarks.gpu.rows import Row, described, markdown, merged
    from benchmarks.gpu.run import in_process, run_parts

    head = _head()
    print(", ".join(f"{key} {value}" for key, value in head.items()), flush=True)
    result = folder / result_name(head["device"])
    with tempfile.TemporaryDirectory() as scratch:
        for _, rows in run_parts(names or list(PARTS), Path(scratch), in_process):
            print("\n".join(map(described, rows)), flush=True)
            # Written after each part, so that what was measured stays if a later one is cut off.
            content = merged(result, head, rows)
            result.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    everything = [Row(**row) for row in content["rows"]]
    print(f"\n{markdown(everything)}")


def result_name(device: str) -> str:
    """Return the name of a device's file: gpu_nvidia_h200.json for "NVIDIA H200"."""
    return f"gpu_{'_'.join(re.findall('[a-z0-9]+', device.lower()))}.json"


def _head() -> dict[str, str]:
    """Return the device and the versions, by which results of different runs are told apart."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "driver": _driver(),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
        or "default",
    }


def _driver() -> str:
    """Return the version of the driver, "unknown" if nvidia-smi does not say it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    return (answer.split() or ["unknown"])[0]


def chosen_parts(words: list[str]) -> list[str]:
    """Return the parts on the command line; an unknown one ends the process with status 2."""
    parser = parser_of(__doc__)
    parser.prog = "python -m benchmarks.gpu"
    parser.add_argument("names", nargs="*", metavar="PART")
    return checked_names(parser, parser.parse_args(words).names, "part", part_names())


def part_names() -> list[str]:
    """Return the names of all parts, as the docstring lists them."""
    block = (__doc__ or "").split("The parts:\n\n")[1].split("\n\n")[0]
    return [line.split()[0] for line in block.splitlines()]


if __name__ == "__main__":
    main(chosen_parts(sys.argv[1:]))
