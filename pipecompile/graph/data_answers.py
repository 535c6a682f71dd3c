"""Answers of data: the numbers and sizes that a run on real tensors reads out of its data.

A module that branches on data is one node of the graph. On real tensors the node simply runs. Fake
tensors have no values, so there the node is given the answers of a run on the sample, and shapes,
costs and memory are those of that sample:

    real run    x.max().item() → 6.0     recorded as DataAnswer("aten._local_scalar_dense…", 6.0)
                torch.ones(6, 2)
    fake run    x.max().item() → ?       replayed: 6.0
                torch.ones(6, 2)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from pipecompile.errors import CaptureError
from pipecompile.graph.autograd_context import run_under
from pipecompile.graph.hidden_fakes import hide_fake_tensors
from pipecompile.graph.hook_frames import HookCodes, hook_codes_of, running_hook
from pipecompile.graph.pytrees import map_tensors, tensor_leaves

__all__ = [
    "DataAnswer",
    "OtherPathError",
    "RecordAnswers",
    "is_data_dependent",
    "node_conditions",
    "replay_answers",
]


class OtherPathError(CaptureError):
    """A run on fake tensors does not take the path of the run on the sample."""


ITEM = "aten._local_scalar_dense.default"
TO_ARRAYS = frozenset[Any]((Tensor.numpy, Tensor.__array__))
"""Methods that make arrays of numpy, which have the values of the tensor."""
DATA_TAGS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True)
class DataAnswer:
    """The result of one data-dependent operator.

    It is either a number, or the (shape, strides, type) of each tensor that the operator returned.
    Of a tensor that became an array of numpy it is the tensor itself, its `content`.
    """

    operator: str
    number: int | float | bool | None
    layouts: tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], ...]
    content: Tensor | None = None

    @staticmethod
    def of(func: Any, result: Any) -> DataAnswer:
        """Return the answer that `result` of a run on real tensors is."""
        tensors = tensor_leaves(result)
        layouts = tuple(
            (tuple(value.shape), tuple(value.stride()), value.dtype) for value in tensors
        )
        return DataAnswer(str(func), None if tensors else result, layouts)


def is_data_dependent(func: Any) -> bool:
    """Return whether an operator reads numbers or sizes out of data."""
    return any(tag in getattr(func, "tags", ()) for tag in DATA_TAGS)


class RecordAnswers(TorchDispatchMode):
    """A mode that appends to `answers` what a run on real tensors reads out of data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answers: list[DataAnswer] = []
        self._conversions = _RecordedConversions(self.answers)

    def __enter__(self) -> RecordAnswers:
        # Conversions of real tensors call no operator, so only a function mode sees them.
        self._conversions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._conversions.__exit__(*raised)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if is_data_dependent(func):
            self.answers.append(DataAnswer.of(func, result))
        return result


class _RecordedConversions(TorchFunctionMode):
    """A mode that adds to `answers` the tensors that become arrays, in which `tolist` reads item by
    item, and `one_hot` nothing.

    On a real tensor `tolist` reads memory without calling an operator. On a fake one it calls an
    operator for each item, and these calls are what the answers are for.
    """

    def __init__(self, answers: list[DataAnswer]) -> None:
        super().__init__()
        self._answers = answers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            return FakeTensor.tolist(*args)
        if func is functional.one_hot:
            return _one_hot(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in TO_ARRAYS:
            # A copy: code may write to the array, which has the memory of the tensor.
            content = args[0].detach().clone()
            self._answers.append(DataAnswer(func.__name__, None, (), content))
        return result


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return what torch's does. Of a real tensor torch also reads whether the classes are in range,
    and of a fake one it does not.
    """
    if num_classes < 1:
        return functional.one_hot(tensor, num_classes)
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).long()


class _ReplayedConversions(TorchFunctionMode):
    """A mode that makes the arrays and texts of fake tensors that those of the sample make."""

    def __init__(self, pop: Callable[[str], DataAnswer]) -> None:
        super().__init__()
        self._pop = pop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], FakeTensor):
            if func in TO_ARRAYS:
                content = self._pop(func.__name__).content
                assert content is not None
                # A real tensor, which the modes around this must not make a fake of.
                with _disable_current_modes():
                    own = content.clone().requires_grad_(args[0].requires_grad)
                    return func(own, *args[1:], **kwargs)
            # As of a plain tensor, whose text is that of the number in it, which torch reads.
            if func is Tensor.__format__ and args[0].dim() == 0:
                return format(self._pop(ITEM).number, *args[1:])
        return func(*args, **kwargs)


class _ReplayAnswers(TorchDispatchMode):
    """A mode that gives the answers, in order, to data-dependent operators on fake tensors."""

    def __init__(self, answers: Sequence[DataAnswer], hooks: HookCodes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._remaining, self._hooks = list(reversed(answers)), hooks

    def pop(self, operator: str) -> DataAnswer:
        """Return the next answer, which is to be that of this operator.

        In order and by the operator's name: if the first call differs, the code has taken another
        path, and all that follow would be given answers of other questions.
        """
        if not self._remaining or self._remaining[-1].operator != operator:
            raise OtherPathError(
                f"{operator} is called on fake tensors, but not when the module ran on the sample"
            )
        return self._remaining.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        fake = next((leaf for leaf in leaves if isinstance(leaf, FakeTensor)), None)
        # Real tensors, such as constants, answer by themselves.
        if fake is None or not is_data_dependent(func):
            return func(*args, **kwargs)
        answer = self.pop(str(func))
        # `equal` has no symbolic form: torch raises there, although its answer is a plain boolean.
        is_equal = not answer.layouts and answer.operator == "aten.equal.default"
        # A fake run of a graph for one batch size has no symbols, and its result is made at once.
        # A recording has some: there the operator returns a size that is a new symbol, which is
        # given its value, so that guards about it can be told from guards about the batch. But a
        # hook may keep what it reads, in a sum that would stay symbolic.
        if fake.fake_mode.shape_env is None or is_equal or running_hook(self._hooks):
            return _fake_result(answer, fake)
        result = func(*args, **kwargs)
        _set_symbols(fake.fake_mode, result, answer)
        return _with_types(result, answer)


def _fake_result(answer: DataAnswer, fake: FakeTensor) -> Any:
    """Return the result of the operator: the number, one fake tensor, or a tuple of them."""
    tensors = [
        fake.new_empty_strided(shape, strides, dtype=dtype)
        for shape, strides, dtype in answer.layouts
    ]
    if not tensors:
        return answer.number
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def _with_types(result: Any, answer: DataAnswer) -> Any:
    """Return the result with the types of the answer: until torch 2.11 the fake counts of `unique`
    have the type of its values.
    """
    types = iter([dtype for _, _, dtype in answer.layouts])
    return map_tensors(lambda tensor: tensor.to(next(types)), result)


def _set_symbols(mode: FakeTensorMode, result: Any, answer: DataAnswer) -> None:
    """Give the symbols in `result`, which only data can resolve, the values of the answer.

    Branches on these symbols then go as they went on the sample.
    """
    environment = mode.shape_env
    assert environment is not None
    if not answer.layouts:
        _set_symbol(environment, result, answer.number)
    tensors = tensor_leaves(result)
    for tensor, (shape, _, _) in zip(tensors, answer.layouts, strict=bool(answer.layouts)):
        for symbolic, size in zip(tensor.shape, shape, strict=True):
            _set_symbol(environment, symbolic, size)


def _set_symbol(environment: ShapeEnv, symbolic: Any, value: Any) -> None:
    """Give the symbols in `symbolic`, if it is symbolic at all, this value.

    Torch has this for its own runs of fake tensors beside real ones; releases name it differently.
    """
    # A size that does not depend on data is a plain integer.
    if not isinstance(symbolic, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return
    names = ("set_real_tensor_prop_unbacked_vals", "set_unbacked_var_to_val")
    set_value = next(getattr(environment, name) for name in names if hasattr(environment, name))
    for symbol in free_unbacked_symbols(symbolic):
        set_value(symbol, sympy.sympify(int(value) if isinstance(value, bool) else value))


@contextlib.contextmanager
def replay_answers(
    answers: Sequence[DataAnswer] | None, hooks: HookCodes = MappingProxyType({})
) -> Iterator[None]:
    """Give `answers` to operators on fake tensors in the block; None changes nothing. The code of
    `hooks` gets plain numbers, also while a forward is recorded.

    OtherPathError if the operators are not those of the run in which the answers were recorded. So
    the code in the block does not see that tensors are fake.
    """
    if answers is None:
        yield
        return
    replay = _ReplayAnswers(answers, hooks)
    with _ReplayedConversions(replay.pop), replay, hide_fake_tensors(True):
        yield


@contextlib.contextmanager
def node_conditions(node: fx.Node, arguments: Any) -> Iterator[None]:
    """Run the block as `node` runs on `arguments`.

    The block is under the node's autograd context and, if an argument is fake, with its answers.
    OtherPathError if it asks for data that it did not ask for on the sample.
    """
    is_fake = any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(arguments))
    answers = node.meta.get("data_answers") if is_fake else None
    with run_under(node.meta.get("autograd_context")), replay_answers(answers):
        try:
            yield
        except (DataDependentOutputException, DynamicOutputShapeException, OtherPathError) as error:
            if node.op != "call_module":
                raise
            raise OtherPathError(_other_questions(node, error)) from error


def _other_questions(node: fx.Node, error: Exception) -> str:
    """Return that a module reads other values in one call than in another, and what to do."""
    assert node.graph.owning_module is not None
    names = hook_codes_of(node.graph.owning_module.get_submodule(str(node.target))).values()
    whose = f" or its forward hooks ({', '.join(dict.fromkeys(names))})" if names else ""
    return (
        f"{node.target}: the module is one node, and it{whose} read the values of a tensor in some "
        f"calls only ({str(error).partition(chr(10))[0]}), so its shapes and costs are not known; "
        "read as many in each call, and choose among them afterwards"
    )
