"""Caches of functions that a forward calls hold no fake tensors, and become no constants."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from traps import CALL, WIDTH, Two, X
from zoo import called
from zoo.exact import exact

from pipecompile import pipecompile
from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.capture import capture
from tests.plain_loop import mean_square, steps_alike


def test_fake_tensor_left_in_an_lru_cache() -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + positions(WIDTH)

    positions.cache_clear()
    exact(Trap(), X)
    assert type(positions(WIDTH)) is Tensor
    exact(Trap(), X)  # and one that is filled is not baked into the graph
    assert "arange" in called(capture(Trap(), CALL).graph)


@lru_cache
def positions(width: int) -> Tensor:
    return torch.arange(width).float()


@lru_cache(maxsize=1)
def only_one(width: int) -> Tensor:
    return torch.arange(width).float()


@cache
def several(width: int, start: float = 0.0) -> dict[str, tuple[Tensor, ...]]:
    return {"both": (torch.full((width,), start), torch.ones(width))}


class Cached(Two):
    """Its tensors come from caches of all kinds."""

    @lru_cache  # noqa: B019
    def scale(self, width: int) -> Tensor:
        return torch.zeros(width)

    def forward(self, x: Tensor) -> Tensor:
        left, right = several(WIDTH, start=2.0)["both"]
        return self.first(x) * only_one(WIDTH) + left * right + self.scale(WIDTH)


@pytest.mark.parametrize("filled", [False, True])
def test_tensors_in_caches_of_all_kinds(filled: bool) -> None:
    """No tensor in a cache is left fake, and none becomes a constant of the graph."""
    model, caches = Cached(), (only_one, several, Cached.scale)
    for each in caches:
        each.cache_clear()
    if filled:
        model(X)
    graph = capture(model, CALL).graph
    assert [each.cache_info().currsize for each in caches] == [int(filled)] * 3
    assert type(only_one(WIDTH)) is Tensor
    assert {"arange", "full", "ones", "zeros"} <= set(called(graph))
    exact(model, X)


OFFSET = torch.arange(WIDTH).float()


@lru_cache
def noise(width: int) -> Tensor:
    return torch.randn(width)


@cache
def dropped(width: int) -> Tensor:
    return nn.Dropout(0.5)(torch.ones(width))


@lru_cache
def norm(model: nn.Module) -> Tensor:
    return model.first.weight.detach().norm()  # type: ignore[union-attr, operator]


@lru_cache
def of_data(model: nn.Module) -> Tensor:
    return model.first.weight.data.T.sum(0)  # type: ignore[union-attr, operator]


@lru_cache
def layer(model: nn.Module) -> Tensor:
    return model.first(torch.ones(WIDTH)).detach()  # type: ignore[operator]


@lru_cache
def of_buffer(model: nn.Module) -> Tensor:
    return model.total * 2  # type: ignore[operator]


@lru_cache
def of_attribute(model: Any) -> Tensor:
    return model.hidden.detach().mean(0)  # type: ignore[no-any-return]


@lru_cache
def given(weight: Tensor) -> Tensor:
    return weight.detach().sum(0)


@lru_cache
def shifted(width: int, *, by: float = 1.0) -> Tensor:
    return positions(width) + OFFSET[:width] * by


@lru_cache
def doubled(value: Tensor) -> Tensor:
    return value * 2


class Using(Two):
    """It adds what `extra` gives."""

    def __init__(self, extra: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.extra = extra
        self.register_buffer("total", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        self.hidden = self.first(x)
        return self.hidden + self.extra(self, x)


CACHES = (
    *(positions, only_one, several, noise, dropped, norm, of_data, layer, of_buffer),
    *(of_attribute, given, shifted, doubled),
)
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a draw": (lambda *_: noise(WIDTH), "noise has a cache .* draws random numbers"),
    "a dropout": (lambda *_: dropped(WIDTH), "dropped has a cache .* draws random numbers"),
    "a weight": (lambda model, _: norm(model), "norm has a cache .* reads a parameter"),
    "its data": (lambda model, _: of_data(model), "of_data has a cache .* reads a parameter"),
    "a layer": (lambda model, _: layer(model), "layer has a cache .* reads a parameter"),
    "a buffer": (lambda model, _: of_buffer(model), "of_buffer has a cache .* a buffer"),
    "a value of the forward": (
        lambda model, _: of_attribute(model),
        "of_attribute has a cache .* a tensor that it is not given",
    ),
    "a given weight": (
        lambda model, _: given(model.first.weight),
        "given has a cache .* reads a parameter",
    ),
    "written to": (
        lambda *_: only_one(WIDTH).add_(1),
        "writes to what a function with a cache .* returned",
    ),
    "written to by a view": (
        lambda *_: shifted(WIDTH)[:].mul_(2),
        "writes to what a function with a cache .* returned",
    ),
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_cached_result_that_another_call_would_not_give_is_refused(
    name: str, filled: bool
) -> None:
    extra, text = REFUSED[name]
    for each in CACHES:
        each.cache_clear()
    model = Using(extra)
    if filled:
        model(X)
    before = [each.cache_info().currsize for each in CACHES]
    with pytest.raises(CaptureError, match=text):
        capture(model, CALL)
    assert [each.cache_info().currsize for each in CACHES] == before


ALLOWED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of numbers": lambda *_: positions(WIDTH),
    "with keywords": lambda *_: shifted(WIDTH, by=2.0),
    "of a shape": lambda _, x: positions(x.shape[1]),
    "of what it is given": lambda model, _: doubled(model.hidden),
    "a copy that is written to": lambda *_: positions(WIDTH).clone().add_(1),
}


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("name", ALLOWED)
def test_a_cached_result_that_is_always_the_same_is_taken(name: str, filled: bool) -> None:
    for each in CACHES:
        each.cache_clear()
    model = Using(ALLOWED[name])
    if filled:
        model(X)
    exact(model, X)


FACTOR = torch.ones(WIDTH)


@lru_cache
def times_factor(width: int) -> Tensor:
    return torch.arange(width) * FACTOR


@lru_cache
def part_of_factor(width: int) -> Tensor:
    return {"part": FACTOR}["part"][:width].square()


@pytest.mark.parametrize(
    "made", [lambda: times_factor(WIDTH), lambda: doubled(FACTOR), lambda: part_of_factor(WIDTH)]
)
def test_a_cached_result_of_a_tensor_that_changes_is_refused_then(
    made: Callable[[], Tensor],
) -> None:
    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x) + made())

    for cached in (times_factor, doubled, part_of_factor):
        cached.cache_clear()
    pipeline = pipecompile(Trap(), X, k=2, microbatches=len(X), costs="flops", loss_fn=mean_square)
    pipeline.step(X, None)
    try:
        FACTOR.add_(1.0)
        with pytest.raises(InputError, match=r"has a cache .* and reads a tensor that has changed"):
            pipeline.step(X, None)
    finally:
        FACTOR.sub_(1.0)


class Scaling(torch.autograd.Function):
    """A function that takes its factors out of a cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * positions(WIDTH)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * positions(WIDTH)


class CachedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * positions(WIDTH)


def by_hook() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda *call: call[-1] * positions(WIDTH))
    return layer


def by_function() -> nn.Module:
    return Using(lambda _, x: Scaling.apply(x))


cached_eye, cached_ramp = lru_cache(torch.eye), lru_cache(partial(torch.arange, float(WIDTH)))


@pytest.mark.parametrize(
    "made",
    [
        by_hook,
        by_function,
        lambda: CachedLinear(WIDTH, WIDTH),
        lambda: Using(lambda _, x: x @ cached_eye(WIDTH)),
        lambda: Using(lambda _, x: x * cached_ramp()),
    ],
)
def test_what_is_called_as_it_is_leaves_no_fakes_in_caches(made: Callable[[], nn.Module]) -> None:
    for cached in (positions, cached_eye, cached_ramp):
        cached.cache_clear()
    steps_alike(nn.Sequential(nn.Linear(WIDTH, WIDTH), made()), [X], microbatches=len(X))
    assert type(positions(WIDTH)) is type(cached_eye(WIDTH)) is type(cached_ramp()) is Tensor


def test_a_loss_leaves_no_fakes_in_caches() -> None:
    positions.cache_clear()

    def loss(output: Tensor, target: Any) -> Tensor:
        return (output * positions(WIDTH)).square().mean()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    steps_alike(model, [X], microbatches=len(X), loss_fn=loss, sample_target=X, self_check=False)
    assert type(positions(WIDTH)) is Tensor


def test_a_compile_leaves_in_caches_what_they_held() -> None:
    """The objects themselves, for calls of all kinds."""
    factor = 2.0

    def made(*sizes: Any, by: float = 1.0, text: str = "") -> Any:
        return {text: torch.full((WIDTH,), by * factor)} if text else torch.ones(WIDTH) * by

    kinds = [lru_cache(made), cache(made), lru_cache(typed=True)(made), lru_cache(3)(made)]
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((WIDTH,), {}),
        ((WIDTH, "a"), {}),
        ((1,), {"by": 3.0, "text": "b"}),
    ]
    for each in kinds:
        held = [each(*args, **kwargs) for args, kwargs in calls]
        model = Using(lambda *_, each=each: each(WIDTH))  # type: ignore[misc]
        assert "ones" in called(capture(model, CALL).graph)
        assert each.cache_info().currsize == len(calls)
        again = [each(*args, **kwargs) for args, kwargs in calls]
        assert all(one is other for one, other in zip(held, again, strict=True))


@cache
def captured(width: int) -> fx.Graph:
    return capture(Using(lambda *_: positions(width)), CALL).graph


def test_a_cached_function_may_capture_a_model() -> None:
    assert "arange" in called(captured(WIDTH))


def test_a_cache_that_holds_other_results_gets_no_fake_tensors() -> None:
    @lru_cache
    def positions_of(width: int) -> Tensor:
        return torch.arange(width).float()

    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + positions_of(WIDTH)

    before = positions_of(WIDTH + 1)
    exact(Trap(), X)
    assert positions_of(WIDTH + 1) is before
    assert type(positions_of(WIDTH)) is Tensor


def test_caches_that_come_and_go_between_captures() -> None:
    for scale in (1.0, 2.0, 3.0):
        model = scaled_by_a_cache_of_its_own(scale)
        exact(model, X)
        # A cache that was not found would be filled, and its tensor a constant.
        assert "full" in called(capture(model, CALL).graph)


def scaled_by_a_cache_of_its_own(scale: float) -> nn.Module:
    @lru_cache
    def scale_of(width: int) -> Tensor:
        return torch.full((width,), scale)

    class Trap(Two):
        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) * scale_of(WIDTH)

    model = Trap()
    model(X)
    return model
