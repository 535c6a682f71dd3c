"""The costs of a model for several numbers of microbatches, measured at some of them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from transformers.utils.import_utils import is_tracing

from pipecompile.api.choices import requested_options
from pipecompile.api.model_costs import ModelCosts
from pipecompile.errors import InputError
from pipecompile.frontend.target import Target
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Options, Provenance
from pipecompile.planner.draft import draft
from pipecompile.report.summary import summary

BATCH = 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPECOMPILE_CACHE", str(tmp_path))


def target(model: nn.Module | None = None) -> Target:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return Target.of({"model": model or layers, "sample_input": torch.randn(BATCH, 32)}, "a test")


def options(microbatches: int, costs: str = "measured", **choices: Any) -> Options:
    return requested_options(k=2, microbatches=microbatches, costs=costs, **choices)


def times(graph: CostGraph) -> list[int]:
    return [node.forward_ns for node in graph.nodes]


def without_times(graph: CostGraph) -> CostGraph:
    free = {"forward_ns": 0, "backward_ns": 0, "backward_input_ns": 0, "backward_weight_ns": 0}
    nodes = tuple(msgspec.structs.replace(node, **free) for node in graph.nodes)
    return msgspec.structs.replace(graph, nodes=nodes, time_unit="ns", cost_notes=())


def test_bytes_are_those_of_the_size_and_times_lie_between_the_measured_ones() -> None:
    costs = ModelCosts(target(), "recorded", sizes=(1, 4))
    between = costs.graph(options(BATCH // 2))
    one, four = costs.graph(options(BATCH)), costs.graph(options(BATCH // 4))
    counted = ModelCosts(target(), "recorded").graph(options(BATCH // 2, "flops"))
    assert without_times(between) == without_times(counted)
    assert between.fingerprint not in ("", one.fingerprint, four.fingerprint)
    expected = [a + round((b - a) / 3) for a, b in zip(times(one), times(four), strict=True)]
    assert times(between) == expected
    assert sum(times(one)) > 0
    assert one.cost_notes == four.cost_notes == ()


def test_a_plan_says_that_its_times_are_interpolated() -> None:
    costs = ModelCosts(target(), "recorded", sizes=(1, 4))
    asked = options(BATCH // 2)
    plan = draft(
        costs.graph(asked),
        asked,
        graph_digest="0" * 64,
        capture=Provenance(verified=False),
        microbatch_shapes=[(2, 32)],
    )
    note = "times for 2 samples a microbatch are interpolated between those measured for 1 and 4"
    assert plan.cost_notes == (note,)
    assert (
        f"  costs      measured; times are simulated from them\n             {note}\n"
        in summary(plan)
    )


def test_costs_that_are_not_measured_are_not_interpolated() -> None:
    costs = ModelCosts(target(), "recorded", sizes=(1, 4))
    plain = ModelCosts(target(), "recorded")
    for name in ("flops", "roofline:h100"):
        asked = options(BATCH // 2, name)
        assert costs.graph(asked) == plain.graph(asked)
        costs.graphs.clear(), plain.graphs.clear()


class OtherNodes(nn.Module):
    """Microbatches of two samples run another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(x) if len(x) == 2 else self.one(x)


class ByRows(nn.Module):
    """Takes another path with more than two rows."""

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, 32) to one like it."""
        return x.tanh() if x.shape[0] > 2 else x.sin().cos()


@pytest.mark.parametrize(("model", "recorded"), [(None, 2), (ByRows(), 3)])
def test_sizes_share_a_capture_that_holds_at_them(model: nn.Module | None, recorded: int) -> None:
    # One sample is recorded by itself: torch treats sizes of 1 apart.
    shared, numbers = ModelCosts(target(model)), (1, 2, 4, 8)
    for number in numbers:
        alone = ModelCosts(shared.target).captured(options(number, "flops"))
        together = shared.captured(options(number, "flops"))
        assert (together.digest, together.provenance) == (alone.digest, alone.provenance)
        assert shared.source(options(number, "flops")).microbatch_shapes == ((BATCH // number, 32),)
    graphs = {id(captured.capture) for captured in shared.captures.values()}
    assert len(graphs) == recorded


class Masked(nn.Module):
    """Leaves out a mask of ones, where it can read it, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Tensors of shape (N, 32) and (N, 1) to one like the first."""
        masks_nothing = not is_tracing(mask) and bool(mask.all())
        return self.layer(x) if masks_nothing else self.layer(x).cos() * mask


@pytest.mark.parametrize("numbers", [(8, 4, 2, 1), (1, 2, 4, 8), (4, 2)])
def test_a_capture_with_a_mask_is_not_shared_with_a_size_without(numbers: tuple[int, ...]) -> None:
    mask = torch.ones(BATCH, 1, dtype=torch.long)
    mask[3] = 0  # in the first microbatch of four samples, not in that of two
    sample = {"x": torch.randn(BATCH, 32), "mask": mask}
    shared = ModelCosts(Target.of({"model": Masked(), "sample_input": sample}, "a test"))
    for number in numbers:
        alone = ModelCosts(shared.target).captured(options(number, "flops"))
        together = shared.captured(options(number, "flops"))
        assert (together.digest, together.provenance) == (alone.digest, alone.provenance)
        assert together.capture.method.endswith("inputs read") == (number > 2)


def test_a_way_that_a_model_no_longer_has_is_another_one() -> None:
    captured = ModelCosts(target(), "recorded, inputs unread").captured(options(2, "flops"))
    assert captured.capture.method == "recorded"


def test_a_size_with_other_nodes_is_measured(caplog: pytest.LogCaptureFixture) -> None:
    costs = ModelCosts(target(OtherNodes()), "recorded", sizes=(1, 4))
    with caplog.at_level(logging.INFO, "pipecompile.api"):
        graph = costs.graph(options(BATCH // 2))
    assert "other" in graph.by_name
    assert graph.cost_notes == ()
    assert "a microbatch of 2 samples has other nodes than those of 1 and 4" in caplog.text


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (0, 4)])
def test_sizes_that_do_not_divide_the_batch_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match="two sizes or more that divide the batch of 8"):
        ModelCosts(target(), "recorded", sizes=sizes)
