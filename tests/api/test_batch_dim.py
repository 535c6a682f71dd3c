"""The batch in another dimension than 0: steps and evaluations are those of the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional

from pipecompile import InputError, StalePlanError, pipecompile
from pipecompile.api.verification import verify
from pipecompile.cli import commands
from pipecompile.frontend.target import Target
from pipecompile.ir.serialization import encode, write
from pipecompile.training.pipeline import Pipeline
from tests.time_major import (
    DIMS,
    LENGTH,
    WIDTH,
    Classifier,
    Encoder,
    Recurrent,
    Translator,
    gap,
    loop,
    output_loss,
    translations,
)

EXACT = 1e-12
MODELS = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "encoder": Encoder,
}


def batch_of(samples: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, samples, WIDTH, generator=generator).double()


def compiled(model: nn.Module, sample: Any, **options: Any) -> Pipeline:
    options = {"k": 2, "microbatches": 4, "costs": "flops", "loss_fn": output_loss, **options}
    return pipecompile(model.double(), sample, **options)


def assert_steps_are_those_of_the_loop(
    pipeline: Pipeline,
    unsplit: nn.Module,
    batches: list[dict[str, Tensor]],
    dims: Mapping[str, int | None],
    planned: int = 2,
) -> None:
    """A step with each batch leaves the loss and the gradients of the loop over views."""
    for number, batch in enumerate(batches):
        name = next(name for name, dim in dims.items() if dim == 1)
        target = torch.randn_like(batch[name])
        pipeline.zero_grad()
        loss = pipeline.step(batch, target)
        wanted, gradients = loop(unsplit, output_loss, batch, target, dims, planned)
        own = {name: p.grad for name, p in pipeline.named_parameters() if p.grad is not None}
        assert own.keys() == gradients.keys()
        assert gap(loss, wanted) <= EXACT, number
        assert gap(own, {name: gradients[name] for name in own}) <= EXACT, number


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "options",
    [{}, {"schedule": "zb-h1", "recompute": "stage"}, {"k": 1, "self_check": False}],
    ids=["plain", "recomputed", "one stage"],
)
def test_steps_and_evaluations_along_dimension_1(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    unsplit = copy.deepcopy(model)
    pipeline = compiled(model, {"value": batch_of(8)}, batch_dim=1, **options)
    batches = [{"value": batch_of(samples, seed=samples)} for samples in (8, 6, 7, 1, 8)]
    assert_steps_are_those_of_the_loop(pipeline, unsplit, batches, {"value": 1})
    unsplit.eval()
    for samples in (1, 2, 7, 20):
        batch = batch_of(samples, seed=samples)
        # The encoder takes another path without gradients.
        assert gap(pipeline.evaluate({"value": batch}), unsplit(batch)) <= EXACT


def test_equal_microbatches_leave_the_bits_of_the_loop_over_views() -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    unsplit = copy.deepcopy(model)
    pipeline = compiled(model, batch_of(8), batch_dim=1)
    target = torch.randn_like(batch_of(8))
    loss = pipeline.step(batch_of(8), target)
    parts = zip(batch_of(8).chunk(4, 1), target.chunk(4, 1), strict=True)
    losses = [output_loss(unsplit(part), wanted) for part, wanted in parts]
    for each in losses:
        each.backward()
    assert torch.equal(loss, torch.stack(losses).mean())
    for own, other in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad / 4)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("options", [{}, {"recompute": "stage"}], ids=["plain", "recomputed"])
def test_each_input_has_its_own_dimension(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Translator().double()
    unsplit = copy.deepcopy(model)
    pipeline = compiled(model, translations(8), batch_dim=DIMS, **options)
    batches = [translations(samples, seed=samples) for samples in (8, 7, 3)]
    wanted_first = {"wanted": 1, **DIMS}
    for batch in batches:
        target = torch.randn_like(batch["wanted"])
        pipeline.zero_grad()
        loss = pipeline.step(batch, target)
        wanted, gradients = loop(unsplit, output_loss, batch, target, wanted_first, 2)
        own = {name: p.grad for name, p in pipeline.named_parameters()}
        assert gap(loss, wanted) <= EXACT
        assert gap(own, {name: gradients[name] for name in own}) <= EXACT
    for samples in (1, 7, 12):
        batch = translations(samples, seed=samples)
        assert gap(pipeline.evaluate(batch), unsplit.eval()(**batch)) <= EXACT


@pytest.mark.parametrize("planned", [1, 2, 8])
def test_outputs_are_joined_where_they_have_the_batch(planned: int) -> None:
    torch.manual_seed(0)
    model = Classifier().double()
    unsplit = copy.deepcopy(model)
    pipeline = compiled(
        model,
        batch_of(8),
        batch_dim=1,
        microbatches=8 // planned,
        loss_fn=functional.cross_entropy,
    )
    labels = torch.arange(8) % 3
    loss = pipeline.step(batch_of(8), labels)
    wanted = functional.cross_entropy(unsplit(batch_of(8)), labels)
    wanted.backward()
    assert gap(loss, wanted) <= EXACT
    for own, other in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert gap(own.grad, other.grad) <= EXACT
    for samples in (3, 8, 17):
        if planned == 1 or samples % planned != 1:
            batch = batch_of(samples, seed=samples)
            assert gap(pipeline.evaluate(batch), unsplit(batch)) <= EXACT


def test_states_are_joined_also_where_inputs_have_the_batch_first() -> None:
    torch.manual_seed(0)
    model = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True).double()
    pipeline = compiled(model, batch_of(8).transpose(0, 1).contiguous(), k=1)
    batch = torch.randn(7, LENGTH, WIDTH).double()
    assert gap(pipeline.evaluate(batch), model.eval()(batch)) <= EXACT


class Regression(Classifier):
    """One number for each sample."""

    def __init__(self) -> None:
        super().__init__(classes=1)


def test_an_output_of_single_samples_that_may_be_joined_in_two_ways_is_refused() -> None:
    loss_fn = functional.mse_loss
    pipeline = compiled(Regression(), batch_of(4), batch_dim=1, loss_fn=loss_fn)
    assert pipeline.step(batch_of(4), torch.randn(4, 1).double()).isfinite()
    with pytest.raises(InputError, match=r"shape \(1, 1\) has no dimension that is known to be"):
        pipeline.evaluate(batch_of(4))
    assert pipeline.evaluate(batch_of(4), torch.randn(4, 1).double()).isfinite()
    two = compiled(Regression(), batch_of(8), batch_dim=1, loss_fn=loss_fn)
    assert two.evaluate(batch_of(6)).shape == (6, 1)


class Flat(nn.Module):
    """Returns a row for each time and sample: rows of different samples alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return self.last(self.first(value)).flatten(0, 1)


def test_rows_that_alternate_are_not_joined() -> None:
    pipeline = compiled(Flat(), batch_of(8), batch_dim=1, loss_fn=lambda y, _: y.square().mean())
    pipeline.step(batch_of(8))
    with pytest.raises(InputError, match=r"output 0 of shape \(10, 8\) has no dimension"):
        pipeline.evaluate(batch_of(8))
    # Where the batch is first, the rows of a sample lie together.
    first = compiled(Flat(), batch_of(8).transpose(0, 1).contiguous(), loss_fn=output_loss)
    batch = torch.randn(7, LENGTH, WIDTH).double()
    assert gap(first.evaluate(batch), first._target.model(batch)) <= EXACT


class AsksLayout(Classifier):
    """Takes another branch for what does not lie in memory in order."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value if value.is_contiguous() else -value)


@pytest.mark.parametrize("samples", [8, 6, 7])
def test_microbatches_lie_in_memory_in_order_whatever_the_batch(samples: int) -> None:
    torch.manual_seed(0)
    model = AsksLayout().double()
    unsplit = copy.deepcopy(model).eval()
    pipeline = compiled(model, batch_of(8), batch_dim=1, loss_fn=functional.cross_entropy)
    whole = batch_of(2 * samples, seed=1)
    # A view of every other sample, whose microbatches are in order again.
    batch, ordered = whole[:, ::2], whole[:, ::2].contiguous()
    assert gap(pipeline.evaluate(batch), unsplit(ordered)) <= EXACT
    pipeline.step(batch, torch.arange(samples) % 3)


def test_shapes_differ_in_dimension_0() -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    unsplit = copy.deepcopy(model)
    pipeline = compiled(
        model, {"value": batch_of(8)}, batch_dim=1, shapes=[{"value": batch_of(8, 3)}]
    )
    batches = [{"value": batch_of(n, length)} for n, length in ((8, 5), (7, 3), (6, 5))]
    assert_steps_are_those_of_the_loop(pipeline, unsplit, batches, {"value": 1})
    batch = batch_of(9, 3)
    assert gap(pipeline.evaluate({"value": batch}), unsplit.eval()(batch)) <= EXACT
    with pytest.raises(InputError, match=r"\(4, 8, 8\), but .* \(5, 2, 8\) or value \(3, 2, 8\)"):
        pipeline.step({"value": batch_of(8, 4)}, batch_of(8, 4))
    with pytest.raises(InputError, match=r"shapes\[0\]: it differs .* in the number of samples"):
        compiled(Recurrent(), batch_of(8), batch_dim=1, shapes=[batch_of(4)])


@pytest.mark.sweep
def test_verify_cuts_a_target_where_it_says() -> None:
    torch.manual_seed(0)
    made: dict[str, Any] = {
        "model": Translator().double(),
        "sample_input": (translations(8)["source"], translations(8)["wanted"]),
        "sample_kwargs": {name: translations(8)[name] for name in ("padding", "causal")},
        "batch_dim": DIMS,
        "targets": torch.randn(LENGTH + 1, 8, WIDTH).double(),
        "loss_fn": output_loss,
    }
    _, comparisons = verify(Target.of(made, "here"), k=2, microbatches=4)
    # In its own modes, and in eval mode beside the original module.
    assert [each.passed for each in comparisons] == [True, True]


TARGET = """
import torch

def target():
    torch.manual_seed(0)
    return {"model": torch.nn.LSTM(8, 8, 2), "sample_input": torch.randn(5, 6, 8), "batch_dim": 1}
"""


def test_the_command_line_knows_where_the_batch_is(tmp_path: Path) -> None:
    (tmp_path / "recurrent.py").write_text(TARGET)
    target, plan = f"{tmp_path / 'recurrent.py'}:target", str(tmp_path / "plan.json")
    options = ["-k", "1", "--microbatches", "3", "--costs", "flops"]
    for arguments in (
        ["verify", target, *options],
        ["plan", target, *options, "-o", plan],
        ["check", plan, target],
    ):
        result = CliRunner().invoke(commands, arguments)
        assert result.exit_code == 0, result.output


def test_a_plan_is_for_microbatches_wherever_the_batch_is(tmp_path: Path) -> None:
    """A plan knows microbatches only: one of these shapes is cut as rightly along dimension 0."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    plan = compiled(copy.deepcopy(layers), torch.randn(2, 8, WIDTH).double(), batch_dim=1).plan
    path = tmp_path / "plan.json"
    write(path, encode(plan))
    unsplit = copy.deepcopy(layers)
    sample = torch.randn(8, 2, WIDTH).double()
    pipeline = pipecompile(layers, sample, plan=path, loss_fn=functional.mse_loss)
    target = torch.randn_like(sample)
    loss = pipeline.step(sample, target)
    wanted = functional.mse_loss(unsplit(sample), target)
    wanted.backward()
    assert gap(loss, wanted) <= EXACT
    for own, other in zip(layers.parameters(), unsplit.parameters(), strict=True):
        assert gap(own.grad, other.grad) <= EXACT
    with pytest.raises(StalePlanError, match="was made for another graph"):
        pipecompile(unsplit, torch.randn(8, 4, WIDTH).double(), plan=path, batch_dim=1)


def lengths_model() -> nn.Module:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor, weights: Tensor) -> Tensor:
            return self.last(self.first(value) * weights[:, None])

    return Weighted().double()


@pytest.mark.parametrize(
    ("batch_dim", "message"),
    [
        (1, r"batch_dim=1 is no dimension of weights, .* \(8,\); give one for each"),
        ({"value": 3}, "batch_dim=3 is no dimension of value"),
        ({"values": 1}, "batch_dim names 'values', but the input tensors are value, weights"),
        ("1", "batch_dim='1' is no dimension of value"),
        ({"weights": None}, "no common number|cannot be cut"),
        ({"value": None, "weights": None}, "the inputs have no common number of samples"),
        (0, r"no common number of samples.*value \(5, 8, 8\), weights \(8,\); say with batch_dim"),
    ],
)
def test_what_is_no_dimension_is_refused(batch_dim: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(lengths_model(), (batch_of(8), torch.rand(8).double()), batch_dim=batch_dim)


@pytest.mark.parametrize("batch_dim", [{"value": 1}, {"value": -2, "weights": -1}])
def test_inputs_that_are_not_named_have_the_batch_first(batch_dim: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = lengths_model()
    pipeline = compiled(model, (batch_of(8), torch.rand(8).double()), batch_dim=batch_dim)
    batch = batch_of(7), torch.rand(7).double()
    assert gap(pipeline.evaluate(batch), model(*batch)) <= EXACT


def test_time_first_without_a_word_is_refused_with_the_way() -> None:
    with pytest.raises(InputError, match="If the batch is dimension 1, give batch_dim=1"):
        compiled(nn.LSTM(WIDTH, WIDTH), batch_of(8, length=8), k=1)
    with pytest.raises(InputError, match="If the batch is dimension 0, give batch_dim=0"):
        compiled(nn.GRU(WIDTH, WIDTH, batch_first=True), batch_of(8, length=8), k=1, batch_dim=1)


def test_targets_are_cut_like_the_inputs_or_as_they_are_told() -> None:
    torch.manual_seed(0)
    model = Recurrent().double()
    unsplit = copy.deepcopy(model)
    pipeline = compiled(model, batch_of(8), batch_dim=1)
    square = batch_of(LENGTH), torch.randn(LENGTH, LENGTH, WIDTH).double()
    with pytest.raises(InputError, match=r"batch has 5 samples \(in dimensions \[0, 1\]\?\)"):
        pipeline.step(*square)
    told = compiled(model, batch_of(8), batch_dim=1, target_batch_dims=1)
    loss = told.step(*square)
    wanted, _ = loop(unsplit, output_loss, {"value": square[0]}, square[1], {"value": 1}, 2)
    assert gap(loss, wanted) <= EXACT


def test_metrics_beside_the_loss_are_joined_along_dimension_0() -> None:
    torch.manual_seed(0)

    def with_metrics(output: Any, target: Tensor) -> tuple[Tensor, Tensor]:
        return output_loss(output, target), output[0].transpose(0, 1).detach()

    model = Recurrent().double()
    pipeline = compiled(model, batch_of(8), batch_dim=1, loss_fn=with_metrics)
    _, outputs = pipeline.step(batch_of(7), batch_of(7))
    assert gap(outputs, model(batch_of(7))[0].transpose(0, 1)) <= EXACT
