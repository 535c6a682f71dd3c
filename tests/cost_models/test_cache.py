"""What was measured is reused for the same surroundings only, and never from a damaged file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.cost_models.cache import CachedCost, cache_folder, cached_costs, store_costs
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.graph import CostGraph

SURROUNDINGS = {"graph": "abc", "device": "a processor", "threads": "1"}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PIPECOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def costs(forward_ns: int) -> dict[str, CachedCost]:
    return {
        "a": CachedCost(
            forward_ns=forward_ns,
            backward_ns=2,
            backward_input_ns=1,
            backward_weight_ns=1,
            workspace_bytes=None,
        )
    }


def test_what_is_kept_is_recalled_as_it_was(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    caplog.set_level("INFO")
    assert cached_costs(SURROUNDINGS) is None
    store_costs(SURROUNDINGS, costs(1))
    assert caplog.text == ""
    assert cached_costs(SURROUNDINGS) == costs(1)
    assert "reused" in caplog.text
    store_costs(SURROUNDINGS, costs(2))
    assert cached_costs(SURROUNDINGS) == costs(2)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("part", SURROUNDINGS)
def test_other_surroundings_have_other_costs(part: str) -> None:
    store_costs(SURROUNDINGS, costs(1))
    assert cached_costs({**SURROUNDINGS, part: "another"}) is None


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "not JSON", data[: len(data) // 2]
    yield "no text", b"\xff\xfe"
    yield "another time", data.replace(b'"forward_ns": 1', b'"forward_ns": 7')
    yield "another format", data.replace(b"measured-costs/2", b"measured-costs/1")
    yield "other surroundings", data.replace(b"a processor", b"another one")
    yield "an unknown field", data.replace(b'"digest"', b'"extra": 1,\n "digest"')


def test_a_damaged_entry_counts_as_none(caplog: pytest.LogCaptureFixture, folder: Path) -> None:
    store_costs(SURROUNDINGS, costs(1))
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for what, data in damaged(whole):
        assert data != whole, what
        path.write_bytes(data)
        assert cached_costs(SURROUNDINGS) is None, what
        assert "measured anew" in caplog.text, what


def test_a_folder_that_cannot_be_written_is_no_failure(
    caplog: pytest.LogCaptureFixture, folder: Path
) -> None:
    folder.write_text("a file")
    store_costs(SURROUNDINGS, costs(1))
    assert "not cached" in caplog.text


def test_where_entries_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECOMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/pipecompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/pipecompile")


def measured(target: Target, *, fresh: bool = False, **options: Any) -> CostGraph:
    chosen = options_for(target, k=2, microbatches=4, costs="measured", **options)
    return cost_graph(
        target, "measured", 4, capture_target(target, chosen, verify=False), fresh=fresh
    )


class AskedError(Exception):
    """Instead of measuring."""


def is_known(target: Target) -> bool:
    """Whether the costs of `target` come without measuring."""
    with patch("pipecompile.cost_models.measured.Measured.cost", side_effect=AskedError):
        try:
            measured(target)
        except AskedError:
            return False
    return True


@contextmanager
def with_other(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def set_by(function: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


SWITCHES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "threads": lambda: set_by(
        torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()
    ),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "float32 products": lambda: set_by(torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": lambda: set_by(torch.use_deterministic_algorithms, True, False),
    "cudnn.benchmark": lambda: with_other(torch.backends.cudnn, "benchmark", True),
    "cudnn.allow_tf32": lambda: with_other(torch.backends.cudnn, "allow_tf32", False),
    "mkldnn": lambda: torch.backends.mkldnn.flags(enabled=False),
}


def small(
    loss: Any = nn.functional.mse_loss, targets: Any = ..., model: nn.Module | None = None
) -> Target:
    sample = torch.ones(4, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)) if model is None else model
    return Target(model, Arguments((sample,), {}), loss, sample if targets is ... else targets)


def test_times_are_reused_and_all_else_is_fresh() -> None:
    before = measured(small())
    assert is_known(small())
    assert measured(small()) == before
    grouped = measured(small(), no_split=[["0", "1"]])
    assert [node.group for node in grouped.nodes] != [node.group for node in before.nodes]
    assert [node.forward_ns for node in grouped.nodes] == [node.forward_ns for node in before.nodes]


def test_fresh_costs_are_measured() -> None:
    measured(small())
    with (
        patch("pipecompile.cost_models.measured.Measured.cost", side_effect=AskedError),
        pytest.raises(AskedError),
    ):
        measured(small(), fresh=True)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("switch", SWITCHES)
def test_costs_depend_on_switches(switch: str) -> None:
    measured(small())
    with SWITCHES[switch]():
        assert not is_known(small())


def test_costs_depend_on_mode_loss_and_targets() -> None:
    measured(small())
    other = small()
    other.model.eval()
    assert not is_known(other)
    assert not is_known(small(targets=None))
    assert not is_known(small(targets=torch.ones(4, 6, dtype=torch.float64)))


def powered(exponent: float, layer: nn.Module | None = None) -> Any:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** exponent).mean() * (
            1 if layer is None else len(list(layer.parameters()))
        )

    return loss


def nested(other: bool) -> Any:
    if other:
        return lambda output, target: (lambda error: (error**4).mean())(output - target)
    return lambda output, target: (lambda error: (error**2).mean())(output - target)


def defaulted(exponent: int) -> Any:
    return lambda output, target, power=exponent: ((output - target) ** power).mean()


class Blend(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return torch.stack([part(output, target) for part in self.parts]).sum()


LOSSES: dict[str, Callable[[bool], Any]] = {
    "function": lambda other: nn.functional.l1_loss if other else nn.functional.mse_loss,
    "module": lambda other: nn.SmoothL1Loss(beta=0.5 if other else 1.0),
    "submodule": lambda other: Blend(nn.MSELoss(), nn.HuberLoss(delta=2.0 if other else 1.0)),
    "closure": lambda other: powered(4.0 if other else 2.0),
    "enclosed module": lambda other: powered(2.0, nn.Linear(2, 2, bias=other)),
    "nested code": nested,
    "default": lambda other: defaulted(4 if other else 2),
    "partial": lambda other: partial(nn.functional.huber_loss, delta=2.0 if other else 1.0),
}


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("kind", LOSSES)
def test_costs_depend_on_the_loss(kind: str) -> None:
    make = LOSSES[kind]
    measured(small(make(False)))
    assert is_known(small(make(False)))
    assert not is_known(small(make(True)))


def scaled_mean(output: Tensor, scale: float) -> Tensor:
    return output.mean() * scale


def test_a_loss_without_target_tensors_counts_too() -> None:
    measured(small(nn.functional.mse_loss, None))
    assert not is_known(small(scaled_mean, 2.0))
    measured(small(scaled_mean, 2.0))
    assert is_known(small(scaled_mean, 2.0))
    assert not is_known(small(scaled_mean, 3.0))


class WithState:
    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean()


def test_a_loss_that_cannot_be_described_is_measured_each_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    target = small(WithState())
    measured(target)
    assert "not cached: the loss uses an object of " in caplog.text
    assert not is_known(target)
