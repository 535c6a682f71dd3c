"""Weights in the safetensors format, under the original names, as the Hugging Face hub has them.

A tensor with several names is written once, under its first one; the metadata has the others. Files
of other programs may leave out the others without saying so, and the model knows them then.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pipecompile.errors import FormatError, InputError

try:
    import safetensors
    import safetensors.torch
except ImportError:  # an optional extra
    safetensors = None  # type: ignore[assignment]

__all__ = ["SafetensorsWeights", "check_installed", "with_other_names", "write_weights"]

_Place = TypeVar("_Place")


def check_installed() -> None:
    """Raise InputError if the package safetensors is not there."""
    if safetensors is None:
        raise InputError(
            "this needs the package safetensors, which is not installed; run "
            "`pip install safetensors`"
        )


def write_weights(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a whole state dict to the file `path`; InputError for what such files cannot hold."""
    first_names: dict[int, str] = {}
    metadata, tensors = {"format": "pt"}, {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise InputError(
                f"{name!r} of the model's state is a {type(value).__name__}, but safetensors files "
                "hold only tensors; use pipeline.checkpoint().save(path)"
            )
        # `state` holds every tensor meanwhile, so that no id is used twice.
        first = first_names.setdefault(id(value), name)
        if first == name:
            tensors[name] = value.contiguous()
        else:
            metadata[name] = first  # as safetensors.torch.save_model does
    try:
        safetensors.torch.save_file(tensors, path, metadata)
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"the weights cannot be written to {path} ({error}); give the path of a file in a "
            "folder that is there"
        ) from error
    except KeyError as error:  # of its table of types
        (dtype,) = error.args
        names = [name for name, value in tensors.items() if value.dtype is dtype]
        raise InputError(
            f"{', '.join(names)} of the model's state is of type {dtype}, which safetensors files "
            "do not hold; use pipeline.checkpoint().save(path)"
        ) from error


class SafetensorsWeights(Mapping[str, Tensor]):
    """The weights in `path`: a file, the index of several files, or a folder with either.

    Tensors are read when they are asked for, on the CPU. One of `names` that is not in the files
    has the value of another name of the same tensor; `first_names` has the first one for each.
    """

    def __init__(
        self, path: str | Path, names: Iterable[str], first_names: Mapping[str, str]
    ) -> None:
        self._file_of = with_other_names(_files(Path(path)), names, first_names)

    def __getitem__(self, name: str) -> Tensor:
        file, saved = self._file_of[name]
        try:
            with safetensors.safe_open(file, framework="pt") as opened:
                tensor: Tensor = opened.get_tensor(saved)
                return tensor
        except (safetensors.SafetensorError, OSError) as error:
            raise InputError(
                f"the weights have {name} in {file}, which cannot be read ({error}); give a whole "
                "file, or an index with all files that it names beside it"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def with_other_names(
    places: Mapping[str, _Place], names: Iterable[str], first_names: Mapping[str, str]
) -> dict[str, _Place]:
    """Return the places of saved tensors, also under those of `names` that the saved ones are other
    names of.
    """
    # A tensor with the names `embed.weight` (its first) and `head.weight`, of which only the second
    # one is saved: it is noted under the first, and both names find it.
    saved = {first_names.get(name, name): place for name, place in places.items()}
    known = {name: first_names.get(name, name) for name in names}
    others = {name: saved[first] for name, first in known.items() if first in saved}
    return {**others, **places}


def _files(path: Path) -> dict[str, tuple[Path, str]]:
    """Return the file of each saved name, and the name there."""
    if path.is_dir():
        path = _file_in(path)
    try:
        if path.suffix == ".json":
            index = json.loads(path.read_text())["weight_map"]
            return {str(name): (path.parent / file, str(name)) for name, file in index.items()}
        with safetensors.safe_open(path, framework="pt") as opened:
            names: list[str] = opened.keys()
            return {name: (path, name) for name in names}
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(
            f"{path} is neither a safetensors file nor the index of several: {error!r}"
        ) from error
    except FileNotFoundError:
        raise InputError(f"there is no file {path}; give one of weights, or its folder") from None


def _file_in(folder: Path) -> Path:
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).is_file():
            return folder / name
    raise InputError(
        f"the folder {folder} has neither model.safetensors nor model.safetensors.index.json; "
        "give the path of the file"
    )
