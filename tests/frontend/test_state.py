"""State that a forward leaves: attributes are restored or refused, new buffers written back."""

from __future__ import annotations

import contextlib
import re
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle
from time import perf_counter
from typing import Any

import pytest
import torch
from plain_loop import mean_square, steps_alike
from torch import Tensor, nn
from zoo import called
from zoo.exact import exact

from pipecompile import pipecompile
from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.self_check import with_autograd_contexts
from pipecompile.frontend.signature import Arguments

WIDTH = 8
X = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
CALL = Arguments((X[:4].clone(),), {})


class Kept(nn.Module):
    """Runs `act` on its layer's result; it has two buffers and an attribute."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = act
        self.note: Any = None
        self.register_buffer("left", torch.ones(WIDTH))
        self.register_buffer("right", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x))


def put(**values: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Tensor]:
    """Return an `act` that sets attributes in turn and reads `left` and `right`."""

    def act(model: Any, hidden: Tensor) -> Tensor:
        for name, value in values.items():
            setattr(model, name.partition("_")[0], value(model, hidden))
        return hidden * model.left + model.right

    return act


REPLACED = {
    "by a new tensor": put(left=lambda m, h: 0.9 * m.left + h.detach().mean(0)),
    "by one with a gradient": put(left=lambda m, h: h.mean(0)),
    "twice": put(left=lambda m, h: m.left * 2, left_again=lambda m, h: m.left + 1),
    "by the other one": put(left=lambda m, h: m.right),
    "by a view of another tensor": put(left=lambda m, h: h.detach().exp()[1]),
    "by itself": put(left=lambda m, h: m.left),
}


@pytest.mark.parametrize("act", REPLACED.values(), ids=REPLACED)
def test_a_replaced_buffer_is_written_back(act: Callable[[Any, Tensor], Tensor]) -> None:
    model = Kept(act)
    own = model.left
    exact(model, X)
    assert model.left is own
    assert torch.equal(own, torch.ones(WIDTH))


def test_buffers_that_change_places() -> None:
    def act(model: Any, hidden: Tensor) -> Tensor:
        before = hidden * model.left - model.right
        model.left, model.right = model.right, model.left + 1
        return before + model.left * model.right

    exact(Kept(act), X)


def test_a_value_that_was_read_before_keeps_the_old_elements() -> None:
    def act(model: Any, hidden: Tensor) -> Tensor:
        old, view = model.left, model.left[:4]
        model.left = model.left * 2
        model.left.add_(1)
        return hidden * model.left + old + view.sum()

    exact(Kept(act), X)


def test_a_buffer_that_is_written_to_and_then_replaced() -> None:
    def act(model: Any, hidden: Tensor) -> Tensor:
        model.left.mul_(3)
        seen = model.left + 1
        model.left = model.left - 5
        return hidden * seen * model.left

    exact(Kept(act), X)


def test_a_shared_module_that_replaces_its_buffer_at_each_call() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = self.again = Kept(REPLACED["by a new tensor"])

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.part(x)) + self.part.left

    captured_model = exact(Twice(), X)
    assert called(captured_model.graph).count("copy_") == 1


LOST = {
    "of another shape": put(left=lambda m, h: h.mean(0)[:3].sum()),
    "of another type": put(left=lambda m, h: m.left.double()),
}


@pytest.mark.parametrize("act", LOST.values(), ids=LOST)
def test_a_buffer_that_cannot_be_written_back_is_refused(
    act: Callable[[Any, Tensor], Tensor],
) -> None:
    model = Kept(act)
    own = model.left
    with pytest.raises(CaptureError, match="the forward replaces left by a new tensor"):
        capture(model, CALL)
    assert model.left is own


def test_a_replaced_buffer_with_two_names_is_refused() -> None:
    model = Kept(REPLACED["by a new tensor"])
    model.right = model.left
    with pytest.raises(CaptureError, match="the forward replaces left by a new tensor"):
        capture(model, CALL)


def test_an_assignment_to_the_data_of_a_buffer_is_refused() -> None:
    def act(model: Any, hidden: Tensor) -> Tensor:
        model.left.data = model.left + 1
        return hidden

    with pytest.raises(CaptureError, match="assigns to an attribute of a tensor"):
        capture(Kept(act), CALL)


ALLOWED = {
    "a tensor that the output uses": put(note=lambda m, h: h),
    "a tensor without a gradient": put(note=lambda m, h: h.detach().mean()),
    "a number": put(note=lambda m, h: 3),
    "a shape": put(note=lambda m, h: h.shape),
    "a list": put(note=lambda m, h: [h, None]),
    "a dict": put(note=lambda m, h: {"h": h}),
}


@pytest.mark.parametrize("act", ALLOWED.values(), ids=ALLOWED)
def test_what_each_forward_sets_anew_is_restored_and_said(
    act: Callable[[Any, Tensor], Tensor],
) -> None:
    model = Kept(act)
    captured_model = exact(model, X)
    assert model.note is None
    (note,) = map(str, captured_model.notes)
    assert note.startswith("the forward sets note: the pipeline leaves that as it was")
    assert "test_state.py:" in note


def test_a_list_that_is_emptied_and_filled_is_restored() -> None:
    def act(model: Any, hidden: Tensor) -> Tensor:
        model.note.clear()
        model.note.append(hidden)
        return hidden + model.note[0]

    model = Kept(act)
    model.note = held = ["mine"]
    capture(model, CALL)
    assert model.note is held
    assert held == ["mine"]


def test_a_list_that_grows_is_refused_and_restored() -> None:
    def act(model: Any, hidden: Tensor) -> Tensor:
        model.note.append(1)
        return hidden * len(model.note)

    model = Kept(act)
    model.note = []
    with pytest.raises(
        CaptureError, match=r"note: the forward sets it to \[1\], and a second forward to \[1, 1\]"
    ):
        capture(model, CALL)
    assert model.note == []


def test_a_loss_on_an_attribute_that_is_returned_too_is_allowed() -> None:
    class Returned(Kept):
        def forward(self, x: Tensor) -> Any:
            hidden = self.linear(x)
            self.note = hidden.square().mean()
            return hidden, self.note

    exact(Returned(put()), X)


def test_a_switch_that_each_forward_turns_is_refused() -> None:
    def act(model: Any, hidden: Tensor) -> Tensor:
        model.note = not model.note
        return hidden if model.note else -hidden

    with pytest.raises(
        CaptureError, match=r"note .*: the forward sets it to True, and a second forward to False"
    ):
        capture(Kept(act), CALL)


def test_what_a_second_forward_cannot_be_recorded_with_is_refused() -> None:
    """The second forward finds the tensor of the first, which a capture of the first would miss."""

    def act(model: Any, hidden: Tensor) -> Tensor:
        before = model.note
        model.note = hidden.detach().mean(0)
        return hidden if before is None else hidden + before

    model = Kept(act)
    with pytest.raises(
        CaptureError,
        match=r"^note \(.*test_state.py:\d+\): the forward sets it, and a second forward",
    ):
        capture(model, CALL)
    assert model.note is None


def test_the_attribute_is_named_that_the_second_forward_computes_with() -> None:
    """Others are set anew by each forward."""

    class Table(nn.Module):
        made: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.made is None:
                self.made = torch.arange(x.shape[-1]).cos()
            return x * self.made

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def forward(self, x: Tensor) -> Tensor:
            self.last = x.detach()
            scaled: Tensor = self.table(x)
            return scaled

    with pytest.raises(CaptureError, match=r"^table.made \(.* something else in table \(.*once"):
        capture(Both(), Arguments((torch.randn(4, 8),), {}))


def test_a_counter_inside_a_subclass_of_a_torch_module_is_refused() -> None:
    """It is one node: an attribute of it that its parent reads would be a constant."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Counting(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) * self.part.calls

    model = Reads()
    with pytest.raises(
        CaptureError,
        match=r"^part\.calls \(.*: the forward sets it to 1, and a second forward to 2",
    ):
        capture(model, CALL)
    assert model.part.calls == 0


NESTED = {
    "a list in a dict": ({"seen": [1, 2]}, lambda note, h: note["seen"].append(h)),
    "a deque": (deque([1, 2], maxlen=2), lambda note, h: note.append(h)),
    "a deque in a tuple": ((deque([1]), 0), lambda note, h: note[0].appendleft(h)),
    "a set in a list": ([{1}], lambda note, h: note[0].add(h.dim())),
    "a dict in a list in a dict": ({"a": [{"b": 1}]}, lambda note, h: note["a"][0].update(c=h)),
    "an emptied list in a list": ([[1, 2]], lambda note, h: note[0].clear()),
}


def parts(value: Any) -> list[Any]:
    """Yield a container and all values in it."""
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(each for item in inner if hasattr(item, "__iter__") for each in parts(item))]


@pytest.mark.parametrize(("note", "change"), NESTED.values(), ids=NESTED)
def test_nested_containers_are_as_before(
    note: Any, change: Callable[[Any, Tensor], object]
) -> None:
    """The same objects hold the same items, whether the capture is refused or not."""

    def act(model: Any, hidden: Tensor) -> Tensor:
        change(model.note, hidden)
        return hidden

    model = Kept(act)
    model.note = note
    objects, text = list(map(id, parts(note))), repr(note)
    with contextlib.suppress(CaptureError):
        capture(model, CALL).instantiate(CALL)
    assert model.note is note
    assert list(map(id, parts(note))) == objects
    assert repr(note) == text


def lazily(model: Any) -> Tensor:
    """What each of the forwards below makes once."""
    return torch.ones(WIDTH).cumsum(0)


def in_attribute(model: Any, hidden: Tensor) -> Tensor:
    if model.note is None:
        model.note = lazily(model)
    return hidden + model.note


def in_dict(model: Any, hidden: Tensor) -> Tensor:
    cache = model.__dict__.setdefault("cache", {})
    if hidden.shape[1] not in cache:
        cache[hidden.shape[1]] = lazily(model)
    return hidden + cache[hidden.shape[1]]


def in_flagged_buffer(model: Any, hidden: Tensor) -> Tensor:
    if model.note is None:
        model.left.copy_(lazily(model))
        model.note = "ready"
    return hidden + model.left


def in_grown_buffer(model: Any, hidden: Tensor) -> Tensor:
    if model.right.numel() < WIDTH + 1:
        model.right = torch.ones(WIDTH + 1)
    return hidden + model.right[:WIDTH]


def in_new_buffer(model: Any, hidden: Tensor) -> Tensor:
    if not hasattr(model, "late"):
        model.register_buffer("late", lazily(model))
    return hidden + model.late


def in_empty_buffer(model: Any, hidden: Tensor) -> Tensor:
    if model.none is None:
        model.none = lazily(model)
    return hidden + model.none


def in_data_of_the_first(model: Any, hidden: Tensor) -> Tensor:
    if model.none is None:
        model.none = hidden.detach().mean(0)
    return hidden - model.none


def in_parameter(model: Any, hidden: Tensor) -> Tensor:
    if model.nothing is None:
        model.nothing = nn.Parameter(lazily(model))
    return hidden + model.nothing


def in_module(model: Any, hidden: Tensor) -> Tensor:
    if model.note is None and "late" not in dict(model.named_children()):
        model.late = nn.Linear(WIDTH, WIDTH)
    return model.late(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (in_attribute, "note"),
        (in_dict, "cache"),
        (in_flagged_buffer, "note"),
        (in_grown_buffer, "the forward replaces right"),
        (in_new_buffer, "late: the forward makes or removes this buffer"),
        (in_empty_buffer, "none"),
        (in_data_of_the_first, "none"),
        (in_parameter, "nothing"),
        (in_module, "late"),
    ],
)
def test_what_only_the_first_forward_makes_is_refused_with_advice_that_helps(
    act: Callable[[Any, Tensor], Tensor], name: str
) -> None:
    model = Kept(act)
    model.register_buffer("none", None)
    model.register_parameter("nothing", None)
    names = {*model.state_dict(), *vars(model)}
    with pytest.raises(CaptureError, match=rf"^{name}.*run the model once before it is compiled"):
        proven_capture(model, CALL)
    assert {*model.state_dict(), *vars(model)} == names
    model(*CALL.args)
    exact(model, X)


class Count:
    """Counts calls; most have the same answer."""

    calls = 0

    def is_late(self) -> bool:
        self.calls += 1
        return self.calls > 1000


class Warming(nn.Module):
    """Scales its input once `is_late` says so, which is not while it is compiled."""

    def __init__(self, is_late: Callable[[], bool]) -> None:
        super().__init__()
        self.linear, self.is_late = nn.Linear(WIDTH, WIDTH), is_late

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * 2 if self.is_late() else x)


TOTAL, SHAPES, TIMES = 0, deque[int](), {"calls": 0}


def counted_in_a_global() -> bool:
    global TOTAL
    TOTAL += 1
    return TOTAL > 1000


def counted_in_a_deque() -> bool:
    SHAPES.append(0)
    return len(SHAPES) > 1000


def counted_in_a_dict() -> bool:
    TIMES["calls"] += 1
    return TIMES["calls"] > 1000


def counted_in_a_class() -> bool:
    Count.calls += 1
    return Count.calls > 1000


def counted_in_a_closure() -> Callable[[], bool]:
    calls = 0

    def is_late() -> bool:
        nonlocal calls
        calls += 1
        return calls > 1000

    return is_late


def counted_on_a_function() -> bool:
    counted_on_a_function.calls = 1 + getattr(counted_on_a_function, "calls", 0)  # type: ignore[attr-defined]
    return counted_on_a_function.calls > 1000  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize(
    ("is_late", "name"),
    [
        (Count().is_late, "is_late.__self__.calls"),
        (counted_in_a_global, f"{__name__}.TOTAL"),
        (counted_in_a_deque, f"{__name__}.SHAPES"),
        (counted_in_a_dict, f"{__name__}.TIMES"),
        (counted_in_a_class, "Count.calls"),
        (counted_in_a_closure(), "calls in counted_in_a_closure.<locals>.is_late"),
        (counted_on_a_function, "counted_on_a_function.calls"),
    ],
)
def test_state_outside_modules_that_the_forward_changes(
    is_late: Callable[[], bool], name: str
) -> None:
    """No step that is compared shows it."""
    with pytest.raises(CaptureError, match=rf"^{re.escape(name)}: the forward changes it"):
        proven_capture(Warming(is_late), CALL)


class Counted(nn.Module):
    """Goes by its counter, which no step that is compared shows."""

    def __init__(self, counter: Any, read: Callable[[Any], float] = next) -> None:
        super().__init__()
        self.linear, self.counter, self.read = nn.Linear(WIDTH, WIDTH), counter, read

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if self.read(self.counter) > 1000 else 1.0)


def numbers() -> Iterator[int]:
    number = 0
    while True:
        yield number
        number += 1


def used(counter: Iterator[int]) -> Iterator[int]:
    next(counter)
    return counter


@pytest.mark.parametrize(
    "make",
    [
        count,
        lambda: iter(range(9999)),
        lambda: iter([1] * 99),
        lambda: cycle([0, 1, 2]),
        lambda: used(cycle([0, 1, 2])),
        lambda: map(abs, count()),
        numbers,
        lambda: used(numbers()),
    ],
)
def test_an_iterator_that_the_forward_advances(make: Callable[[], Any]) -> None:
    with pytest.raises(CaptureError, match=r"^counter: the forward changes it"):
        proven_capture(Counted(make()), CALL)


def test_iterators_that_the_forward_does_not_advance() -> None:
    for each in (count(), numbers(), iter([1])):
        proven_capture(Counted(each, lambda counter: len(str(counter))), CALL)


def counted_on_a_weight(weight: Any) -> float:
    weight.calls = getattr(weight, "calls", 0) + 1
    return float(weight.calls)


def test_an_attribute_of_a_parameter_that_the_forward_changes() -> None:
    model = Counted(None)
    model.read = lambda _: counted_on_a_weight(model.linear.weight)
    with pytest.raises(CaptureError, match=r"^linear.weight.calls: the forward changes it"):
        proven_capture(model, CALL)


class Turns:
    """Is True at every other call."""

    now = False

    def __call__(self) -> bool:
        self.now = not self.now
        return self.now


class Alternating(nn.Module):
    """Goes by what takes turns, in its values or only in its gradients."""

    def __init__(self, is_on: Callable[[], bool], in_values: bool) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.is_on, self.in_values = is_on, in_values

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        if self.is_on():
            hidden = hidden * 2 if self.in_values else hidden.detach()
        return self.last(hidden)


@pytest.mark.parametrize("in_values", [True, False])
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Turns, "^is_on.now: the forward changes it"),
        (lambda: partial(next, cycle([True, False])), "^is_on.args: the forward changes it"),
        (lambda: iter_of_turns().__next__, "such as a place in an iterator"),
    ],
)
def test_what_takes_turns_is_told_as_state(
    make: Callable[[], Callable[[], bool]], reason: str, in_values: bool
) -> None:
    with pytest.raises(CaptureError, match=reason):
        proven_capture(Alternating(make(), in_values), CALL)


def iter_of_turns() -> Iterator[bool]:
    while True:
        yield True
        yield False


class Scratch:
    """Where a forward keeps what its layers share."""

    mask: Tensor | None = None


class SharedScratch(nn.Module):
    """A mask that each forward sets anew, two layers that read it, and `set_back` at the end."""

    def __init__(self, scratch: Any, set_back: Callable[[Any], None]) -> None:
        super().__init__()
        self.scratch, self.set_back = scratch, set_back
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.scratch.mask = (x > 0).float()
        hidden = self.two(self.one(x) * self.scratch.mask) * self.scratch.mask
        self.set_back(self.scratch)
        return hidden


class Module(nn.Module):
    """A scratch that is a module."""

    mask: Tensor | None = None


def leave(_: Any) -> None:
    """Leave the mask behind."""


@pytest.mark.parametrize(
    ("kind", "set_back"),
    [
        (Scratch, lambda scratch: setattr(scratch, "mask", None)),
        (Scratch, lambda scratch: delattr(scratch, "mask")),
        (Module, leave),
    ],
)
def test_the_ways_that_a_refused_scratch_is_told_of(
    kind: type, set_back: Callable[[Any], None]
) -> None:
    with pytest.raises(CaptureError, match=r"^scratch.mask: .* set back at its end"):
        proven_capture(SharedScratch(Scratch(), leave), CALL)
    steps_alike(SharedScratch(kind(), set_back), [X[:4], X[1:5]])


LOG: dict[str, Any] = {"calls": 0, "times": []}


def log(*_: Any) -> None:
    LOG["calls"] += 1
    LOG["times"].append(perf_counter())


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (0, lambda model: model.kept + 1),
        ([], lambda model: [*model.kept, perf_counter()]),
        (None, lambda model: perf_counter()),
        ("", lambda model: f"{model.kept}."),
    ],
)
def test_a_refused_log_is_told_of_hooks_that_run_in_each_step(
    value: Any, note: Callable[[Any], Any]
) -> None:
    class Logging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kept = nn.Linear(WIDTH, WIDTH), value

        def forward(self, x: Tensor) -> Tensor:
            self.kept = note(self)
            return self.linear(x)

    with pytest.raises(CaptureError, match=r"^kept \(.*forward hook of a module of torch.nn"):
        proven_capture(Logging(), CALL)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].register_forward_hook(log)
    pipeline = pipecompile(model, X[:4], k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    LOG["calls"], LOG["times"] = 0, []
    pipeline.step(X[:4])
    assert LOG["calls"] == len(LOG["times"]) == 2


@pytest.mark.parametrize(("recompute", "calls"), [("none", 2), ("stage", 4)])
def test_hooks_of_a_node_run_again_where_it_is_recomputed(recompute: str, calls: int) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].register_forward_hook(log)
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "recompute": recompute}
    pipeline = pipecompile(model, X[:4], loss_fn=mean_square, **options)
    LOG["calls"] = 0
    pipeline.step(X[:4])
    assert LOG["calls"] == calls


def test_a_parameter_that_a_module_writes_to_is_as_before() -> None:
    model = nn.Sequential(nn.Embedding(10, WIDTH, max_norm=0.5))
    call = Arguments((torch.arange(4),), {})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured_model, module, _ = proven_capture(model, call)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    written = with_autograd_contexts(module)(*call.args)[0]
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.load_state_dict(before)
    assert torch.equal(written, model(*call.args))
    assert captured_model.method == "recorded"


class Ranged(nn.Module):
    """As observers of quantisation do: buffers get their shape in the first forward."""

    def __init__(self, resize: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("least", torch.ones(0))
        self.resize = resize

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        with torch.no_grad():
            self.resize(self.least, x.amin(0))
        return x - self.least


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize(
    "resize",
    [
        lambda buffer, value: buffer.resize_(value.shape).copy_(value),
        lambda buffer, value: buffer.resize_as_(value).copy_(value),
        lambda buffer, value: torch.amin(value[None], 0, out=buffer),
        lambda buffer, value: buffer.data.resize_(value.shape).copy_(value),
        lambda buffer, value: buffer.set_(value.clone()),
    ],
)
def test_a_buffer_that_the_first_forward_resizes(
    resize: Callable[[Tensor, Tensor], Any], *, self_check: bool
) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Ranged(resize), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError) as caught:
        pipecompile(model, X, k=2, leaf=["Ranged"], loss_fn=mean_square, self_check=self_check)
    assert "\n" not in str(caught.value)
    assert model[1].least.shape == (0,)
