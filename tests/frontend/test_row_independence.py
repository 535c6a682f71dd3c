"""Rows that know of each other are refused: dimension 0 may not be the batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pipecompile.errors import InputError
from pipecompile.frontend.row_independence import refuse_dependent_rows
from pipecompile.frontend.signature import Arguments


class Mixed(nn.Module):
    """A layer, and a function of its output."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.function = function

    def forward(self, value: Tensor) -> Any:
        return self.function(self.layer(value))


class Counting(nn.Module):
    """Divides by a running mean, which it updates in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(6))

    def forward(self, value: Tensor) -> Tensor:
        self.mean.lerp_(value.abs().mean(0), 0.1)
        return value / self.mean


class Switching(nn.Module):
    """Changes the sign of every other result, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("is_positive", torch.tensor(True))

    def forward(self, value: Tensor) -> Tensor:
        self.is_positive.logical_not_()
        return torch.where(self.is_positive, value, -value)


class Drawing(nn.Module):
    """Scales by what no generator of torch gives."""

    def forward(self, value: Tensor) -> Tensor:
        return value * int.from_bytes(os.urandom(8), "big")


class Truncating(nn.Module):
    """Draws until all numbers are small."""

    def forward(self, value: Tensor) -> Tensor:
        noise = torch.randn_like(value)
        while (noise.abs() > 0.4).any():
            noise = torch.where(noise.abs() > 0.4, torch.randn_like(noise), noise)
        return value + noise


class Contrasting(nn.Module):
    """Compares each sample with each."""

    def forward(self, value: Tensor) -> Tensor:
        return value @ value.T


class Moderate(nn.Module):
    """Takes no large numbers."""

    def forward(self, value: Tensor) -> Tensor:
        assert value.abs().max() < 20
        return value * 2


def with_a_hook_for_one_call() -> nn.Module:
    """A layer whose first result is doubled."""
    layer = nn.Linear(6, 6)

    def doubled(_module: nn.Module, _arguments: Any, result: Tensor) -> Tensor:
        handle.remove()
        return result * 2

    handle = layer.register_forward_hook(doubled)
    return layer


def with_hooks_that_come() -> nn.Module:
    """A layer over rows that know of each other, whose calls leave hooks behind."""

    class Installing(nn.Linear):
        def forward(self, value: Tensor) -> Tensor:
            self.register_forward_hook(lambda *_: None)
            return super().forward(value - value.mean(0))

    return Installing(6, 6)


def with_a_hook_that_is_registered_anew() -> nn.Module:
    """A layer over rows that know of each other, whose hook comes anew in each call."""
    model = Mixed(lambda value: value - value.mean(0))

    def anew(_module: nn.Module, _arguments: Any) -> None:
        handles.pop().remove()
        handles.append(model.register_forward_pre_hook(anew))

    handles = [model.register_forward_pre_hook(anew)]
    return model


def ask(model: nn.Module, *shape: int, batch_dim: int = 0) -> None:
    torch.manual_seed(0)
    size = (4, *shape)
    first, second = (Arguments((torch.randn(size),), {}, batch_dim) for _ in range(2))
    refuse_dependent_rows(model, first, second)


DEPENDENT = {
    "lstm over time": (nn.LSTM(6, 6), (5, 6)),
    "bidirectional gru": (nn.GRU(6, 6, bidirectional=True), (5, 6)),
    "attention over rows": (Mixed(lambda v: torch.softmax(v @ v.mT, -1) @ v), (6,)),
    "centred": (Mixed(lambda v: v - v.mean(0)), (6,)),
    "cumulative": (Mixed(lambda v: v.cumsum(0)), (6,)),
    "sorted": (Mixed(lambda v: v.sort(0).values), (6,)),
    "convolved": (Mixed(lambda v: functional.avg_pool1d(v.mT, 3, 1, 1).mT), (6,)),
    "numbered": (Mixed(lambda v: v + torch.arange(len(v))[:, None]), (6,)),
    "the last row apart": (Mixed(lambda v: torch.cat([v[:-1], -v[-1:]])), (6,)),
    "the largest of all": (Mixed(lambda v: v / v.abs().max()), (6,)),
    "the length of all": (Mixed(lambda v: v / v.norm()), (6,)),
    "times their number": (Mixed(lambda v: v * len(v)), (6,)),
    "a mean of a known number": (Mixed(lambda v: (v - 1) * v.shape[0] ** -0.5), (6,)),
    "one way for many": (Mixed(lambda v: v.sin() if len(v) > 5 else v.cos()), (6,)),
    "numbered from the end": (Mixed(lambda v: v + torch.arange(-len(v), 0)[:, None]), (6,)),
    "centred, with hooks that calls leave": (with_hooks_that_come(), (6,)),
    "centred, with a hook that comes anew": (with_a_hook_that_is_registered_anew(), (6,)),
    "in a dictionary": (Mixed(lambda v: {"a": v, "b": v.flip(0)}), (6,)),
    "with an rrelu": (Mixed(lambda v: functional.rrelu(v) - v.mean(0)), (6,)),
    "with noise": (Mixed(lambda v: v - v.mean(0) + torch.randn_like(v)), (6,)),
    "with chosen rows": (Mixed(lambda v: v.cumsum(0) * torch.bernoulli(v.sigmoid())), (6,)),
    "with a dropout that is always on": (
        Mixed(lambda v: functional.dropout(v, 0.5, True) + v.flip(0)),
        (6,),
    ),
}
INDEPENDENT = {
    "linear": (Mixed(torch.tanh), (6,)),
    "batch norm": (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), (6,)),
    "batch norm without statistics": (nn.BatchNorm1d(6, track_running_stats=False), (6,)),
    "such a one without weights": (nn.BatchNorm1d(6, 1e-5, 0.1, False, False), (6,)),
    "dropout": (nn.Dropout(), (6,)),
    "chance that nobody seeds": (Drawing(), (6,)),
    "noise that is drawn until it is small": (Truncating(), (6,)),
    "lstm, batch first, with its states": (nn.LSTM(6, 6, 2, batch_first=True), (5, 6)),
    "noise in eval mode": (Mixed(lambda v: v + torch.randn_like(v)), (6,)),
    "classes drawn": (Mixed(lambda v: v * torch.multinomial(v.softmax(-1), 1)), (6,)),
    "a sample of a distribution": (
        Mixed(lambda v: torch.distributions.Normal(v, v.exp()).rsample()),
        (6,),
    ),
    "logits with gumbel noise": (Mixed(lambda v: functional.gumbel_softmax(v, hard=True)), (6,)),
    "rows in a drawn order, and back": (
        Mixed(lambda v: (order := torch.randperm(len(v)), v[order][order.argsort()])[1]),
        (6,),
    ),
    "a hook that removes itself": (with_a_hook_for_one_call(), (6,)),
    "a running mean": (Counting(), (6,)),
    "a switch": (Switching(), (6,)),
    "a scalar": (Mixed(lambda v: (v, v.mean())), (6,)),
    "what fails in eval mode": (Mixed(lambda v: v.no_such_method()), (6,)),
    "indices": (Mixed(lambda v: v.argmax(0)), (6,)),
    "a mean over the batch": (Mixed(lambda v: {"out": v, "loss": v.square().sum() / len(v)}), (6,)),
    "expanded by their number": (Mixed(lambda v: v + torch.zeros(1, 6).expand(len(v), 6)), (6,)),
    "what fails on large numbers": (Moderate(), (6,)),
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_dependent_rows_are_refused(name: str) -> None:
    model, shape = DEPENDENT[name]
    with pytest.raises(InputError, match="rows along dimension 0 are not independent"):
        ask(model, *shape)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_not(name: str) -> None:
    model, shape = INDEPENDENT[name]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.get_rng_state()
    torch.manual_seed(0)
    seeded = torch.get_rng_state()
    torch.set_rng_state(random)
    ask(model, *shape)
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), seeded)


def test_what_rows_share_is_seen_however_alike_the_samples_are() -> None:
    call = Arguments((torch.randn(4, 6),), {})
    largest = Mixed(lambda v: v / v.abs().max())
    alike = Arguments((call.args[0] * 1.001,), {})
    with pytest.raises(InputError, match="are not independent"):
        refuse_dependent_rows(Contrasting(), call, alike)
    with pytest.raises(InputError, match="with other rows beside it"):
        refuse_dependent_rows(largest, call, alike)
    with pytest.raises(InputError, match="with no rows beside it"):
        refuse_dependent_rows(Mixed(lambda v: v * len(v)), call, alike)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_rows_are_compared_along_the_dimension_that_is_given(kind: type[nn.RNNBase]) -> None:
    ask(kind(6, 6, 2), 5, 6, batch_dim=1)
    with pytest.raises(
        InputError, match=r"rows along dimension 1 .* give batch_dim=0, or transpose"
    ):
        ask(kind(6, 6, 2, batch_first=True), 5, 6, batch_dim=1)


class LastOfTime(nn.Module):
    """Reads (time, batch, features) and returns (batch, features)."""

    def __init__(self, pool: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.pool = nn.LSTM(6, 6), pool

    def forward(self, value: Tensor) -> Any:
        return self.pool(self.layer(value)[0])


@pytest.mark.parametrize(
    "pool",
    [
        lambda states: states[-1],
        lambda states: states.mean(0),
        lambda states: states.amax(0),
        lambda states: (states.softmax(0) * states).sum(0),
    ],
)
def test_a_model_without_an_output_for_each_row_is_refused(
    pool: Callable[[Tensor], Tensor],
) -> None:
    first, second = (Arguments((torch.randn(4, 5, 6),), {}) for _ in range(2))
    with pytest.raises(InputError, match=r"for any number of rows .*give batch_dim=1"):
        refuse_dependent_rows(LastOfTime(pool), first, second)
    # A loss is a number, and what does not depend on rows may have any shape.
    refuse_dependent_rows(LastOfTime(lambda states: states.mean()), first, second)
    refuse_dependent_rows(LastOfTime(lambda states: states.new_ones(5, 6)), first, second)


def test_a_model_that_returns_its_loss_may_return_statistics() -> None:
    first, second = (Arguments((torch.randn(4, 5, 6),), {}) for _ in range(2))
    for pool in (
        lambda states: {"loss": states.square().mean(), "usage": states.detach().mean((0, 1))},
        lambda states: states.square().mean().reshape(1),
    ):
        refuse_dependent_rows(LastOfTime(pool), first, second)
    # An auxiliary loss says nothing of where the other output has its rows.
    beside = LastOfTime(lambda states: (states[-1], states.square().mean()))
    with pytest.raises(InputError, match="give batch_dim=1"):
        refuse_dependent_rows(beside, first, second)
    stacked = LastOfTime(lambda states: torch.stack([states.mean(), states.square().mean()]))
    with pytest.raises(InputError, match="return losses apart, each as one number"):
        refuse_dependent_rows(stacked, first, second)


def test_the_refusal_names_the_way() -> None:
    with pytest.raises(InputError, match="If the batch is dimension 1, give batch_dim=1, or tran"):
        ask(nn.LSTM(6, 6), 5, 6)
    calls = [
        Arguments((torch.randn(4, 5, 6), torch.ones(4)), {}, {"x": 0, "scale": 0}) for _ in "ab"
    ]
    with pytest.raises(InputError, match=r"not independent.* Say with batch_dim= which dimension"):
        refuse_dependent_rows(Scaled(), *calls)


class Shared(nn.Module):
    """Computes with what has no rows."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor, shared: Tensor) -> Tensor:
        return self.function(value, shared)


SHARED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "a temperature": (lambda value, shared: value / shared, torch.tensor(2.0)),
    "a time": (lambda value, shared: value + shared.sin(), torch.tensor(0.3)),
    "a mix": (lambda value, shared: value.lerp(value.tanh(), shared), torch.tensor(0.5)),
    "weights of columns": (lambda value, shared: value * shared, torch.arange(1.0, 7.0)),
    "as many as the rows": (lambda value, shared: value * shared.sum(), torch.rand(4)),
    "an additive mask": (lambda value, shared: (value + shared).softmax(-1), -torch.ones(6, 6)[0]),
    "a matrix": (lambda value, shared: value @ shared, torch.ones(6, 3)),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_has_no_rows_is_the_same_beside_other_rows(name: str) -> None:
    function, shared = SHARED[name]
    dims = {"value": 0, "shared": None}
    calls = [Arguments((torch.randn(4, 6), shared), {}, dims) for _ in "ab"]
    refuse_dependent_rows(Shared(function), *calls)
    with pytest.raises(InputError, match="not independent"):
        refuse_dependent_rows(Shared(lambda a, b: function(a, b).cumsum(0)), *calls)


class Scaled(nn.Module):
    """Sums over the rows."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x.cumsum(0) * scale[:, None, None]


ALONG: dict[str, Callable[[Tensor, int, float], Tensor]] = {
    "centred": lambda v, dim, share: v - share * v.mean(dim, keepdim=True),
    "rolled": lambda v, dim, share: v + share * v.roll(1, dim),
    "flipped": lambda v, dim, share: v + share * v.flip(dim),
    "softmax": lambda v, dim, share: v + share * v.softmax(dim),
    "cumulative": lambda v, dim, share: v + share * v.cumsum(dim),
    "largest": lambda v, dim, share: v + share * v.amax(dim, keepdim=True),
}


@given(st.sampled_from(sorted(ALONG)), st.integers(0, 2), st.integers(0, 2), st.floats(0.3, 3))
def test_what_mixes_along_the_batch_is_refused_and_along_others_not(
    name: str, dim: int, batch_dim: int, share: float
) -> None:
    torch.manual_seed(0)
    model = Mixed(lambda value: ALONG[name](value, dim, share))
    batches = (torch.randn(4, 5, 6).movedim(0, batch_dim) for _ in range(2))
    calls = [Arguments((batch,), {}, batch_dim) for batch in batches]
    # The layer before it mixes along the last dimension.
    model.layer = nn.Identity()
    if dim != batch_dim:
        refuse_dependent_rows(model, *calls)
        return
    with pytest.raises(InputError, match="not independent"):
        refuse_dependent_rows(model, *calls)


class TimeMajor(nn.Module):
    """Reads (time, batch, features); `last` is its last layer, `drops` the share that it drops."""

    def __init__(self, drops: float, last: nn.Module, *, masks: bool = False) -> None:
        super().__init__()
        self.cells, self.norm = nn.LSTM(6, 6), nn.BatchNorm1d(6)
        self.drop, self.last, self.masks = nn.Dropout(drops), last, masks

    def forward(self, value: Tensor) -> Tensor:
        states = self.drop(self.cells(value)[0])
        logits = self.last(self.norm(states.transpose(1, 2)).transpose(1, 2))
        return logits.masked_fill(torch.arange(6) > 4, -torch.inf) if self.masks else logits


def of_zeros() -> nn.Linear:
    layer = nn.Linear(6, 6)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@pytest.mark.parametrize(
    "model",
    [
        lambda: TimeMajor(0.0, nn.Identity()),
        lambda: TimeMajor(0.1, nn.Identity()),
        lambda: TimeMajor(0.1, of_zeros()),
        lambda: TimeMajor(0.1, nn.Identity(), masks=True),
        lambda: TimeMajor(0.0, of_zeros(), masks=True),
        lambda: nn.TransformerEncoderLayer(6, 2),  # batch_first is False, and it drops 10 %
    ],
)
def test_rows_are_checked_whatever_a_model_drops_masks_or_begins_with(
    model: Callable[[], nn.Module],
) -> None:
    """In train mode; a refusal leaves statistics and the generator as they were."""
    torch.manual_seed(0)
    asked = model().train()
    before = {name: value.clone() for name, value in asked.state_dict().items()}
    calls = [Arguments((torch.randn(3, 5, 6),), {}) for _ in range(2)]
    state = torch.get_rng_state()
    with pytest.raises(InputError, match="are not independent"):
        refuse_dependent_rows(asked, *calls)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in asked.state_dict().items())
    assert asked.training
