"""Between forward and backward a stage keeps what its regions read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from allocations import events
from torch import Tensor, fx
from torch.profiler import record_function

from pipecompile.codegen.stages import StageModule, emit
from pipecompile.graph.random_streams import use_stream
from pipecompile.graph.stages import origin_of
from pipecompile.runtime.stage import EagerStage
from tests.codegen.region_cases import (
    KEPT,
    NOW,
    assignment_of,
    case,
    drawn_for,
    eager,
    instantiated,
)

# -- what it keeps


SMALL_BYTES = 2048  # of sums that kernels make inside, and of copies of statistics
TRIALS = 3  # on a busy machine the profiler loses events


class Keeping(fx.Interpreter):
    """Notes which storages each node saves for the backward."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.saved: dict[str, dict[int, int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        own = self.saved.setdefault(origin_of(n), {})

        def pack(tensor: Tensor) -> Tensor:
            own.update(storages([tensor]))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return super().run_node(n)


def storages(values: Sequence[Any]) -> dict[int, int]:
    """Storage → bytes."""
    tensors = [value.untyped_storage() for value in values if isinstance(value, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in tensors}


def expected_bytes(
    stage: StageModule, inputs: Sequence[Tensor], regions: Sequence[Sequence[str]]
) -> int:
    """Saved outside of regions, read by outermost regions that save anything, or sent."""
    run = Keeping(stage.module)
    leaves = [
        value.detach().requires_grad_(needed)
        for value, needed in zip(inputs, stage.gradient_inputs, strict=True)
    ]
    with use_stream(NOW):
        outputs = run.run(*leaves)
    inside = {name for region in regions for name in region}
    held = storages(outputs)
    for name, own in run.saved.items():
        held |= {} if name in inside else own
    for region in (one for one in regions if not any(set(one) < set(other) for other in regions)):
        nodes = [
            node
            for node in stage.module.graph.nodes
            if origin_of(node) in region and node.op != "placeholder"
        ]
        if any(run.saved[name] for name in region):
            held |= storages(
                [run.env[s] for node in nodes for s in node.all_input_nodes if s not in nodes]
            )
    for owned in storages([*leaves, *stage.module.parameters(), *stage.module.buffers()]):
        held.pop(owned, None)
    return sum(held.values())


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("name", KEPT)
def test_between_forward_and_backward_a_stage_keeps_what_regions_read(name: str) -> None:
    region_case = case(name)
    wanted: dict[str, int] = {}
    trials: list[tuple[str, EagerStage, list[Tensor]]] = []
    for cut, seeds in ((1, (0, 1)), (len(region_case.units) // 2, (2, 3))):
        assignment = assignment_of(region_case, [cut])
        for seed in seeds:
            regions = drawn_for(region_case, assignment, seed, nested=seed % 2 == 1)
            plain_stages = emit(instantiated(region_case), assignment)
            stages, _ = eager(region_case, assignment, regions)
            stages[-1].loss = None
            values = list(region_case.inputs)
            for stage, plain_stage in zip(stages, plain_stages, strict=True):
                label = f"cut {cut} seed {seed} stage {plain_stage.index}"
                wanted[label] = expected_bytes(plain_stage, values, regions[plain_stage.index])
                trials.append((label, stage, values))
                values = list(stage.forward(values, NOW)[0])
    for _ in range(TRIALS):
        kept = []
        with events() as found:
            for label, stage, values in trials:
                with record_function(label):
                    kept.append(stage.forward(values, NOW))
        wrong = {
            n: (wanted[n], sum(found[n]))
            for n in wanted
            if not 0 <= sum(found[n]) - wanted[n] <= SMALL_BYTES
        }
        if not wrong:
            break
    assert wrong == {}
    assert len(set(wanted.values())) > 2
