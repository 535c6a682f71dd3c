"""One process trains the unsplit model under any order, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from orders import BACKWARDS, PipelineOrder, compared, pipeline_under
from zoo import example, same

from pipecompile import InputError
from pipecompile.api.verification import reference_for
from pipecompile.frontend.signature import Arguments
from pipecompile.training.pipeline import Pipeline
from tests.sweeps import one_in, sweep

NAMED = (
    PipelineOrder("gpipe", 4, recompute=True),
    PipelineOrder("1f1b", 4),
    PipelineOrder("interleaved-1f1b", 2, 2, "loop"),
    PipelineOrder("interleaved-1f1b", 2, 2, "loop", recompute=True),
    PipelineOrder("looped-bfs", 2, 2, "loop"),
    PipelineOrder("zb-h1", 4),
    PipelineOrder("zb-h2", 4),
    PipelineOrder("zb-v", 2, 2, "v"),
    PipelineOrder("v-half", 2, 2, "v"),
    PipelineOrder("v-min", 2, 2, "v"),
    PipelineOrder("dualpipe-v", 2, 2, "v"),
)
BUT_LAST = tuple(
    {order.name: replace(order, recompute=True, but_last=True) for order in NAMED}.values()
)
HAND_MADE = tuple(
    PipelineOrder(backwards, ranks, stages, shape, recompute)
    for backwards in BACKWARDS
    for ranks, stages, shape in ((4, 1, "linear"), (2, 2, "loop"), (2, 2, "v"), (2, 2, "linear"))
    for recompute in (False, True)
)


def assert_equal(order: PipelineOrder, name: str) -> None:
    comparison = compared(order, example(name))
    assert [(d.name, d.relative) for d in comparison.differences if not d.equal] == []
    assert comparison.losses[0] == comparison.losses[1]


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("order", [*HAND_MADE, *NAMED, *BUT_LAST], ids=str)
def test_every_order_trains_the_unsplit_model(order: PipelineOrder) -> None:
    assert_equal(order, "sequential")


LATE, BEHIND = PipelineOrder("late", 4), PipelineOrder("behind", 2, 2, "v", recompute=True)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("unet", LATE),
        *((name, BEHIND) for name in ("gpt2", "resnet50")),
        *(sweep(name, BEHIND) for name in ("t5", "unet", "bert", "llama")),
        *(sweep(name, LATE) for name in ("gpt2", "resnet50", "bert", "llama", "t5")),
    ],
    ids=str,
)
def test_split_backwards_train_every_model(name: str, order: PipelineOrder) -> None:
    """With ties (gpt2, bert, t5), biases shared by layers (t5), buffers and random numbers."""
    assert_equal(order, name)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    "order",
    one_in(2, (order for order in NAMED if order.name.startswith(("zb", "v-", "dual")))),
    ids=str,
)
def test_ties_are_summed_as_in_the_unsplit_model(order: PipelineOrder) -> None:
    assert_equal(order, "gpt2")


@pytest.mark.sweep
@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("shape", ["loop", "v"])
def test_evaluation_of_several_stages_on_a_rank(shape: str) -> None:
    target = example("unet")
    made: list[Pipeline] = [
        pipeline_under(order, target)
        for order in (PipelineOrder("late", 2, 2, shape), PipelineOrder("gpipe", 4))
    ]
    assert same(*(pipeline.evaluate(target.call) for pipeline in made))


@pytest.mark.parametrize(
    "order",
    [PipelineOrder("interleaved-1f1b", 2, 2, "loop"), PipelineOrder("zb-v", 2, 2, "v")],
    ids=str,
)
def test_a_minibatch_of_fewer_microbatches_on_several_stages_a_rank(order: PipelineOrder) -> None:
    target = example("sequential")
    pipeline = pipeline_under(order, target)
    reference = reference_for(target, pipeline.plan)
    assert target.targets is not None
    (x,) = target.call.args
    fewer = replace(target, call=Arguments((x[:4],), {}), targets=target.targets[:4])
    assert same(pipeline.step(fewer.call, fewer.targets), reference.step(fewer, 2))
    wanted = dict(reference.model.named_parameters())
    assert all(same(p.grad, wanted[name].grad) for name, p in pipeline.named_parameters())


def test_a_schedule_that_updates_weights_on_the_way_is_refused() -> None:
    target = example("sequential")
    with pytest.raises(
        InputError, match="'pipedream' updates weights while microbatches are in flight"
    ):
        pipeline_under(PipelineOrder("pipedream", 4), target).step(target.call, target.targets)
