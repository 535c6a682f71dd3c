"""Some steps of a small GPT-2 on 4 gloo ranks, recorded to be compared with their plan:

    torchrun --nproc-per-node 4 -m examples.record plan.json run.json
    pipecompile compare plan.json run.json --page run.html

It is the model of `examples.pretrain`, as one pipeline of 4 stages. Its costs are measured by the
ranks themselves before the first step.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from examples.pretrain import pipeline_of

WARM_UPS, STEPS = 3, 10


def main(plan: str, run: str) -> None:
    """Plan, train and record; rank 0 writes both files."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    pipeline, share = pipeline_of(dist.get_world_size(), costs="measured")
    if dist.get_rank() == 0:
        pipeline.plan.save(plan)
    for step in range(WARM_UPS):  # the first steps make buffers
        pipeline.step(*share.minibatch(step))
    with pipeline.record() as recorder:
        for step in range(STEPS):
            pipeline.step(*share.minibatch(WARM_UPS + step))
    recorder.save(run)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
