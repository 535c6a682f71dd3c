"""Calls of functions with a cache (functools.lru_cache): the model computes what they return once,
and a graph in each microbatch.

    @lru_cache
    def table(length):                         the same each time: numbers make it
        return torch.arange(length).float()
    def noise(length):                         refused: drawn once
        return torch.randn(length)
    def norm(model):                           refused: of the weights as they were at first
        return model.weight.norm()
    def scaled(length):                        refused once FACTOR has changed
        return torch.arange(length) * FACTOR
    table(8).add_(1)                           refused: the next call returns what was written
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FrameType

from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipecompile.errors import CaptureError
from pipecompile.frontend.guards import ValueRead
from pipecompile.frontend.recording import Recording
from pipecompile.graph.model_state import has_values
from pipecompile.graph.storages import is_irregular, storage_key

__all__ = ["CachedCalls"]


class CachedCalls:
    """What a recording has seen of calls of cached functions, which have the code `codes`.

    What these read of tensors in no module is added to `reads`.
    """

    def __init__(
        self, recording: Recording, codes: Collection[CodeType], reads: list[ValueRead]
    ) -> None:
        self._recording = recording
        self._reads = reads
        # The compile itself may be part of a cached call.
        self._codes = frozenset(codes).difference(frame.f_code for frame in _frames())
        # The recording keeps these alive, so that no other storage gets their keys.
        self._made: set[int] = set()

    def note(
        self,
        read: Iterable[Tensor],
        made: Iterable[Tensor],
        *,
        written: Iterable[Tensor] = (),
        is_random: bool = False,
    ) -> None:
        """Note a call that has `read` and `made` tensors; CaptureError if it is part of a cached
        call and would give something else in another one, or writes to what one has made.
        """
        frame = self._running()
        if frame is None:
            if self._made and any(storage_key(tensor) in self._made for tensor in written):
                raise CaptureError(
                    f"{self._recording.where()}: the forward writes to what a function with a "
                    "cache (functools.lru_cache) returned, and the next call returns what was "
                    "written; write to a copy (clone)"
                )
            return
        if is_random:
            self._refuse(frame, "draws random numbers")
        if not all(self._is_the_same(tensor, frame) for tensor in read):
            self._refuse(frame, "reads a parameter, a buffer, or a tensor that it is not given")
        self._made.update(storage_key(tensor) for tensor in made if not is_irregular(tensor))

    def _running(self) -> FrameType | None:
        """Return the innermost call of a cached function that runs now."""
        # Asked for each node: a plain loop takes a third of the time of a generator.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code not in self._codes:
            frame = frame.f_back
        return frame

    def _is_the_same(self, tensor: Tensor, frame: FrameType) -> bool:
        """Return whether a tensor that a cached function reads decides about its key, or has been
        made by one, or lies in no module.
        """
        if self._recording.is_state(tensor):
            return False
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if has_values(tensor):
            self._note_read(tensor, code.co_qualname)
            return True
        is_given = any(frame.f_locals.get(name) is tensor for name in names)
        return is_given or storage_key(tensor) in self._made

    def _note_read(self, tensor: Tensor, function: str) -> None:
        """Note that a function has read a tensor outside of modules, which the user may write to:
        where it is given, its key is the object and not its values.
        """
        if not any(read.tensor is tensor and read.is_cached for read in self._reads):
            with unset_fake_temporarily():
                values = tensor.detach().clone()
            self._reads.append(ValueRead(tensor, values, function, is_cached=True))

    def _refuse(self, frame: FrameType, what: str) -> None:
        raise CaptureError(
            f"{self._recording.where()}: {frame.f_code.co_qualname} has a cache "
            f"(functools.lru_cache) and {what}, so that the model keeps the first result and a "
            "graph would compute it anew; leave out the cache, or keep the result in a buffer"
        )


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
