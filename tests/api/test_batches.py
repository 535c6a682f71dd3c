"""Batches of any size: a smaller microbatch at the end, weighted by its samples."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from zoo import example, same

from pipecompile import InputError, Pipeline, pipecompile
from pipecompile.api.verification import reference_for
from pipecompile.frontend.target import Target
from pipecompile.runtime.batch_statistics import minibatch_statistics
from tests.distributed.training_jobs import mixture
from tests.sweeps import examples
from tests.unequal_batches import gradients_of, largest_difference, sizes_of, unsplit_step

EXACT = 1e-12
SAMPLES, LABELS = torch.randn(20, 6).double(), torch.randint(3, (20,))
entropy = functional.cross_entropy


def perceptron() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


@cache
def trained(planned: int, microbatches: int, k: int) -> tuple[Pipeline, nn.Module]:
    """A pipeline for a small model without random numbers, and the model."""
    model = perceptron()
    pipeline = pipecompile(
        model,
        SAMPLES[: planned * microbatches],
        k=k,
        microbatches=microbatches,
        costs="flops",
        loss_fn=entropy,
        self_check=False,
    )
    return pipeline, copy.deepcopy(model)


@settings(max_examples=examples(50), deadline=None)
@given(st.data())
def test_a_step_over_any_batch_is_the_unsplit_step(data: st.DataObject) -> None:
    planned, microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    k = data.draw(st.integers(1, 3))
    samples = data.draw(st.integers(1, planned * microbatches))
    pipeline, model = trained(planned, microbatches, k)
    batch, labels = SAMPLES[:samples], LABELS[:samples]
    pipeline.zero_grad()
    loss = pipeline.step(batch, labels)

    model.zero_grad()
    wanted = unsplit_step(lambda _, rows: model(rows), entropy, batch, labels, planned)
    count = samples / planned
    assert torch.equal(loss, wanted)
    assert same(gradients_of(pipeline._target.model), gradients_of(model, count))

    model.zero_grad()
    whole = entropy(model(batch), labels)
    whole.backward()
    assert abs(loss.item() - whole.item()) <= EXACT
    assert largest_difference(gradients_of(pipeline._target.model), gradients_of(model)) <= EXACT

    assert (pipeline.evaluate(batch) - model(batch)).abs().max() <= EXACT
    assert abs(pipeline.evaluate(batch, labels).item() - whole.item()) <= EXACT


OPTIONS: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b", "recompute": "stage"},
    {"schedule": "1f1b", "recompute": "block"},
    {"schedule": "zb-h1"},
    {"schedule": "1f1b", "batch_norm": "minibatch"},
]


def pipeline_of(whole: Target, **options: Any) -> Pipeline:
    """Three stages of the mixture."""
    return pipecompile(
        whole.model,
        whole.call,
        k=3,
        microbatches=4,
        costs="flops",
        loss_fn=whole.loss_fn,
        self_check=False,
        **options,
    )


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_dropout_batch_norm_and_ties_in_every_kind_of_step(options: dict[str, Any]) -> None:
    """In each step a batch of another size: whole, with a remainder, only a remainder."""
    whole = mixture(16)
    pipeline = pipeline_of(whole, **options)
    assert any(len(parameter.stages) > 1 for parameter in pipeline.plan.parameters)
    reference = reference_for(whole, pipeline.plan)
    tokens, targets = whole.call.args[0], whole.targets
    for step, samples in enumerate((15, 16, 3, 9)):
        pipeline.zero_grad()
        reference.model.zero_grad()
        loss = pipeline.step(tokens[:samples], targets[:samples])
        with minibatch_statistics():
            wanted = unsplit_step(
                lambda key, rows: reference._run(key, (rows,), {}),
                whole.loss_fn,
                tokens[:samples],
                targets[:samples],
                4,
                step=step,
            )
        assert abs(loss.item() - wanted.item()) <= EXACT
        assert same(gradients_of(whole.model), gradients_of(reference.model, samples / 4))
        assert same(dict(whole.model.named_buffers()), dict(reference.model.named_buffers()))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", ["unet", "sequential"])
def test_a_single_sample_is_left_over(name: str) -> None:
    """The graph for one sample comes from a capture of its own, which is proven."""
    target = example(name)
    for part in target.model.modules():
        if isinstance(part, nn.modules.dropout._DropoutNd):
            part.p = 0.0  # the pipeline draws from streams of its own
    pipeline = pipecompile(
        target.model, target.call, k=3, microbatches=4, costs="flops", loss_fn=target.loss_fn
    )
    model = copy.deepcopy(target.model)
    (batch,), targets = target.call.args, target.targets
    loss = pipeline.step(batch[:7], targets[:7])
    wanted = unsplit_step(lambda _, rows: model(rows), target.loss_fn, batch[:7], targets[:7], 2)
    assert torch.equal(loss, wanted)
    assert same(gradients_of(target.model), gradients_of(model, 3.5))
    assert same(dict(target.model.named_buffers()), dict(model.named_buffers()))


def test_a_model_of_transformers_with_ties_and_views() -> None:
    target = example("gpt2")
    target.model.eval()
    pipeline = pipecompile(target.model, target.call, k=3, microbatches=2, costs="flops")
    model = copy.deepcopy(target.model)
    call = torch.utils._pytree.tree_map_only(
        Tensor, lambda value: value[:7], (target.call.args, target.call.kwargs)
    )
    loss = pipeline.step(type(target.call)(*call))
    rows = [
        torch.utils._pytree.tree_map_only(Tensor, lambda value, part=part: value[part], call)
        for part in (slice(0, 4), slice(4, 7))
    ]
    total = torch.zeros(())
    for (args, kwargs), size in zip(rows, (4, 3), strict=True):
        own = model(*args, **kwargs).loss
        own.backward(torch.full_like(own, size / 4))
        total = total + own.detach() * (size / 7)
    assert torch.equal(loss, total)
    assert same(gradients_of(target.model), gradients_of(model, 7 / 4))


def test_steps_that_accumulate_may_have_batches_of_several_sizes() -> None:
    pipeline, model = trained(4, 3, 2)
    pipeline.zero_grad()
    model.zero_grad()
    for samples, accumulate in ((7, True), (12, True), (3, False)):
        pipeline.step(SAMPLES[:samples], LABELS[:samples], accumulate=accumulate)
        entropy(model(SAMPLES[:samples]), LABELS[:samples]).backward()
    assert largest_difference(gradients_of(pipeline._target.model), gradients_of(model)) <= EXACT


def test_a_scaler_scales_a_smaller_microbatch_too() -> None:
    pipeline, _ = trained(4, 3, 2)
    found = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=8.0)):
        pipeline.zero_grad()
        pipeline.step(SAMPLES[:7], LABELS[:7], scaler=scaler)
        found.append(gradients_of(pipeline._target.model, 8.0 if scaler else 1.0))
    assert same(*found)


def test_weights_are_exact_in_single_precision() -> None:
    model = perceptron().float()
    batch = SAMPLES[:12].float()
    pipeline = pipecompile(
        model, batch, k=2, microbatches=3, costs="flops", loss_fn=entropy, self_check=False
    )
    twin = copy.deepcopy(model)
    loss = pipeline.step(batch[:7], LABELS[:7])
    wanted = unsplit_step(lambda _, rows: twin(rows), entropy, batch[:7], LABELS[:7], 4)
    assert torch.equal(loss, wanted)
    assert same(gradients_of(model), gradients_of(twin, 7 / 4))


def test_what_comes_with_the_loss_is_weighted_and_joined() -> None:
    def loss_and_metrics(logits: Tensor, labels: Tensor) -> Any:
        best = logits.argmax(1)
        return entropy(logits, labels), {"best": best, "right": (best == labels).double().mean()}

    model = perceptron()
    options = {"costs": "flops", "loss_fn": loss_and_metrics, "self_check": False}
    pipeline = pipecompile(model, SAMPLES[:12], k=2, microbatches=3, **options)
    for samples in (1, 7, 12):
        logits = model(SAMPLES[:samples])
        for loss, metrics in (
            pipeline.step(SAMPLES[:samples], LABELS[:samples]),
            pipeline.evaluate(SAMPLES[:samples], LABELS[:samples]),
        ):
            assert not loss.requires_grad
            assert abs(loss.item() - entropy(logits, LABELS[:samples]).item()) <= EXACT
            assert torch.equal(metrics["best"], logits.argmax(1))
            right = (logits.argmax(1) == LABELS[:samples]).double().mean()
            assert abs(metrics["right"].item() - right.item()) <= EXACT


def test_evaluation_of_more_than_planned_with_dropout_off() -> None:
    whole = mixture(8)
    pipeline = pipeline_of(whole)
    tokens = torch.randint(0, 11, (23, 6))
    before = copy.deepcopy(whole.model.state_dict())
    twin = copy.deepcopy(whole.model).eval()
    with torch.no_grad():
        wanted = twin(tokens)
    assert (pipeline.evaluate(tokens) - wanted).abs().max() <= EXACT
    loss = pipeline.evaluate(tokens, tokens)
    assert abs(loss.item() - whole.loss_fn(wanted, tokens).item()) <= EXACT
    assert same(before, whole.model.state_dict())
    assert whole.model.training
    assert all(parameter.grad is None for parameter in whole.model.parameters())


class Branching(nn.Module):
    """It does something else with few samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, value: Tensor) -> Tensor:
        value = self.first(value)
        if value.shape[0] < 3:
            value = value.tanh() * 2
        return self.last(value.relu())


def test_a_model_that_takes_another_branch_with_few_samples() -> None:
    model = Branching().double()
    pipeline = pipecompile(model, SAMPLES[:8], k=2, microbatches=2, costs="flops", loss_fn=entropy)
    twin = copy.deepcopy(model)
    loss = pipeline.step(SAMPLES[:6], LABELS[:6])
    wanted = unsplit_step(lambda _, rows: twin(rows), entropy, SAMPLES[:6], LABELS[:6], 4)
    assert torch.equal(loss, wanted)
    assert same(gradients_of(model), gradients_of(twin, 1.5))


class OneSize(nn.Module):
    """It makes a number of the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.first(value) / int(value.shape[0]) ** 0.5)


def test_a_model_for_one_size_refuses_another() -> None:
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "loss_fn": entropy}
    with pytest.raises(InputError, match="rows along dimension 0 are not independent"):
        pipecompile(OneSize().double(), SAMPLES[:8], **options)
    pipeline = pipecompile(OneSize().double(), SAMPLES[:8], self_check=False, **options)
    assert pipeline.evaluate(SAMPLES[:8]).shape == (8, 3)
    message = (
        r"last microbatch of 3 samples, but the plan was made for microbatches of 4, .*: its graph "
        r"is for one size only, since .*; drop or pad the last batch"
    )
    with pytest.raises(InputError, match=message):
        pipeline.step(SAMPLES[:7], LABELS[:7])
    with pytest.raises(InputError, match=message):
        pipeline.evaluate(SAMPLES[:7])
    assert pipeline.steps == 0
    assert all(parameter.grad is None for parameter in pipeline.parameters())


def test_a_target_of_another_length_is_refused() -> None:
    pipeline, _ = trained(4, 3, 2)
    with pytest.raises(InputError, match=r"of shape \(6,\), but the batch has 7"):
        pipeline.step(SAMPLES[:7], LABELS[:6])


def test_the_oracle_cuts_as_documented() -> None:
    assert [sizes_of(samples, 4) for samples in (10, 8, 3)] == [[4, 4, 2], [4, 4], [3]]
