"""Tensors with values that a forward reaches without its modules: parameters in lists, globals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_loop import mean_square
from torch import Tensor, nn
from torch.nn import functional

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import CaptureError

WIDTH = 8
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
Act = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """Two layers, between which `act` runs; a list has a parameter and a buffer too."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.one, self.two, self.act = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), act
        self.register_buffer("scale", torch.ones(WIDTH))
        self.listed, self.plain = [self.two.weight, self.scale], torch.ones(WIDTH)
        self.mask = torch.ones(WIDTH, dtype=torch.bool)
        weight = self.two.weight
        self.enclosing = lambda value: value @ weight

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.two(self.act(self, self.one(value)))


def model_of(act: Act) -> Model:
    torch.manual_seed(0)
    return Model(act)


def both(*results: Any) -> Any:
    return results[-1]


ALIASES: dict[str, Act] = {
    "a parameter in a list": lambda m, v: v @ m.listed[0],
    "one in a closure": lambda m, v: m.enclosing(v),
    "an argument of a function": lambda m, v: functional.linear(v, m.listed[0]),
    "only its shape": lambda m, v: v * m.listed[0].shape[0],
    "a buffer in a list": lambda m, v: v * m.listed[1],
    "one that is written there": lambda m, v: both(m.listed[1].mul_(0.5), v * m.scale),
    "one that is written elsewhere": lambda m, v: both(m.scale.mul_(0.5), v * m.listed[1]),
    "a mask that is inverted": lambda m, v: v * ~m.mask + v,
}


@pytest.mark.parametrize("name", ALIASES)
def test_what_is_also_held_elsewhere_trains_as_in_a_loop(name: str) -> None:
    model, plain = model_of(ALIASES[name]), model_of(ALIASES[name])
    pipeline = pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    assert torch.equal(model.scale, torch.ones(WIDTH))
    pipeline.step(X)
    for rows in X.chunk(2):
        mean_square(plain(rows), None).backward()
    assert torch.equal(model.scale, plain.scale)
    for path, parameter in pipeline.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(path).grad / 2), path


GLOBAL = torch.ones(WIDTH)

WRITES: dict[str, Act] = {
    "an attribute": lambda m, v: both(m.plain.mul_(0.5), v * m.plain),
    "an item": lambda m, v: both(m.plain.__setitem__(0, 2.0), v * m.plain),
    "an operator": lambda m, v: both(m.plain.__iadd__(1), v),
    "an output": lambda m, v: both(torch.mul(m.plain, 2, out=m.plain), v),
    "a list of several": lambda m, v: both(torch._foreach_mul_([m.plain], 2), v),
    "a global": lambda _, v: both(GLOBAL.add_(1), v),
    "with what the forward has": lambda m, v: both(m.plain.copy_(v.detach().mean(0)), v * m.plain),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_a_tensor_with_values_is_refused_before_it_is_done(name: str) -> None:
    model = model_of(WRITES[name])
    with pytest.raises(CaptureError, match="the forward writes to a tensor attribute in place"):
        pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    assert torch.equal(model.plain, torch.ones(WIDTH))
    assert torch.equal(GLOBAL, torch.ones(WIDTH))


class Counting(nn.Module):
    """Asks for data, and is one node; `write` does something to its tensors."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(WIDTH, WIDTH), write
        self.count, self.counts = torch.zeros(()), [torch.zeros(WIDTH)]
        self.table = {"count": torch.zeros(WIDTH, dtype=torch.long)}

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        if float(value.detach().abs().max()) > 1e6:
            return value * 0
        self.write(self)
        return self.linear(value)


NODE_WRITES: dict[str, Callable[[Any], Any]] = {
    "a count": lambda m: m.count.add_(1),
    "an operator": lambda m: m.count.__iadd__(1),
    "through data": lambda m: m.count.data.add_(1),
    "an item of a list": lambda m: m.counts[0].mul_(0.5).add_(1),
    "an item of a dict": lambda m: m.table["count"].add_(1),
    "an element": lambda m: m.counts[0].__setitem__(2, 5.0),
    "through a view": lambda m: m.counts[0].view(2, -1)[1].add_(1),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", NODE_WRITES)
@pytest.mark.parametrize("self_check", [True, False])
def test_a_node_that_writes_to_a_plain_tensor_is_refused(name: str, self_check: bool) -> None:
    node = Counting(NODE_WRITES[name])
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), node, nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"1\.(count|counts|table): the forward writes"):
        pipecompile(
            model,
            X,
            k=2,
            microbatches=2,
            loss_fn=mean_square,
            costs="flops",
            self_check=self_check,
        )
    assert not any(map(torch.count_nonzero, (node.count, *node.counts, node.table["count"])))


def test_a_plain_tensor_that_is_read_or_replaced_is_kept() -> None:
    node = Counting(lambda m: setattr(m, "table", {"count": m.counts[0] + m.count}))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), node, nn.Linear(WIDTH, WIDTH))
    pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops").step(X)


class Decaying(nn.Linear):
    """Is one node; `write` does something to its weight, or to its buffer, by another name."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.mine, self.table, self.write = [self.weight], {"mean": self.mean}, write

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        with torch.no_grad():
            self.write(self)
        return super().forward(value)


def decaying(write: Callable[[Any], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Decaying(write), nn.Linear(WIDTH, WIDTH))


def unchanged(model: nn.Sequential, write: Callable[[Any], Any]) -> bool:
    before = decaying(write).state_dict()
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


REFUSED: list[Callable[[Any], Any]] = [
    lambda m: m.mine[0].mul_(0.5),
    lambda m: m.mine[0].data.add_(1),
    lambda m: m.table["mean"].mul_(0.5),
    lambda m: torch._foreach_add_([m.table["mean"]], 1),
]
ALLOWED: list[Callable[[Any], Any]] = [
    lambda m: m.mine[0][0].zero_(),
    lambda m: m.table["mean"].__setitem__(0, 5.0),
]


@pytest.mark.parametrize("write", REFUSED)
def test_a_node_that_writes_to_its_state_by_another_name_is_refused(
    write: Callable[[Any], Any],
) -> None:
    model = decaying(write)
    with pytest.raises(CaptureError, match=r"^0.*: the forward writes (in place )?to"):
        pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    assert unchanged(model, write)


@pytest.mark.parametrize("write", ALLOWED)
def test_a_node_may_write_to_its_state_by_another_name_where_that_is_seen(
    write: Callable[[Any], Any],
) -> None:
    model, plain = decaying(write), decaying(write)
    pipeline = pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    assert unchanged(model, write)
    pipeline.step(X)
    for rows in X.chunk(2):
        mean_square(plain(rows), None).backward()
    assert torch.equal(model[0].mean, plain[0].mean)
    for path, parameter in pipeline.named_parameters():
        assert torch.equal(parameter, plain.get_parameter(path)), path
        assert torch.equal(parameter.grad, plain.get_parameter(path).grad / 2), path


class Held:
    """An object that holds a tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Masked(nn.Linear):
    """Is one node, and reads a tensor that it reaches by `held`."""

    def __init__(self, held: Any, read: Callable[[Any], Tensor]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.held, self.read = held, read

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return super().forward(value) * self.read(self.held)


MASK = torch.linspace(0, 1, WIDTH)


@pytest.mark.parametrize(
    ("held", "read"),
    [
        (Held(MASK), lambda held: held.value),
        (SimpleNamespace(value=MASK), lambda held: held.value),
        (Held({"mask": MASK}), lambda held: held.value["mask"]),
        ([Held(MASK)], lambda held: held[0].value),
        (Held(Held(MASK)), lambda held: held.value.value),
        (Held((MASK, MASK)), lambda held: held.value[0] * held.value[1]),
    ],
)
def test_a_node_may_read_a_tensor_in_an_object(held: Any, read: Callable[[Any], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Masked(held, read), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    pipeline = pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    pipeline.step(X)
    for rows in X.chunk(2):
        mean_square(plain(rows), None).backward()
    for path, parameter in pipeline.named_parameters():
        assert torch.equal(parameter.grad, plain.get_parameter(path).grad / 2), path


TABLE, TABLES = torch.ones(WIDTH), [torch.ones(WIDTH)]
HOLDER = SimpleNamespace(table=torch.ones(WIDTH))


class WithTable(nn.Linear):
    """Is one node; its class has a tensor."""

    table = torch.ones(WIDTH)


OUTSIDE: dict[str, Callable[[Any], Any]] = {
    "a global": lambda _: TABLE.mul_(0.5),
    "an item of a global": lambda _: TABLES[0].add_(1),
    "several at once": lambda _: torch._foreach_mul_(TABLES, 0.5),
    "as the output of an operator": lambda _: torch.mul(torch.ones(WIDTH), 2, out=TABLE),
    "of an object": lambda _: HOLDER.table.add_(1),
    "of a class": lambda _: WithTable.table.add_(1),
    "through a view": lambda _: TABLE.view(2, -1)[1].zero_(),
    "through data": lambda _: TABLE.data.zero_(),
}


class Leaf(nn.Linear):
    """Is one node; `write` does something in each forward."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.write = write

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        self.write(self)
        return super().forward(value)


class OnData(nn.Module):
    """Asks for data, and is one node; `write` does something where they are small."""

    def __init__(self, write: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.write = nn.Linear(WIDTH, WIDTH), write

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        if float(value.detach().abs().max()) < 1e6:
            self.write(self)
        return self.linear(value)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", [Leaf, OnData])
@pytest.mark.parametrize("self_check", [True, False])
def test_a_node_that_writes_to_a_tensor_outside_of_modules_is_refused(
    name: str, kind: Callable[[Any], nn.Module], self_check: bool
) -> None:
    model = nn.Sequential(kind(OUTSIDE[name]), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"the forward writes (in place )?to"):
        pipecompile(
            model,
            X,
            k=2,
            microbatches=2,
            loss_fn=mean_square,
            costs="flops",
            self_check=self_check,
        )
    for each in (TABLE, *TABLES, HOLDER.table, WithTable.table):
        assert torch.equal(each, torch.ones(WIDTH))


def test_a_node_may_write_to_tensors_that_it_makes() -> None:
    def write(_: Any) -> None:
        made = torch.zeros(WIDTH).add_(1)
        made[0] = 3.0
        torch._foreach_mul_([made, torch.tensor([1.0, 2.0])], 0.5)

    model = nn.Sequential(Leaf(write), OnData(write))
    pipecompile(model, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops").step(X)
