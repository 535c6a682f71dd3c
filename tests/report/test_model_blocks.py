from __future__ import annotations

import msgspec

from pipecompile.ir.stage import ModuleRun
from pipecompile.report.model_blocks import StageBlock, stage_rows
from tests.report.transformers import transformer_plan


def test_blocks_of_all_stages_make_up_the_model() -> None:
    plan = transformer_plan(4, 4, 10)
    rows = stage_rows(plan)
    for row, stage in zip(rows, plan.stages, strict=True):
        assert row.ns == stage.forward_ns + stage.backward_ns
    names = [block.name for row in rows for block in row.blocks]
    layers = [f"layers.{layer}" for layer in range(10)]
    assert list(dict.fromkeys(names)) == ["embed", *layers, "norm", "lm_head"]
    cut = [block.path for row in rows for block in row.blocks if block.is_cut]
    assert len(cut) == 4 and cut[0::2] == cut[1::2], "two blocks lie in two stages each"


def test_runs_of_one_block_are_one_and_recompute_counts() -> None:
    plan = transformer_plan(2, 2, 2)
    first, second = plan.stages
    runs = [("h.0.attn", 3), ("h.0", 4), ("h.1", 5), ("h.0.mlp", 6)]
    module_runs = tuple(
        ModuleRun(module=module, place=place, nodes=1, ns=ns)
        for place, (module, ns) in enumerate(runs)
    )
    nodes = ((*"abcd",),)
    first = msgspec.structs.replace(
        first, module_runs=module_runs, blocks=nodes, recompute_ns=2, recompute="regions"
    )
    row, _ = stage_rows(msgspec.structs.replace(plan, stages=(first, second)))
    assert row.blocks == [StageBlock("h.0", 13, False), StageBlock("h.1", 5, False)]
    assert (row.extra_ns, row.ns) == (2, 20)


def test_the_node_of_no_module_is_of_the_model() -> None:
    assert StageBlock("", 1, False).name == "model"


def test_plans_of_older_versions_have_no_blocks() -> None:
    plan = transformer_plan(2, 2, 2)
    stages = tuple(msgspec.structs.replace(stage, module_runs=()) for stage in plan.stages)
    assert stage_rows(msgspec.structs.replace(plan, stages=stages)) == []
