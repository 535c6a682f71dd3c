"""Regions that are recomputed, under torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from stages import loss_of
from torch import Tensor, nn

from pipecompile.codegen.regions import Regions
from pipecompile.codegen.stages import emit
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.recomputed_region import has_recomputed_regions
from pipecompile.ir.schedule import Action, Schedule
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.runtime.agreement import Agreement, Forum, Statement
from pipecompile.runtime.distributed_pipeline import DistributedPipeline
from pipecompile.runtime.gradients import divide_gradients
from pipecompile.runtime.messages import BoundaryShape
from pipecompile.runtime.rank_step import Minibatch
from pipecompile.runtime.stage import EagerStage
from pipecompile.runtime.watch import StepWatch

ROW = [Action.parse(text) for text in ("0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1")]
SHAPE = BoundaryShape(((4, 8), torch.float32, True))


@pytest.fixture
def _one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def trained(regions: Regions) -> tuple[list[Tensor], list[Tensor | None], list[Tensor]]:
    """Losses, gradients and buffers after two microbatches in flight, both stages on one rank."""
    torch.manual_seed(0)
    blocks = (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh())
    model = nn.Sequential(
        *blocks, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8)
    )
    call = Arguments((torch.randn(4, 8),), {})
    module = capture(model, call).instantiate(call)
    apply_passes(module.graph, [Group()])
    names = [node.name for node in module.graph.nodes if node.op != "get_attr"]
    emitted = emit(module, {name: int(index >= 5) for index, name in enumerate(names)}, regions)
    assert [has_recomputed_regions(stage.module) for stage in emitted] == [
        stage in regions for stage in range(2)
    ]
    stages = {
        stage.index: EagerStage(
            stage.module,
            gradient_inputs=stage.gradient_inputs,
            loss=loss_of if stage.index else None,
            buffers=stage.buffers,
            random=stage.random,
        )
        for stage in emitted
    }
    shapes = [[BoundaryShape(((4, 8), torch.float32, False))], [SHAPE]]
    pipeline = DistributedPipeline(stages, torch.device("cpu"), shapes)
    rows = [[call.args[0]], [call.args[0].flip(0)]]
    batch = Minibatch(rows, [None, None], seed=3, step=1)
    watch = StepWatch([0], [[0], [0]], None)
    agreement = Agreement(Statement({}), Forum(None), watch)
    with watch.watched("step 1"):
        results = pipeline.run(Schedule.of("by hand", 2, (0, 0), [ROW]), batch, agreement, watch)
    assert results is not None
    divide_gradients(model.parameters(), 2)
    return (
        [loss for (loss,) in results.values],
        [p.grad for p in model.parameters()],
        list(model.buffers()),
    )


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize(
    "regions", [{0: [["_1", "_2", "_3"]]}, {0: [["_0", "_1"]], 1: [["_4", "_5", "_6"], ["_7"]]}]
)
def test_a_step_of_torchs_runtime_is_that_without_regions(regions: Regions) -> None:
    for wanted, got in zip(trained({}), trained(regions), strict=True):
        assert all(
            a is not None and b is not None and torch.equal(a, b)
            for a, b in zip(wanted, got, strict=True)
        )
