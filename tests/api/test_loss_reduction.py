"""Means, sums and weighted means of the losses of microbatches, against the whole minibatch."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipecompile import InputError, Pipeline, pipecompile
from pipecompile.api.verification import verify
from pipecompile.frontend.loss_reduction import LossReduction
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from tests.padded_batches import LENGTH, LOSSES, language_model, padded, unsplit_loss
from tests.sweeps import examples
from tests.unequal_batches import gradients_of, largest_difference

EXACT = 1e-12
REDUCTIONS: tuple[LossReduction, ...] = ("mean", "sum", "weighted")
SCHEDULES = "gpipe", "1f1b", "zb-h1"
reductions = st.sampled_from(REDUCTIONS)
schedules = st.sampled_from(SCHEDULES)


@cache
def trained(reduction: LossReduction, microbatches: int, schedule: str) -> Pipeline:
    """A pipeline whose microbatches have three samples."""
    _, labels = padded(3 * microbatches, 0)
    return compiled(
        LOSSES[reduction],
        reduction,
        microbatches=microbatches,
        schedule=schedule,
        sample_target=labels,
    )


def compiled(
    loss_fn: Any,
    reduction: LossReduction = "weighted",
    **options: Any,
) -> Pipeline:
    options = {"k": 2, "microbatches": 2, "costs": "flops", "self_check": False, **options}
    tokens, _ = padded(3 * options["microbatches"], 0)
    return pipecompile(
        language_model(),
        tokens,
        loss_fn=loss_fn,
        loss_reduction=reduction,
        **options,
    )


def cleared(pipeline: Pipeline) -> tuple[Pipeline, nn.Module]:
    """The pipeline and a copy of its model, both without gradients."""
    pipeline.zero_grad()
    return pipeline, copy.deepcopy(pipeline._target.model)


@settings(max_examples=examples(40), deadline=None)
@given(reductions, st.integers(1, 4), schedules, st.integers(0, 999), st.data())
def test_a_step_is_that_of_the_unsplit_model_on_the_whole_minibatch(
    reduction: LossReduction, microbatches: int, schedule: str, seed: int, data: st.DataObject
) -> None:
    """Also where a microbatch has padding only, or is smaller than planned."""
    pipeline, model = cleared(trained(reduction, microbatches, schedule))
    samples = data.draw(st.integers(1, 3 * microbatches))
    tokens, labels = padded(samples, seed, first_row=LENGTH)
    loss = pipeline.step(tokens, labels)
    wanted = unsplit_loss(model, reduction, tokens, labels)
    wanted.backward()
    assert loss.dtype == torch.float64 and not loss.requires_grad
    assert abs(loss.item() - wanted.item()) <= EXACT * max(1.0, wanted.item())
    assert largest_difference(gradients_of(pipeline._target.model), gradients_of(model)) <= EXACT
    evaluated = pipeline.evaluate(tokens, labels)
    assert abs(evaluated.item() - wanted.item()) <= EXACT * max(1.0, wanted.item())


@settings(max_examples=examples(40), deadline=None)
@given(schedules, st.lists(st.integers(1, 6), min_size=2, max_size=3), st.integers(0, 999))
def test_steps_that_accumulate_count_all_of_their_weights(
    schedule: str, sizes: list[int], seed: int
) -> None:
    """The second minibatch has padding only; a whole batch with all of them is the oracle."""
    pipeline, model = cleared(trained("weighted", 2, schedule))
    batches = [padded(size, seed + index, first_row=LENGTH) for index, size in enumerate(sizes)]
    batches.insert(1, (batches[0][0], torch.full_like(batches[0][1], -100)))
    for index, (tokens, labels) in enumerate(batches):
        loss = pipeline.step(tokens, labels, accumulate=index + 1 < len(batches))
        own = unsplit_loss(model, "weighted", tokens, labels)
        assert torch.allclose(loss, own, rtol=EXACT, equal_nan=True)
    tokens, labels = (torch.cat(each) for each in zip(*batches, strict=True))
    unsplit_loss(model, "weighted", tokens, labels).backward()
    assert largest_difference(gradients_of(pipeline._target.model), gradients_of(model)) <= EXACT


def test_sums_accumulate_to_sums_and_dropped_weights_count_nothing() -> None:
    tokens, labels = padded(5, 1, first_row=LENGTH)
    pipeline, model = cleared(trained("sum", 2, "1f1b"))
    for accumulate in (True, False):
        pipeline.step(tokens, labels, accumulate=accumulate)
        unsplit_loss(model, "sum", tokens, labels).backward()
    assert largest_difference(gradients_of(pipeline._target.model), gradients_of(model)) <= EXACT

    pipeline, model = cleared(trained("weighted", 2, "1f1b"))
    pipeline.step(tokens, labels, accumulate=True)
    pipeline.zero_grad()
    pipeline.step(tokens, labels)
    unsplit_loss(model, "weighted", tokens, labels).backward()
    assert largest_difference(gradients_of(pipeline._target.model), gradients_of(model)) <= EXACT


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_scaler_and_clipping_see_the_gradients_of_that_loss(reduction: LossReduction) -> None:
    pipeline, model = cleared(trained(reduction, 2, "zb-h1"))
    tokens, labels = padded(5, 2, first_row=LENGTH)
    pipeline.step(tokens, labels, scaler=torch.amp.GradScaler("cpu", init_scale=8.0))
    unsplit_loss(model, reduction, tokens, labels).backward()
    wanted = gradients_of(model)
    assert largest_difference(gradients_of(pipeline._target.model, 8.0), wanted) <= EXACT
    norm = torch.nn.utils.get_total_norm(wanted.values()).item()
    assert abs(pipeline.clip_grad_norm_(1.0).item() / (8.0 * norm) - 1) <= EXACT


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_scalars_that_come_with_the_loss_are_joined_like_it(reduction: LossReduction) -> None:
    def with_metrics(logits: Tensor, labels: Tensor) -> tuple[Any, ...]:
        returned = LOSSES[reduction](logits, labels)
        parts = returned if isinstance(returned, tuple) else (returned,)
        return (*parts, {"again": parts[0], "best": logits.argmax(-1)})

    pipeline = compiled(with_metrics, reduction)
    tokens, labels = padded(5, 3, first_row=LENGTH)
    labels[3:] = -100  # so that the mean of the last microbatch is NaN
    wanted = pipeline._target.model(tokens).argmax(-1)
    for loss, metrics in (pipeline.step(tokens, labels), pipeline.evaluate(tokens, labels)):
        assert loss.isfinite()
        assert torch.allclose(metrics["again"], loss, rtol=EXACT)
        assert torch.equal(metrics["best"], wanted)


@pytest.mark.parametrize("weight", [3, 2.5, torch.tensor(3), torch.tensor(0.5).half()])
def test_a_weight_is_a_number_or_a_scalar_tensor(weight: Any) -> None:
    pipeline = compiled(lambda logits, labels: (logits.square().mean(), weight))
    tokens, labels = padded(6, 4)
    model = copy.deepcopy(pipeline._target.model)
    loss = pipeline.step(tokens, labels)
    assert abs(loss.item() - model(tokens).square().mean().item()) <= EXACT


def test_weights_of_losses_in_half_precision_are_exact() -> None:
    """No bfloat16 is 1001, and no float16 is above 65504."""
    for dtype in (torch.bfloat16, torch.float16):
        numbers = iter((100_001, 50_000))
        pipeline = compiled(
            lambda logits, labels, dtype=dtype, numbers=numbers: (
                logits.square().mean().to(dtype),
                next(numbers),
            ),
        )
        tokens, labels = padded(6, 4)
        model = copy.deepcopy(pipeline._target.model)
        first, last = (model(part).square().mean().to(dtype).double() for part in tokens.chunk(2))
        loss = pipeline.step(tokens, labels)
        assert loss.dtype == torch.float32
        assert abs(loss.item() - (100_001 * first + 50_000 * last).item() / 150_001) <= 1e-7


def test_weights_of_zero_only_are_refused_before_gradients_are_nan() -> None:
    pipeline, _ = cleared(trained("weighted", 2, "1f1b"))
    tokens, labels = padded(6, 5)
    nothing = torch.full_like(labels, -100)
    before = pipeline.steps
    with pytest.raises(InputError, match="in this step are all 0"):
        pipeline.step(tokens, nothing)
    assert pipeline.steps == before
    assert all(parameter.grad is None for parameter in pipeline.parameters())
    assert pipeline.evaluate(tokens, nothing).isnan()  # as the unsplit model


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf"), torch.tensor(-2)])
def test_what_is_negative_or_not_finite_is_no_weight(weight: Any) -> None:
    weights = iter((weight, 10.0) * 2)
    pipeline = compiled(lambda o, _: (o.square().mean(), next(weights)))
    tokens, labels = padded(6, 6)
    for run in (pipeline.step, pipeline.evaluate):
        with pytest.raises(InputError, match="a weight that is negative or not finite"):
            run(tokens, labels)
    assert all(parameter.grad is None for parameter in pipeline.parameters())


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda o: o.mean(), "returned a Tensor, but"),
        (lambda o: (o.mean(), o.mean()), r"a tensor of shape \(\) with a gradient\), but"),
        (lambda o: (o.mean(), torch.ones(3)), r"a tensor of shape \(3,\)\), but"),
        (lambda o: (o.mean(), "many"), "a str"),
        (lambda o: (o.mean(),), r"returned \(a tensor of shape \(\) with a gradient\), but"),
        (lambda o: (1.0, 1.0), r"\(a float, a float\), but"),
        (lambda o: (o.mean((1, 2)), 1.0), r"a tensor of shape \(3,\), but it must be a real"),
    ],
)
def test_what_is_no_weighted_loss_is_refused(returned: Any, words: str) -> None:
    pipeline = compiled(lambda output, _: returned(output))
    tokens, labels = padded(6, 7)
    with pytest.raises(InputError, match=words):
        pipeline.step(tokens, labels)


def test_reductions_that_do_not_go_with_the_loss_are_refused() -> None:
    with pytest.raises(InputError, match="'max', but it is one of mean, sum, weighted"):
        compiled(LOSSES["mean"], "max")  # type: ignore[arg-type]
    for reduction, remedy in (("sum", "output.loss"), ("weighted", r"\(output.loss, weight\)")):
        with pytest.raises(
            InputError, match=f"needs a loss_fn: .* loss_fn=lambda output, target: {remedy}"
        ):
            compiled(None, reduction)  # type: ignore[arg-type]


class Labelled(nn.Module):
    """A model that returns a loss of its own, as those of transformers do; it has a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = language_model()
        self.temperature = nn.Parameter(torch.tensor(1.5).double())

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Tokens and labels of shape (N, 5) to logits and loss."""
        logits = self.layers(tokens) / self.temperature
        return {"loss": LOSSES["weighted"](logits, labels)[0], "logits": logits}


def test_the_loss_of_a_model_is_weighted_by_a_loss_function() -> None:
    """As the message says that refuses it without one; what it trains is on the last stage."""
    tokens, labels = padded(6, 8, first_row=LENGTH)
    model = Labelled()
    pipeline = pipecompile(
        model,
        (tokens, labels),
        k=2,
        microbatches=2,
        costs="flops",
        loss_fn=lambda output, labels: (output["loss"], (labels != -100).sum()),
        loss_reduction="weighted",
    )
    stages = {parameter.name: parameter.stages for parameter in pipeline.plan.parameters}
    assert stages["temperature"] == (1,)
    unsplit = copy.deepcopy(model)
    loss = pipeline.step((tokens, labels), labels)
    wanted = unsplit(tokens, labels)["loss"]
    wanted.backward()
    assert abs(loss.item() - wanted.item()) <= EXACT
    assert largest_difference(gradients_of(model), gradients_of(unsplit)) <= EXACT


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("metrics", [False, True])
def test_verify_compares_with_the_same_reduction(reduction: LossReduction, metrics: bool) -> None:
    def loss_fn(logits: Tensor, labels: Tensor) -> Any:
        returned = LOSSES[reduction](logits, labels)
        own = returned if isinstance(returned, tuple) else (returned,)
        return (*own, logits) if metrics else returned

    model, (tokens, labels) = language_model(), padded(6, 9)
    made = {
        "model": model,
        "sample_input": tokens,
        "targets": labels,
        "loss_fn": loss_fn,
        "loss_reduction": reduction,
    }
    target = Target.of(made, "the target")
    assert target == Target(
        model, arguments_of(model, tokens), loss_fn, labels, loss_reduction=reduction
    )
    _, (comparison,) = verify(target, k=2, microbatches=3)
    assert comparison.passed
    assert comparison.worst.relative == 0.0
    wanted = unsplit_loss(model, reduction, tokens, labels).item()
    assert abs(comparison.losses[1] - wanted) <= EXACT * wanted
