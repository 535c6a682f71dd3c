"""Weights out of a checkpoint of torch.distributed.checkpoint that has a model's state alone.

dcp.save({"model": model.state_dict()}, …)     model.layer.weight
dcp.save(model.state_dict(), …)                layer.weight
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader

from pipecompile.training.safetensors_file import with_other_names
from pipecompile.training.saved_keys import SavedKeys

__all__ = ["CheckpointWeights", "is_of_a_run"]

_MODEL = "model."


def is_of_a_run(path: str | Path) -> bool:
    """Return whether `Checkpoint.save` wrote the checkpoint in a folder, or one with its keys."""
    saved = SavedKeys(path)
    return "steps" in saved and "seed" in saved


class CheckpointWeights(Mapping[str, Tensor]):
    """The tensors of a checkpoint in the folder `path`, read when they are asked for, on the CPU.

    One of `names` that is not there has the value of another name of the same tensor; `first_names`
    has the first one for each.
    """

    def __init__(
        self, path: str | Path, names: Collection[str], first_names: Mapping[str, str]
    ) -> None:
        self._path = path
        self._saved = SavedKeys(path)
        # A model may have a part that is called `model`.
        prefix = "" if any(name in self._saved for name in names) else _MODEL
        keys = {key.removeprefix(prefix): key for key in self._saved.beginning_with(prefix)}
        self._keys = with_other_names(keys, names, first_names)

    def __getitem__(self, name: str) -> Tensor:
        key = self._keys[name]
        room = self._saved.room_for(key, torch.empty(0))
        state = {key: room}
        # Each rank by itself, since they hold other names.
        state_dict_loader.load(state, checkpoint_id=self._path, no_dist=True)
        value = state[key]
        assert value is not None
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
