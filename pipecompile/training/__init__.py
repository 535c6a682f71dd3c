"""What a training run needs beside its steps: values, weights, checkpoints, recorded runs.

The room lies above the phases, because checkpoints and weights need to know where each rank of the
runtime is. `api/pipeline.py` puts it together with the step.
"""
