"""Tensors besides parameters and buffers: a forward that writes to one is refused, and the tensor
is put back.

A write outside of modules that are one node is refused when it is recorded. What such a node writes
shows only in the values, since it runs as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipecompile.errors import CaptureError
from pipecompile.frontend.name_search import NameSearch
from pipecompile.frontend.nested_values import tensors_in
from pipecompile.graph.model_state import has_values, named_tensor_attributes
from pipecompile.graph.restored_state import is_same_tensor
from pipecompile.graph.storages import is_irregular

__all__ = ["plain_tensors_kept"]


@contextmanager
def plain_tensors_kept(model: nn.Module) -> Iterator[None]:
    """Put the plain tensors of `model` back after the block, in which its forward runs.

    CaptureError if one was written to, also if the block raises another CaptureError.
    """
    before = [(name, tensor, tensor.detach().clone()) for name, tensor in _plain_tensors(model)]
    error: CaptureError | None = None
    try:
        yield
    except CaptureError as failure:
        error = failure
    finally:
        written = _put_back(before)
    if written:
        raise CaptureError(
            f"{written[0]}: the forward writes to this tensor in place, and its module is one "
            "node; make it a buffer with register_buffer and use it by that name, so that each "
            "microbatch sees it as in a loop"
        ) from error
    if error is not None:
        raise error


def _put_back(before: Sequence[tuple[str, Tensor, Tensor]]) -> list[str]:
    """Give each tensor its value of `before`; return the names of those that had another one."""
    written = [each for each in before if not is_same_tensor(each[1], each[2])]
    with torch.no_grad():
        for _, tensor, value in written:
            tensor.copy_(value)
    return [name for name, _, _ in written]


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors with values that the forward may write to besides its state, each once,
    with its place: in plain attributes of modules, in globals, objects, classes and closures.

    Parameters and buffers are among them if such a place has them as well: a node that writes there
    does not write to the copies that its tables have during a capture.
    """
    seen = set[int]()
    for where, tensor in (*_in_attributes(model), *_outside(model)):
        if id(tensor) not in seen and has_values(tensor) and not is_irregular(tensor):
            seen.add(id(tensor))
            yield where, tensor


def _in_attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in named_tensor_attributes(module):
            yield f"{path}.{name}".lstrip("."), tensor


def _outside(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for found in NameSearch(model).found.values:
        yield from ((found.where, tensor) for tensor in tensors_in(found.value))
