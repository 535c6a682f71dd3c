"""Adapters by peft on gloo ranks, with groups, a schedule of rates and an average, against the
unsplit model in float64.
"""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from tests.distributed import peft_jobs as jobs
from tests.distributed.workers import Workers


@pytest.mark.one_case_in(2)
# With adapters in the first layer only, the second rank has nothing to train.
@pytest.mark.parametrize("layers", [[0, 1], [0]], ids=str)
def test_only_adapters_train_and_the_unsplit_model_loads_them(
    workers: Workers, tmp_path: Path, layers: list[int]
) -> None:
    folder = str(tmp_path)
    results = workers.run(2, jobs.fine_tuned, layers, folder, folder=folder)
    for worst, _ in results:
        assert max(worst.values()) <= 1e-12, worst
    unsplit = jobs.with_adapters(layers)
    adapters = {name for name, p in unsplit.named_parameters() if p.requires_grad}
    assert set().union(*(changed for _, changed in results)) == adapters
    assert bool(results[1][1]) == (1 in layers)
    untrained, trained = loss_of(unsplit), loss_of(jobs.trained_unsplit(unsplit))
    loaded = peft.PeftModel.from_pretrained(jobs.base_model(), folder)
    assert abs(loss_of(loaded) - trained) <= 1e-12
    assert abs(untrained - trained) > 1e-3


@torch.no_grad()
def loss_of(model: peft.PeftModel) -> float:
    return model(**jobs.batches()[0]).loss.item()
