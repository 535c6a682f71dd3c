"""The two runs of a region: casts, errors, moved buffers, copies and other graphs."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from stages import assert_equal, case_of, loss_of
from torch import Tensor, nn
from zoo import same

from pipecompile.codegen.regions import Regions
from pipecompile.codegen.stages import emit
from pipecompile.codegen.transfer import transfer, transfer_regions
from pipecompile.errors import InputError
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.random_streams import StreamKey, use_stream
from pipecompile.graph.recomputability import recompute_limits
from pipecompile.graph.ties import ties_of
from pipecompile.runtime.stage import EagerStage
from tests.codegen.region_cases import (
    KEPT,
    NOW,
    CastOnce,
    assignment_of,
    case,
    differences,
    drawn_for,
    eager,
    instantiated,
    node_order,
    outcome,
    units,
)


def test_weights_that_are_cast_once_are_bound_for_a_reason() -> None:
    """Cast for each reader, their gradient would be summed in another type."""
    torch.manual_seed(0)
    region_case = case_of(CastOnce(), Arguments((torch.randn(4, 8),), {}))
    assignment = assignment_of(region_case, ())
    wanted = outcome(region_case, assignment, {})
    assert (
        differences(
            wanted, outcome(region_case, assignment, {0: [["tanh", "twice", "tanh_1", "twice_1"]]})
        )
        == []
    )
    with patch("pipecompile.codegen.stages.check_regions"):
        apart = outcome(region_case, assignment, {0: [["tanh", "twice"]]})
        assert set(differences(wanted, apart)) == {"twice.bias", "twice.weight"}


class CastInParts(nn.Module):
    """A value of a layer that computes in float32 has several readers in bfloat16."""

    def __init__(self, *, own: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))
        self.own = own

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.own else nullcontext():
            x = self.norm(x)
            x = self.query(x) * self.key(x).tanh() + self.value(x)
        return x.float().sin()


@pytest.mark.parametrize("own", [True, False])
def test_what_a_stage_receives_is_cast_as_in_the_whole_model(own: bool) -> None:
    """A leaf would be cast once for all readers; here the cut or a region's end parts them."""
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not own):
        region_case = case_of(CastInParts(own=own), Arguments((torch.randn(16, 32),), {}))
        for cut in range(1, len(region_case.units)):
            assert_equal(region_case, [cut])
            assignment = assignment_of(region_case, [cut])
            regions = drawn_for(region_case, assignment, cut)
            assert (
                differences(
                    outcome(region_case, assignment, {}), outcome(region_case, assignment, regions)
                )
                == []
            )


def test_a_region_that_ends_early_leaves_autocast_and_the_cache_of_its_casts() -> None:
    """Torch stops a second run in its middle, by an exception, perhaps where autocast is on."""
    region_case = case("autocast")
    assignment = assignment_of(region_case, ())
    order = node_order(region_case)
    limits = recompute_limits(instantiated(region_case))
    whole = [name for unit in units(order, limits) for name in unit]
    for end in range(3, len(whole) - 1):
        outcome(region_case, assignment, {0: [whole[:end]]})
        assert torch.autocast_increment_nesting() == 1
        torch.autocast_decrement_nesting()
        assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()


# -- what else happens to stages


def test_an_input_backward_is_refused() -> None:
    region_case = case("residuals")
    assignment = assignment_of(region_case, ())
    stages, _ = eager(region_case, assignment, drawn_for(region_case, assignment, 0))
    _, saved = stages[0].forward(region_case.inputs, NOW)
    with pytest.raises(AssertionError, match="go back as a whole"):
        stages[0].backward_input(saved, ())


def test_values_loaded_and_types_changed_reach_the_regions() -> None:
    """Buffers become other tensors by `.to`, parameters keep being the same."""

    def trained(regions: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        region_case = case_of(KEPT["normed"](), Arguments((torch.randn(4, 24, 32),), {}))
        assignment = assignment_of(region_case, ())
        (stage,), (emitted,) = eager(
            region_case, assignment, drawn_for(region_case, assignment, 0) if regions else {}
        )
        emitted.module.to(torch.float64)
        state = emitted.module.state_dict()
        emitted.module.load_state_dict({name: value * 1.5 for name, value in state.items()})
        rows = [value.double() for value in region_case.inputs]
        flights = [stage.forward(rows, StreamKey(0, 0, microbatch)) for microbatch in range(2)]
        for _, saved in flights:
            stage.backward(saved, (), {})
        module = emitted.module
        return [p.grad for p in module.parameters() if p.grad is not None], list(module.buffers())

    assert same(trained(False), trained(True))


@pytest.mark.parametrize("regions", [{}, {0: [["_0", "_1", "_2"]]}])
def test_parameters_written_to_before_the_backward_are_an_error(regions: Regions) -> None:
    """Without regions autograd notices; a recompute would silently use the new weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
    region_case = case_of(model, Arguments((torch.randn(4, 8),), {}))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_stepped)
    with pytest.raises(InputError, match="written"):
        outcome(region_case, assignment_of(region_case, ()), regions)


@torch.no_grad()
def _stepped(parameter: Tensor) -> None:
    parameter.sub_(parameter.grad)


def test_statistics_move_once_also_after_buffers_were_moved() -> None:
    """`.to` replaces the buffers, of which a recompute of the whole stage uses copies."""

    def average(*, recompute: bool) -> Tensor:
        torch.manual_seed(0)
        region_case = case_of(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), Arguments((torch.randn(4, 8),), {})
        )
        (emitted,) = emit(instantiated(region_case), assignment_of(region_case, ()))
        emitted.module.to(torch.float64)
        stage = EagerStage(
            emitted.module, gradient_inputs=(False,), loss=loss_of, buffers=emitted.buffers
        )
        _, saved = stage.forward(
            [value.double() for value in region_case.inputs], NOW, recompute=recompute
        )
        if recompute:
            stage.recompute(saved)
        stage.backward(saved, (), {})
        return region_case.capture.model.get_buffer("1.running_mean")

    assert torch.equal(average(recompute=True), average(recompute=False))


def test_a_copy_of_a_stage_works_on_tensors_of_its_own() -> None:
    torch.manual_seed(0)
    region_case = case_of(KEPT["normed"](), Arguments((torch.randn(4, 24, 32),), {}))
    assignment = assignment_of(region_case, ())
    (stage,) = emit(
        instantiated(region_case), assignment, drawn_for(region_case, assignment, 1, nested=True)
    )
    twin = copy.deepcopy(stage.module)
    assert list(twin.state_dict()) == list(stage.module.state_dict())
    with use_stream(NOW):
        loss_of(twin(*region_case.inputs), None).backward()
    assert all(p.grad is None for p in stage.module.parameters())
    with use_stream(NOW):
        loss_of(stage.module(*region_case.inputs), None).backward()
    assert same([p.grad for p in twin.parameters()], [p.grad for p in stage.module.parameters()])
    assert same(dict(twin.named_buffers()), dict(stage.module.named_buffers()))


@pytest.mark.parametrize("name", ["checkpointed", "buffers"])
def test_regions_are_found_again_in_the_graph_of_another_mode(name: str) -> None:
    """A step in eval mode (frozen statistics, no dropout) has the cut and regions of training."""
    region_case = case(name)
    assignment = assignment_of(region_case, (len(region_case.units) // 2,))
    regions = drawn_for(region_case, assignment, 0, nested=True)
    module = instantiated(region_case)
    emit(module, assignment)
    first_names = region_case.capture.first_names
    ties = ties_of(module, module.graph, first_names)
    holders = {alias: ties[name].stages for alias, name in first_names.items() if name in ties}
    model = region_case.capture.model.eval()
    try:
        other = case_of(model, region_case.call)
        graph = instantiated(other)
        stages = transfer(assignment, region_case.capture.graph, graph, holders)
        moved = transfer_regions(regions, region_case.capture.graph, graph, stages)
        held = [name for chosen in moved.values() for region in chosen for name in region]
        assert len(held) > 0.4 * sum(
            len(region) for chosen in regions.values() for region in chosen
        )
        assert differences(outcome(other, stages, {}), outcome(other, stages, moved)) == []
    finally:
        model.train()


def test_regions_stay_where_the_graph_stays() -> None:
    region_case = case("gpt2")
    assignment = assignment_of(region_case, (len(region_case.units) // 2,))
    regions = drawn_for(region_case, assignment, 1, nested=True)
    assert (
        transfer_regions(regions, region_case.capture.graph, instantiated(region_case), assignment)
        == regions
    )
