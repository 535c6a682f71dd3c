"""The example of Hugging Face under torchrun, against a plain loop over the unsplit model."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import torch
import transformers
from accelerate import PartialState
from torch import nn

from examples import huggingface

STEPS = 3


def unsplit_run(folder: Path) -> nn.Module:
    """What the start of the example becomes without a pipeline."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "start").train()
    loader = huggingface.loader_of(huggingface.token_blocks(folder / "cache"), PartialState())
    optimizer = torch.optim.AdamW(huggingface.groups_of(model), lr=huggingface.LEARNING_RATE)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, STEPS // 10, STEPS)
    for batch in islice(huggingface.epochs(loader), STEPS):
        for tokens in batch["input_ids"].chunk(4):
            (model(input_ids=tokens, labels=tokens).loss / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def distance(left: nn.Module, right: nn.Module) -> float:
    """The largest difference of a weight."""
    pairs = zip(left.parameters(), right.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def test_the_weights_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    example = ["-m", "examples.huggingface", "--folder", str(tmp_path), "--steps", str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", *example],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("step 0:") == 1  # rank 0 alone
    unsplit = unsplit_run(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    # Float32, and the gradients of the tied embedding were summed over ranks.
    assert distance(unsplit, load(tmp_path / "trained")) < 1e-5
    assert distance(unsplit, load(tmp_path / "start")) > 1e-3
