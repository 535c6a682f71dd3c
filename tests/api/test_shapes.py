"""Batches of several shapes in one pipeline, against the unsplit model in float64."""

from __future__ import annotations

import copy
import logging
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from zoo import same

from pipecompile import CaptureError, InputError, Pipeline, pipecompile
from pipecompile.api.verification import Reference, reference_for
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.ir.size import size_text
from tests.shaped_models import CausalModel, ImageModel, samples_of, token_loss
from tests.unequal_batches import gradients_of, largest_difference, unsplit_step

EXACT = 1e-12
SIZES = {16: 2, 8: 4, 12: 1}
"""The samples of a microbatch by the length of its sequences; the plan is made for the first."""
MICROBATCHES = 4


def compiled(model: nn.Module, **options: Any) -> Pipeline:
    """A pipeline for batches of all lengths."""
    first, *others = (samples_of(MICROBATCHES * size, length)[0] for length, size in SIZES.items())
    options = {"k": 2, "loss_fn": token_loss, "self_check": False, **options}
    return pipecompile(
        model, first, microbatches=MICROBATCHES, costs="flops", shapes=others, **options
    )


@cache
def shared() -> Pipeline:
    """A pipeline whose weights no test changes."""
    torch.manual_seed(0)
    return compiled(CausalModel().double())


def reference_at(model: nn.Module, length: int, pipeline: Pipeline) -> Reference:
    """The unsplit model, captured for this length alone where it draws random numbers."""
    ids, targets = samples_of(MICROBATCHES * SIZES[length], length)
    target = Target(model, arguments_of(model, ids), pipeline._target.loss_fn, targets)
    return reference_for(target, pipeline.plan)


def check_steps(pipeline: Pipeline, steps: list[tuple[int, int]]) -> None:
    """Assert for steps of so many samples of this length that each is the unsplit one, bit for bit,
    with an update of the weights after each.
    """
    model, loss_fn = pipeline._target.model, pipeline._target.trained_by
    references = {length: reference_at(model, length, pipeline) for length in SIZES}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number, (samples, length) in enumerate(steps):
        ids, targets = samples_of(samples, length, number)
        reference, planned = references[length], SIZES[length]
        reference.model.load_state_dict(model.state_dict())
        reference.model.zero_grad()
        optimizer.zero_grad()
        loss = pipeline.step(ids, targets)
        wanted = unsplit_step(
            lambda key, rows, run=reference._run: run(key, (rows,), {}),
            *(loss_fn, ids, targets, planned),
            step=number,
        )
        assert torch.equal(loss, wanted)
        assert same(gradients_of(model), gradients_of(reference.model, samples / planned))
        optimizer.step()


STEPS = [(8, 16), (16, 8), (4, 12), (7, 16), (13, 8), (8, 16), (3, 12), (2, 8), (16, 8)]
"""Samples and length: whole batches, and batches with a remainder, in turns."""


@pytest.mark.sweep
@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    "options",
    [{"schedule": "1f1b", "recompute": "block"}, {"schedule": "zb-h1", "self_check": True}],
    ids=lambda options: options["schedule"],
)
def test_steps_of_alternating_shapes_are_the_unsplit_ones(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    pipeline = compiled(CausalModel().double(), **options)
    assert any(len(parameter.stages) > 1 for parameter in pipeline.plan.parameters)
    check_steps(pipeline, STEPS)


@pytest.mark.sweep
def test_a_gpt2_of_transformers_with_masks_by_length() -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=13, n_embd=16, n_layer=3, n_head=2, n_positions=32, use_cache=False
    )
    model = transformers.GPT2LMHeadModel(config).double()
    pipeline = compiled(
        model, k=3, loss_fn=lambda output, targets: token_loss(output.logits, targets)
    )
    assert config.resid_pdrop > 0
    check_steps(pipeline, [(8, 16), (16, 8), (4, 16), (4, 12), (8, 16)])


def test_further_shapes_are_proven_without_the_targets_of_the_planned_one() -> None:
    """Which are of another length, and here of another number of samples."""
    (first, target), (other, _) = samples_of(8, 16), samples_of(12, 8)
    pipeline = pipecompile(
        *(CausalModel().double(), first),
        k=2,
        microbatches=4,
        costs="flops",
        loss_fn=token_loss,
        sample_target=target,
        shapes=[other],
    )
    assert torch.isfinite(pipeline.step(*samples_of(12, 8)))


def test_lengths_share_a_capture_where_it_holds() -> None:
    """Not for microbatches of one sample, which torch takes apart."""
    methods = [program.captured.method for program in shared()._programs.declared]
    assert methods == ["recorded", "recorded with open lengths", "recorded"]


def test_evaluation_of_any_number_of_samples_of_each_shape() -> None:
    pipeline = shared()
    twin = copy.deepcopy(pipeline._target.model).eval()
    for samples, length in ((11, 16), (1, 8), (23, 8), (4, 12), (8, 16)):
        ids, targets = samples_of(samples, length)
        assert (pipeline.evaluate(ids) - twin(ids)).abs().max() <= EXACT
        loss = pipeline.evaluate(ids, targets)
        assert abs(loss.item() - token_loss(twin(ids), targets).item()) <= EXACT


def images_of(samples: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, height, width).double(), torch.randint(5, (samples,))


@pytest.mark.parametrize("batch_norm", ["microbatch", "minibatch"])
def test_images_of_two_sizes_accumulated(batch_norm: Any) -> None:
    """Running averages see all pixels of both: one microbatch after another, or all at once."""
    torch.manual_seed(0)
    model = ImageModel().double()
    (large, large_labels), (small, small_labels) = images_of(8, 12, 16), images_of(15, 8, 8)
    pipeline = pipecompile(
        *(model, large),
        k=3,
        microbatches=4,
        costs="flops",
        loss_fn=functional.cross_entropy,
        batch_norm=batch_norm,
        shapes=[images_of(16, 8, 8)[0]],
        self_check=False,
    )
    twin = copy.deepcopy(model)
    wanted = []
    for images, labels, planned in ((large, large_labels, 2), (small, small_labels, 4)):
        twin.zero_grad()
        unsplit_step(lambda _, rows: twin(rows), functional.cross_entropy, images, labels, planned)
        wanted.append(gradients_of(twin, len(images) / planned))
    pipeline.step(large, large_labels, accumulate=True)
    pipeline.step(small, small_labels)
    summed = {name: wanted[0][name] + wanted[1][name] for name in wanted[0]}
    assert largest_difference(gradients_of(model), summed) <= EXACT
    if batch_norm == "microbatch":
        assert same(dict(model.named_buffers()), dict(twin.named_buffers()))
        return
    with torch.no_grad():
        pixels = [twin.first(images).movedim(1, 0).flatten(1) for images in (large, small)]
    variance, mean = torch.var_mean(torch.cat(pixels, 1), 1)
    assert (model.norm.running_mean - 0.1 * mean).abs().max() <= EXACT
    assert (model.norm.running_var - 0.9 - 0.1 * variance).abs().max() <= EXACT


class OtherNorm(nn.Module):
    """Its first batch norm is another one for long inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        for name in ("long", "short"):
            self.register_buffer(f"{name}_mean", torch.zeros(6))
            self.register_buffer(f"{name}_variance", torch.ones(6))

    def forward(self, value: Tensor) -> Tensor:
        name = "long" if value.shape[1] > 4 else "short"
        averages = getattr(self, f"{name}_mean"), getattr(self, f"{name}_variance")
        value = functional.batch_norm(self.first(value).mT, *averages, training=True)
        return self.last(value.mT).mean(1)


def test_averages_of_other_batch_norms_are_not_merged() -> None:
    batches = [torch.randn(8, length, 6) for length in (6, 3)]
    labels = torch.randint(5, (8,))
    pipeline = pipecompile(
        *(OtherNorm(), batches[0]),
        k=1,
        microbatches=2,
        costs="flops",
        loss_fn=functional.cross_entropy,
        batch_norm="minibatch",
        shapes=batches[1:],
    )
    pipeline.step(batches[0], labels, accumulate=True)
    with pytest.raises(InputError, match="one batch norm in microbatches of one size and another"):
        pipeline.step(batches[1], labels)


def test_a_shape_that_was_not_declared_is_refused() -> None:
    pipeline, steps = shared(), shared().steps
    message = (
        r"the batch has ids \(8, 10\), but the pipeline runs microbatches of ids \(2, 16\) or ids "
        r"\(4, 8\) or ids \(1, 12\): only the number of samples may differ; pad the batch, or "
        r"declare"
    )
    with pytest.raises(InputError, match=message):
        pipeline.step(*samples_of(8, 10))
    with pytest.raises(InputError, match=message):
        pipeline.evaluate(samples_of(8, 10)[0])
    with pytest.raises(InputError, match="holds 5 microbatches, but the plan was made for 4"):
        pipeline.step(*samples_of(17, 8))
    assert pipeline.steps == steps


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([samples_of(4, 16)[0]], r"shapes\[0\]: it differs from sample_input, or from a shape"),
        ([samples_of(8, 8)[0], samples_of(4, 8)[0]], r"shapes\[1\]: it differs from sample_input"),
        ([samples_of(8, 8)[0].int()], r"shapes\[0\]: ids is of type torch.int32, but that of"),
        ([samples_of(6, 8)[0]], r"shapes\[0\]: a tensor of shape \(6, 8\) cannot be cut into 4"),
        ([samples_of(8, 8)], r"shapes\[0\]: CausalModel.forward cannot be called"),
        ([samples_of(8, 8)[0].to("meta")], r"shapes\[0\]: a pipeline runs the model, but it"),
        ([samples_of(8, 80)[0]], r"shapes\[0\]: a training step of the model itself fails"),
    ],
)
def test_what_cannot_be_a_further_shape_is_refused(shapes: list[Any], message: str) -> None:
    ids, _ = samples_of(8, 16)
    options = {"costs": "flops", "microbatches": 4, "loss_fn": token_loss}
    with pytest.raises((InputError, CaptureError), match=message):
        pipecompile(CausalModel().double(), ids, k=2, shapes=shapes, **options)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name == "pipecompile.api"]


def test_a_larger_shape_is_warned_of_by_the_plan_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.manual_seed(0)
    model = CausalModel().double()
    small, large = samples_of(8, 8)[0], samples_of(8, 32)[0]
    options: dict[str, Any] = {"k": 2, "microbatches": 4, "costs": "flops", "loss_fn": token_loss}
    pin = {"dropout": 0, "add_2": 1}
    plans = [pipecompile(model, ids, pin=pin, **options).plan for ids in (small, large)]
    assert [stage.nodes for stage in plans[0].stages] == [stage.nodes for stage in plans[1].stages]
    with caplog.at_level(logging.WARNING, "pipecompile.api"):
        pipecompile(model, large, plan=plans[1], loss_fn=token_loss, shapes=[small])
        assert not warnings_in(caplog)
        pipecompile(model, small, plan=plans[0], loss_fn=token_loss, shapes=[large])
    needed = [size_text(rank.total.bound) for rank in plans[1].prediction.memory]
    held = [size_text(rank.total.bound) for rank in plans[0].prediction.memory]
    assert len(warnings_in(caplog)) == 2
    for rank, text in enumerate(warnings_in(caplog)):
        assert f"of ids (2, 32) may need {needed[rank]} on rank {rank}" in text
        assert f"those of the plan, ids (2, 8), {held[rank]}; give the largest shape" in text
    with pytest.raises(InputError, match=r"of ids \(2, 32\) may need .* give the largest shape"):
        pipecompile(model, small, memory="1GB", shapes=[large], **options)


class Leaving(nn.Module):
    """It leaves a layer out for short inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.first(value))
        value = self.middle(value) if value.shape[1] > 4 else value
        return self.last(value)


def test_a_shape_that_cannot_be_cut_like_the_plan_is_refused() -> None:
    message = r"stage 1 has nothing to run.*compile the model in this mode or with this shape"
    with pytest.raises(CaptureError, match=message):
        pipecompile(
            *(Leaving(), torch.randn(8, 6, 6)),
            k=3,
            microbatches=2,
            costs="flops",
            loss_fn=lambda output, _: output.sum(),
            pin={"first": 0, "tanh": 0, "middle": 1, "last": 2},
            shapes=[torch.randn(8, 3, 6)],
        )


def test_a_model_on_the_meta_device() -> None:
    """Its other shapes are cut on the meta device, and run on the tensors that are made later."""
    with torch.device("meta"):
        model = ImageModel().double()
    images = {size: images_of(samples, *size) for samples, size in ((8, (12, 16)), (16, (8, 8)))}
    first, other = (batch for batch, _ in images.values())
    options = {"costs": "flops", "microbatches": 4, "loss_fn": functional.cross_entropy}
    pipeline = pipecompile(model, first, k=3, shapes=[other], seed=3, **options)
    twin = ImageModel().double()
    twin.load_state_dict(pipeline.state_dict())
    for batch, labels in images.values():
        pipeline.zero_grad()
        twin.zero_grad()
        pipeline.step(batch, labels)
        unsplit_step(
            lambda _, rows: twin(rows), functional.cross_entropy, batch, labels, len(batch) // 4
        )
        assert same(gradients_of(model), gradients_of(twin, 4))
        assert same(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_a_recorded_step_says_its_shape() -> None:
    pipeline = shared()
    with pipeline.record() as recorder:
        for samples, length in ((8, 16), (16, 8)):
            pipeline.step(*samples_of(samples, length))
    shapes = [step.microbatch_shapes for step in recorder.run.steps]
    assert shapes == [((2, 16),), ((4, 8),)]
    assert shapes[0] == pipeline.plan.microbatch_shapes
