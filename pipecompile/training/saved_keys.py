"""The keys of a checkpoint on disk: whether they fit this process, and room for the saved slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from pipecompile.errors import FormatError, InputError

__all__ = ["SavedKeys"]


class SavedKeys:
    """The keys of the checkpoint in the folder `path`, without the values.

    InputError if there is none, FormatError if it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        if not isinstance(path, str | PathLike):
            raise InputError(f"a checkpoint is a folder, but a {type(path).__name__} was given")
        try:
            metadata = FileSystemReader(path).read_metadata()
        except FileNotFoundError:
            raise InputError(
                f"there is no checkpoint in {path}; give a folder that Checkpoint.save has written"
            ) from None
        except (UnpicklingError, EOFError) as error:
            raise FormatError(
                f"the list of what the checkpoint in {path} has cannot be read: {error}; load "
                "another one"
            ) from error
        self._saved: Mapping[str, Any] = metadata.state_dict_metadata

    def __contains__(self, key: object) -> bool:
        return key in self._saved

    def beginning_with(self, prefix: str) -> list[str]:
        """Return the keys that begin with `prefix`, in the order of the checkpoint."""
        return [key for key in self._saved if key.startswith(prefix)]

    def problem(
        self, required: Iterable[str], own: Mapping[str, Any], model: Iterable[str]
    ) -> str | None:
        """Return what is wrong for a process; None if it can load.

        `required` are the keys that it needs, `own` the model's values that it holds, and `model`
        the names of all of the model's values.
        """
        missing = [key for key in required if key not in self._saved]
        if missing:
            return (
                f"the checkpoint in {self._path} lacks {_listed(missing)}; it is of another model, "
                "or was saved without that"
            )
        # All names of the model and not those of this rank: what other ranks hold is in the file
        # too.
        known = {f"model.{name}" for name in model}
        unknown = [key for key in self.beginning_with("model.") if key not in known]
        if unknown:
            return (
                f"the checkpoint in {self._path} has {_listed(unknown)}, which the model lacks; it "
                "is of another model"
            )
        return next(filter(None, (self._shape_problem(*item) for item in own.items())), None)

    def room_for(self, key: str, parameter: Tensor) -> Tensor | None:
        """Return a tensor to read `key` into, which belongs to `parameter`; None if the value is no
        tensor.
        """
        saved = self._saved[key]
        if not isinstance(saved, TensorStorageMetadata):
            return None
        if saved.size == parameter.shape:  # on several processes it is divided as the parameter is
            return torch.empty_like(parameter, dtype=saved.properties.dtype, requires_grad=False)
        # Optimizers keep scalars, such as the number of steps, on the host, and move them if not.
        where = parameter.device if saved.size else torch.device("cpu")
        return torch.empty(saved.size, dtype=saved.properties.dtype, device=where)

    def _shape_problem(self, name: str, value: Any) -> str | None:
        saved = self._saved[f"model.{name}"]
        if not isinstance(saved, TensorStorageMetadata) or saved.size == value.shape:
            return None
        return (
            f"{name} has the shape {tuple(saved.size)} in the checkpoint in {self._path}, but "
            f"{tuple(value.shape)} in the model"
        )


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return ", ".join(keys[:3]) + more
