"""A run that goes on from its last checkpoint; torchrun starts this file on every rank:

torchrun --nproc-per-node 2 --max-restarts 1 -m tests.distributed.restart_jobs FOLDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from pipecompile.ir.schedule import Action
from pipecompile.runtime import world
from pipecompile.runtime.rank_step import RankStep
from tests.distributed.checkpoint_jobs import State, pipelined

STEPS, STEPS_PER_CHECKPOINT = 7, 2
KILLED_IN, ACTION = 5, "1B1"


def train(folder: str, *, dies: bool = False) -> tuple[int, State]:
    """Train from the last checkpoint in `folder`, or from the start; where the run began, and on
    rank 0 the state in the end.
    """
    run = pipelined(dist.get_world_size(), 1)
    saved = sorted(Path(folder).glob("step-*"))
    if saved:
        run.checkpoint.load(saved[-1])
    begin = run.checkpoint.steps
    perform = RankStep._perform

    def planted(rank_step: RankStep, action: Action) -> None:
        if dies and run.checkpoint.steps == KILLED_IN and str(action) == ACTION:
            os.kill(os.getpid(), signal.SIGKILL)
        perform(rank_step, action)

    with patch.object(RankStep, "_perform", planted):
        while run.checkpoint.steps < STEPS:
            run.steps(1)
            if run.checkpoint.steps % STEPS_PER_CHECKPOINT == 0:
                run.checkpoint.save(Path(folder, f"step-{run.checkpoint.steps}"))
    return begin, run.run.pipeline.full_state_dict()


def main(folder: str) -> None:
    """Be one of torchrun's ranks, of which one dies unless torchrun has restarted them."""
    torch.set_num_threads(1)
    world.join()
    trained = train(folder, dies=os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
    if dist.get_rank() == 0:
        torch.save(trained, Path(folder, "trained"))


if __name__ == "__main__":
    main(sys.argv[1])
