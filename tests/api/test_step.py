"""The pipeline trains the model: the same losses, gradients and buffers, bit for bit in one
process.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import example, first, same

from pipecompile import InputError, Pipeline, StalePlanError, pipecompile
from pipecompile.api.verification import reference_for, verify
from pipecompile.frontend.target import Target
from pipecompile.ir.serialization import encode, write
from tests.sweeps import sweep


def compiled(target: Target, **options: Any) -> Pipeline:
    """A pipeline for an example, planned with deterministic costs."""
    options = {"costs": "flops", "k": 2, "microbatches": 4, **options}
    return pipecompile(target.model, target.call, loss_fn=target.loss_fn, **options)


def test_a_pipeline_is_one_line_and_in_a_notebook_its_plan() -> None:
    pipeline = compiled(example("sequential"), self_check=False)
    plan = "Plan(2 stages on 2 ranks, 1f1b, 4 microbatches, costs flops)"
    assert repr(pipeline) == f"Pipeline({plan}, all stages in this process, 0 steps taken)"
    assert pipeline._repr_html_() == pipeline.plan._repr_html_()


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("name", "k", "schedule"),  # tests/distributed has the other pairs
    [
        *((name, 4, "gpipe") for name in ("gpt2", "unet", "sequential")),
        *(
            sweep(name, 2, "1f1b")
            for name in ("gpt2", "bert", "llama", "t5", "unet", "sequential", "resnet50")
        ),
        *(sweep(name, 4, "gpipe") for name in ("bert", "llama", "t5", "resnet50")),
    ],
)
def test_a_step_equals_the_unsplit_models(name: str, k: int, schedule: str) -> None:
    options = {"k": k, "microbatches": 4, "schedule": schedule, "costs": "flops"}
    plan, comparisons = verify(example(name), self_check=False, **options)  # this is a check itself
    assert (plan.k, plan.microbatches, plan.schedule.name) == (k, 4, schedule)
    for comparison in comparisons:
        assert comparison.passed
        assert [d for d in comparison.differences if not d.equal] == []
        assert comparison.losses[0] == comparison.losses[1]
        assert len(comparison.differences) >= len(list(example(name).model.parameters()))


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    [
        ("sequential", "gpipe", "stage"),
        ("sequential", "1f1b", "stage"),
        ("unet", "gpipe", "except-last"),
        sweep("unet", "gpipe", "stage"),
        sweep("unet", "1f1b", "stage"),
        sweep("sequential", "gpipe", "except-last"),
    ],
)
def test_a_step_with_recompute_equals_the_unsplit_models(
    name: str, schedule: str, recompute: str
) -> None:
    _, comparisons = verify(
        example(name), k=3, microbatches=4, schedule=schedule, recompute=recompute, costs="flops"
    )
    assert all(d.equal for comparison in comparisons for d in comparison.differences)


def batches(target: Target, count: int) -> list[tuple[Any, Any]]:
    """The example's minibatch, its samples in another order each time."""
    orders = [
        torch.randperm(8, generator=torch.Generator().manual_seed(index)) for index in range(count)
    ]
    picked = []
    for order in orders:
        args, kwargs, targets = torch.utils._pytree.tree_map_only(
            Tensor,
            lambda value, order=order: value[order],
            (target.call.args, target.call.kwargs, target.targets),
        )
        picked.append((type(target.call)(args, kwargs), targets))
    return picked


@pytest.mark.sweep
@pytest.mark.parametrize("name", [sweep("sequential"), "gpt2"])
def test_losses_follow_the_unsplit_run_over_five_optimizer_steps(name: str) -> None:
    target = example(name)
    pipeline = compiled(target, k=3)
    reference = reference_for(target, pipeline.plan)
    optimizers = [
        torch.optim.SGD(p, lr=0.1, momentum=0.9)
        for p in (pipeline.parameters(), reference.model.parameters())
    ]
    losses = []
    for index, (call, targets) in enumerate(batches(target, 5)):
        optimizers[0].zero_grad()
        got = pipeline.step(call, targets)
        wanted = reference.step(
            replace(target, call=call, targets=targets), 4, seed=pipeline.seed, step=index
        )
        for optimizer in optimizers:
            optimizer.step()
        assert got is not None
        assert torch.equal(got, wanted), index
        losses.append(got.item())
    assert len(set(losses)) == 5
    assert same(dict(pipeline.state_dict()), dict(reference.model.state_dict()))
    assert pipeline.steps == 5


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("name", ["sequential", "unet"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("size", [2, 6])
def test_a_minibatch_of_fewer_microbatches(name: str, schedule: str, size: int) -> None:
    target = example(name)
    pipeline = compiled(target, schedule=schedule)
    reference = reference_for(target, pipeline.plan)
    fewer = torch.utils._pytree.tree_map_only(Tensor, lambda v: (v + 1)[:size], target.call.args)
    assert target.targets is not None
    targets = target.targets[:size]
    other = replace(target, call=type(target.call)(fewer, {}), targets=targets)
    got = pipeline.step(other.call, targets)
    wanted = reference.step(other, size // 2, seed=pipeline.seed)
    assert torch.equal(got, wanted)
    expected = {name: p.grad for name, p in reference.model.named_parameters()}
    assert same({name: p.grad for name, p in pipeline.named_parameters()}, expected)


def test_gradients_are_added_to_those_that_are_there() -> None:
    target = example("sequential")
    pipeline = compiled(target)
    pipeline.step(target.call, target.targets)
    once = {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}
    for parameter in pipeline.parameters():
        parameter.grad = torch.ones_like(parameter)
    pipeline.steps = 0
    pipeline.step(target.call, target.targets)
    for name, parameter in pipeline.named_parameters():
        assert torch.equal(parameter.grad, 1 + once[name])


def test_a_failing_step_leaves_the_gradients_and_does_not_count() -> None:
    target = example("sequential")
    pipeline = compiled(target)
    pipeline.step(target.call, target.targets)
    before = {name: p.grad.clone() for name, p in pipeline.named_parameters() if p.grad is not None}
    with pytest.raises(InputError, match="loss_fn raised IndexError: Target 99 is out of bounds"):
        pipeline.step(target.call, torch.full((8,), 99))
    assert same({name: p.grad for name, p in pipeline.named_parameters()}, before)
    assert pipeline.steps == 1


@pytest.mark.parametrize(
    "name", ["unet", *map(sweep, ("gpt2", "bert", "t5", "llama", "sequential"))]
)
def test_evaluation_is_the_models_in_eval_mode(name: str) -> None:
    target = example(name)
    pipeline = compiled(target, k=3)
    result = pipeline.evaluate(target.call)
    assert all(part.training for part in target.model.modules())
    model = copy.deepcopy(target.model).eval()
    leaves = []
    with torch.no_grad():
        for start in range(0, 8, 2):
            args, kwargs = torch.utils._pytree.tree_map_only(
                Tensor,
                lambda v, start=start: v[start : start + 2],
                (target.call.args, target.call.kwargs),
            )
            leaves.append(torch.utils._pytree.tree_leaves(model(*args, **kwargs)))
    assert type(result) is type(model(*first(2, target.call).args, **first(2, target.call).kwargs))
    for got, *rows in zip(torch.utils._pytree.tree_leaves(result), *leaves, strict=True):
        assert torch.equal(got, torch.cat(rows) if rows[0].dim() else torch.stack(rows).mean())


def test_evaluation_between_steps_changes_nothing() -> None:
    losses = []
    for evaluates in (False, True):
        target = example("unet")
        pipeline = compiled(target)
        pipeline.step(target.call, target.targets)
        if evaluates:
            pipeline.evaluate(target.call)
        losses.append([pipeline.step(target.call, target.targets), *pipeline.state_dict().values()])
    assert same(*losses)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", ["sequential", "unet", sweep("gpt2")])
def test_train_and_eval_switch_a_step(name: str) -> None:
    """Each step is that of a pipeline that was compiled in the mode the model is in."""
    switched, trained, fixed = example(name), example(name), example(name)
    pipeline, wanted = compiled(switched), {True: compiled(trained)}
    fixed.model.eval()
    wanted[False] = compiled(fixed)
    for training in (True, False, True):
        switched.model.train(training)
        target = trained if training else fixed
        target.model.load_state_dict(
            switched.model.state_dict()
        )  # averages that the steps before have updated
        wanted[training].steps = pipeline.steps  # random nodes draw by the number of the step
        losses = (
            pipeline.step(switched.call, switched.targets),
            wanted[training].step(target.call, target.targets),
        )
        assert torch.equal(*losses)
        assert {part.training for part in switched.model.modules()} == {training}
        gradients = [
            {n: p.grad for n, p in each.named_parameters()} for each in (pipeline, wanted[training])
        ]
        assert same(*gradients)
        for each in (pipeline, wanted[training]):
            for parameter in each.parameters():
                parameter.grad = None


@pytest.mark.sweep
def test_a_part_is_frozen_after_compiling() -> None:
    target, twin = example("unet"), example("unet")
    pipeline = compiled(target)
    target.model.stem.norm.eval()
    twin.model.stem.norm.eval()
    assert torch.equal(
        pipeline.step(target.call, target.targets), compiled(twin).step(twin.call, twin.targets)
    )
    assert target.model.stem.norm.num_batches_tracked.item() == 0


def test_a_part_in_eval_mode_stays_in_it() -> None:
    target = example("unet")
    target.model.stem.norm.eval()
    _, (trained, *_) = verify(target, k=2, microbatches=4, costs="flops")
    assert trained.passed
    assert not target.model.stem.norm.training
    assert target.model.stem.norm.num_batches_tracked.item() == 0


@pytest.mark.sweep
def test_state_dicts_speak_the_original_names() -> None:
    target = example("gpt2")
    pipeline = compiled(target, k=4)
    state = {name: value.clone() for name, value in pipeline.state_dict().items()}
    assert list(state) == list(target.model.state_dict())
    other = example("gpt2")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(2)
    again = compiled(other, k=3)
    again.load_state_dict(state)
    assert same(dict(other.model.state_dict()), dict(target.model.state_dict()))
    assert torch.equal(again.step(other.call), pipeline.step(target.call))
    assert {name for name, _ in pipeline.named_parameters()} == {
        name for name, _ in target.model.named_parameters()
    }


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    target = example("sequential")
    pipeline = compiled(target)
    before = {name: value.clone() for name, value in pipeline.state_dict().items()}
    state = {name: value + 1 for name, value in before.items()}
    with pytest.raises(InputError, match=r"0\.bias, 0\.weight are missing from the state dict"):
        pipeline.load_state_dict(
            {name: value for name, value in state.items() if not name.startswith("0.")}
        )
    with pytest.raises(InputError, match="other are not in the model, but in the state dict"):
        pipeline.load_state_dict({**state, "other": torch.zeros(1)})
    with pytest.raises(InputError, match=r"0\.bias have another shape in the state dict"):
        pipeline.load_state_dict({**state, "0.bias": torch.zeros(1)})
    assert same(pipeline.state_dict(), before)


def test_a_committed_plan_runs_and_refuses_another_model(tmp_path: Path) -> None:
    target = example("sequential")
    made = compiled(target, k=3, schedule="gpipe")
    write(tmp_path / "plan.json", encode(made.plan))
    twin = example("sequential")
    again = pipecompile(twin.model, twin.call, plan=tmp_path / "plan.json", loss_fn=twin.loss_fn)
    assert again.plan == made.plan
    assert torch.equal(again.step(twin.call, twin.targets), made.step(target.call, target.targets))
    another = nn.Sequential(*list(example("sequential").model)[:-1], nn.Linear(32, 5))
    with pytest.raises(StalePlanError, match=r"the plan was made for another graph .* plan again"):
        pipecompile(another, target.call, plan=str(tmp_path / "plan.json"), loss_fn=target.loss_fn)
    with pytest.raises(StalePlanError, match="the plan was made for another graph"):
        pipecompile(target.model.eval(), target.call, plan=made.plan, loss_fn=target.loss_fn)


def tie_of(pipeline: Pipeline) -> tuple[int, ...]:
    (found,) = [p for p in pipeline.plan.parameters if p.name == "transformer.wte.weight"]
    assert found.aliases == ("lm_head.weight",)
    assert found.owner == found.stages[0]
    return found.stages


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("k", "groups", "stages"),
    [(4, [], (0, 3)), (1, [["transformer.wte", "lm_head"]], (0,))],
    ids=["on different stages", "on one stage"],
)
def test_tied_embedding_and_head(k: int, groups: list[list[str]], stages: tuple[int, ...]) -> None:
    target = example("gpt2")
    pipeline = compiled(target, k=k, no_split=groups)
    assert tie_of(pipeline) == stages
    reference = reference_for(target, pipeline.plan)
    wanted = reference.step(target, 4, seed=pipeline.seed)
    assert torch.equal(pipeline.step(target.call), wanted)
    tied = target.model.lm_head.weight
    assert tied is target.model.transformer.wte.weight
    assert torch.equal(tied.grad, reference.model.lm_head.weight.grad)


def test_the_relayed_skips_of_a_unet() -> None:
    plan = compiled(example("unet"), k=4).plan
    assert plan.routes
    assert all(len(route.stages) > 2 for route in plan.routes)


def test_what_a_plan_predicts_is_simulated() -> None:
    pipeline = compiled(example("sequential"))
    assert pipeline.simulate().makespan_ns == pipeline.plan.prediction.step_ns
    assert len(pipeline.stages) == 2


@pytest.mark.parametrize("name", [sweep("gpt2"), "unet"])
def test_measured_costs_serve_a_plan(name: str) -> None:
    target = example(name)
    pipeline = pipecompile(
        target.model,
        target.call,
        k=2,
        loss_fn=target.loss_fn,
        sample_target=target.targets,
        costs="measured",
        microbatches=2,
    )
    assert all(load > 0 for load in pipeline.plan.prediction.loads_ns)
