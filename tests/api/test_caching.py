"""What was measured is reused for the same surroundings only, and never from a damaged file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pipecompile.api import costing
from pipecompile.api.caching import cache_folder, remembered
from pipecompile.api.compile import capture_target, options_for
from pipecompile.api.target import Target
from pipecompile.ir.graph import CostGraph, Node
from tests.zoo import example

SURROUNDINGS = {"graph": "abc", "device": "a processor", "threads": "1"}


def graph(forward_ns: int) -> CostGraph:
    node = Node(name="a", forward_ns=forward_ns, backward_ns=2, parameter_bytes=0, saved_bytes=0, group=None)
    return CostGraph(nodes=(node,), tensors=())


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PIPECOMPILE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def recalled(forward_ns: int, surroundings: dict[str, str] = SURROUNDINGS, *, fresh: bool = False) -> int:
    return remembered(surroundings, lambda: graph(forward_ns), fresh=fresh).nodes[0].forward_ns


def test_the_same_surroundings_are_measured_once(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert recalled(1) == 1
    assert "reused" not in capsys.readouterr().err
    assert recalled(2) == 1
    assert "reused" in capsys.readouterr().err
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("part", SURROUNDINGS)
def test_other_surroundings_are_measured(part: str) -> None:
    recalled(1)
    assert recalled(2, {**SURROUNDINGS, part: "another"}) == 2


def test_fresh_costs_take_the_place_of_the_old(capsys: pytest.CaptureFixture[str]) -> None:
    recalled(1)
    assert recalled(2, fresh=True) == 2
    assert recalled(3) == 2


def damaged(data: bytes) -> Iterator[tuple[str, bytes]]:
    yield "not JSON", data[: len(data) // 2]
    yield "no text", b"\xff\xfe"
    yield "another time", data.replace(b'"forward_ns": 1', b'"forward_ns": 7')
    yield "another format", data.replace(b"measured-costs/1", b"measured-costs/2")
    yield "other surroundings", data.replace(b"a processor", b"another one")
    yield "an unknown field", data.replace(b'"digest"', b'"extra": 1,\n "digest"')


def test_a_damaged_entry_is_measured_again(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    recalled(1)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    for what, data in damaged(whole):
        assert data != whole, what
        path.write_bytes(data)
        assert recalled(5) == 5, what
        assert "measuring again" in capsys.readouterr().err, what
        assert recalled(6) == 5, what


def test_a_folder_that_cannot_be_written_is_no_failure(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    folder.write_text("a file")
    assert recalled(1) == 1
    assert "not kept" in capsys.readouterr().err


def test_where_entries_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIPECOMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/pipecompile")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_folder() == Path("/home/somebody/.cache/pipecompile")


def keys_of(target: Target, **changed: Any) -> dict[str, str]:
    """What `cost_graph` says that the costs of `target` depend on."""
    seen: list[dict[str, str]] = []

    def note(depends_on: dict[str, str], *_: Any, **__: Any) -> CostGraph:
        seen.append(depends_on)
        return graph(1)

    options = options_for(target, k=2, microbatches=4, costs="measured", **changed)
    with patch.object(costing, "remembered", note):
        costing.cost_graph(target, "measured", 4, capture_target(target, options, verify=False))
    return seen[0]


@contextmanager
def threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def test_costs_depend_on_model_loss_groups_threads_and_autocast() -> None:
    target = example("sequential")
    before = keys_of(target)
    assert keys_of(example("sequential")) == before
    assert keys_of(Target(target.model.eval(), target.call, target.loss_fn, target.targets)) != before
    target.model.train()
    assert keys_of(Target(target.model, target.call)) != before
    assert keys_of(Target(target.model, target.call, torch.nn.functional.nll_loss, target.targets)) != before
    assert keys_of(target, groups=[["0", "1"]]) != before
    with threads(torch.get_num_threads() + 1):
        assert keys_of(target) != before
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert keys_of(target) != before
