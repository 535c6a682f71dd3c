"""How long does the capture of a large model take, and how much memory?

    python -m benchmarks.capture_large

The model is a Llama of 120 layers on the meta device; one thread captures it. Prints the seconds
for the capture and for its graph at one batch size, the nodes, and the highest resident memory of
the process; writes results/capture_large.json.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path

import torch
import transformers

from benchmarks.command_line import no_arguments
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments

RESULT = Path(__file__).parent / "results" / "capture_large.json"
LAYERS = 120
LIMIT_SECONDS, LIMIT_MIB = 25, 1500


def main() -> None:
    """Print and write the figures."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(num_hidden_layers=LAYERS, use_cache=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        call = Arguments((), {"input_ids": torch.zeros(4, 128, dtype=torch.long)})
    before = _peak_mib()
    began = time.perf_counter()
    captured = capture(model, call)
    capture_ended = time.perf_counter()
    graph = captured.instantiate(call).graph
    row = {
        "nodes": len(graph.nodes),
        "capture_seconds": round(capture_ended - began, 1),
        "instantiate_seconds": round(time.perf_counter() - capture_ended, 1),
        "peak_mib": _peak_mib(),
        "peak_mib_before": before,
    }
    print(f"Llama, {LAYERS} layers: {row} (limits {LIMIT_SECONDS} s, {LIMIT_MIB} MiB)")
    RESULT.write_text(
        json.dumps({"torch": torch.__version__, "layers": LAYERS} | row, indent=1) + "\n"
    )


def _peak_mib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
