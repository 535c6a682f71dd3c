"""What a module that branches on data was told: the numbers and sizes that a run on real tensors read out of them.

Such a module is one node of the graph. On real tensors it simply runs; on fake ones it is given the answers of a real
run, so that shapes, costs and memory are those of that sample.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipecompile.errors import CaptureError
from pipecompile.graph.autograd_context import entered

__all__ = ["Answer", "Listening", "answering", "asks", "conditions"]

DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class Answer:
    """What one operator told about data: a number, or the shapes, strides and types of the tensors it made."""

    operator: str
    number: int | float | bool | None
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]

    @staticmethod
    def of(func: Any, out: Any) -> Answer:
        """The answer that `out`, of a run on real tensors, is."""
        tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        layouts = tuple(
            (tuple(value.shape), tuple(value.stride()), value.dtype) for value in tensors
        )
        return Answer(str(func), None if tensors else out, layouts)


def asks(func: Any) -> bool:
    """Whether an operator reads numbers or sizes out of data."""
    return any(tag in getattr(func, "tags", ()) for tag in DATA)


class Listening(TorchDispatchMode):
    """Notes in `answers` what a run on real tensors reads out of data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[Answer] = []
        self._lists = _ListsByItems()

    def __enter__(self) -> Listening:
        self._lists.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._lists.__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if asks(func):
            self.answers.append(Answer.of(func, out))
        return out


class _ListsByItems(TorchFunctionMode):
    """`tolist` of a real tensor reads its memory unseen; item by item, as that of a fake one, it is seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return FakeTensor.tolist(*args) if func is Tensor.tolist else func(*args, **(kwargs or {}))


class _Answering(TorchDispatchMode):
    """Gives the answers, in order, to operators on fake tensors."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = list(reversed(answers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fake = next(
            (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)), None
        )
        if fake is None or not asks(func):
            return func(*args, **kwargs)
        if not self._left or self._left[-1].operator != str(func):
            raise CaptureError(
                f"{func} was not called when the module ran on the sample, but is on fake tensors"
            )
        answer = self._left.pop()
        if fake.fake_mode.shape_env is None or (
            not answer.layouts and answer.operator == "aten.equal.default"
        ):
            return _made(answer, fake)
        out = func(*args, **kwargs)
        _inform(fake.fake_mode, out, answer)
        return out


def _made(answer: Answer, fake: FakeTensor) -> Any:
    """The answer as the operator would give it."""
    made = [fake.new_empty_strided(*layout[:2], dtype=layout[2]) for layout in answer.layouts]
    return answer.number if not made else made[0] if len(made) == 1 else tuple(made)


def _inform(mode: FakeTensorMode, out: Any, answer: Answer) -> None:
    """Symbols of what only data can tell get the answer as their value: branches on them then go as on the sample."""
    environment = mode.shape_env
    assert environment is not None
    if not answer.layouts:
        _tell(environment, out, answer.number)
    tensors = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    for tensor, (shape, _, _) in zip(tensors, answer.layouts, strict=bool(answer.layouts)):
        for symbolic, size in zip(tensor.shape, shape, strict=True):
            _tell(environment, symbolic, size)


def _tell(environment: ShapeEnv, symbolic: Any, value: Any) -> None:
    """Torch's own way of running fake tensors beside real ones; it was renamed between releases."""
    if not isinstance(symbolic, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return
    names = ("set_real_tensor_prop_unbacked_vals", "set_unbacked_var_to_val")
    tell = next(getattr(environment, name) for name in names if hasattr(environment, name))
    for symbol in free_unbacked_symbols(symbolic):
        tell(symbol, sympy.sympify(int(value) if isinstance(value, bool) else value))


@contextlib.contextmanager
def answering(answers: Sequence[Answer] | None) -> Iterator[None]:
    """Operators on fake tensors in the block are given `answers`; None changes nothing."""
    if answers is None:
        yield
        return
    with _Answering(answers):
        yield


@contextlib.contextmanager
def conditions(node: fx.Node, arguments: Any) -> Iterator[None]:
    """What `node` runs under, wherever it runs: its region, and on fake `arguments` its answers."""
    fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(arguments))
    with entered(node.meta.get("ambient")), answering(node.meta.get("answers") if fake else None):
        yield
