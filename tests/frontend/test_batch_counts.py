"""Numbers that count the whole batch are refused, and others that a loss reads are not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import InputError
from pipecompile.frontend.batch_counts import refuse_counts
from pipecompile.frontend.other_reduction import other_reduction_of
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.training.pipeline import Pipeline

ROWS = 8
X = torch.randn(ROWS, 4, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(ROWS) % 3


class OwnLoss(nn.Module):
    """Computes its loss itself, and divides it by a number if it is given one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor, count: Any = None) -> dict[str, Tensor]:
        """A tensor of shape (N, 4) and labels of shape (N,) to a scalar loss."""
        total = functional.cross_entropy(self.layer(x), labels, reduction="sum")
        return {"loss": (total / (len(x) if count is None else count)).squeeze()}


def total(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels, reduction="sum")


def mean(output: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(output, labels)


COUNTED: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any]] = {
    "a number in a dict": (lambda o, t: total(o, t["y"]) / t["n"], {"y": LABELS, "n": ROWS}),
    "a float in a pair": (lambda o, t: total(o, t[0]) / t[1], (LABELS, 8.0)),
    "a tensor": (lambda o, t: total(o, t[0]) / t[1], (LABELS, torch.tensor(8))),
    "the inverse of a number": (lambda o, t: total(o, t[0]) * t[1] ** -1, (LABELS, 8.0)),
    "deeper": (lambda o, t: total(o, t[0]) / t[1]["tokens"][0], (LABELS, {"tokens": [8, 3]})),
    "with metrics": (lambda o, t: (total(o, t[0]) / t[1], o.detach()), (LABELS, 8)),
    "a number of numpy": (lambda o, t: total(o, t[0]) / float(t[1]), (LABELS, np.int64(8))),
    "an odd number": (lambda o, t: total(o, t[0]) / t[1], (LABELS, 7)),
    "beside a penalty": (
        lambda o, t: total(o, t["y"]) / t["n"] + 0.1 * o.square().mean(),
        {"y": LABELS, "n": ROWS},
    ),
    "beside a weight": (
        lambda o, t: total(o, t["y"]) / t["n"] + t["w"] * o.square().mean(),
        {"w": 0.5, "y": LABELS, "n": ROWS},
    ),
    "two of them": (
        lambda o, t: total(o, t["y"]) / t["n"] + o.square().sum() / t["m"],
        {"y": LABELS, "n": ROWS, "m": 3.0 * ROWS},
    ),
    "a sum of squares": (lambda o, t: (o - t[0]).square().sum() / t[1], (X[:, :3], 24)),
}
READ: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any]] = {
    "a weight": (lambda o, t: mean(o, t[0]) * t[1], (LABELS, 0.3)),
    "a scale of a mean": (lambda o, t: (o - t[0]).square().mean() / t[1], (X[:, :3], 2.0)),
    "a temperature": (lambda o, t: mean(o / t[1], t[0]), (LABELS, torch.tensor(2.0))),
    "a margin": (lambda o, t: functional.relu(o.mean() - t[1]) + mean(o, t[0]), (LABELS, 0.1)),
    "a truth value": (lambda o, t: mean(o, t[0]) if t[1] else total(o, t[0]), (LABELS, True)),
    "a class to leave out": (
        lambda o, t: functional.cross_entropy(o, t[0], ignore_index=t[1]),
        (LABELS, 2),
    ),
    "what it does not read": (lambda o, t: total(o, t[0]), (LABELS, 8)),
}


def compiled(loss: Any, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    options = {"microbatches": 4, **options}
    return pipecompile(nn.Linear(4, 3), X, k=1, costs="flops", loss_fn=loss, **options)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("name", COUNTED)
@pytest.mark.parametrize("is_known", [True, False])
def test_a_count_in_the_target_is_refused(name: str, is_known: bool) -> None:
    loss, target = COUNTED[name]
    with pytest.raises(InputError, match=r"divided by the target.*loss_reduction='sum'"):
        compiled(loss, **({"sample_target": target} if is_known else {})).step(X, target)


@pytest.mark.parametrize("name", READ)
def test_other_numbers_are_taken_as_they_are(name: str) -> None:
    loss, target = READ[name]
    pipeline = compiled(loss, sample_target=target)
    found, weight = pipeline.step(X, target), next(pipeline.parameters())
    layer = nn.Linear(4, 3)
    layer.load_state_dict(pipeline.full_state_dict() or {})
    parts = zip(X.chunk(4), target[0].chunk(4), strict=True)
    losses = [loss(layer(x), (part, target[1])) for x, part in parts]
    torch.stack(losses).mean().backward()
    assert torch.allclose(found, torch.stack(losses).mean())
    assert weight.grad is not None and layer.weight.grad is not None
    assert torch.allclose(weight.grad, layer.weight.grad)


@pytest.mark.parametrize("count", [ROWS, float(ROWS), torch.tensor(ROWS), torch.tensor([ROWS])])
def test_a_count_among_the_inputs_is_refused(count: Any) -> None:
    batch = {"x": X, "labels": LABELS, "count": count}
    dims = {"x": 0, "labels": 0, **({"count": None} if isinstance(count, Tensor) else {})}
    with pytest.raises(InputError, match=r"divided by the input\['count'\]"):
        pipecompile(OwnLoss(), batch, k=1, microbatches=4, costs="flops", batch_dim=dims)


def test_numbers_are_never_enlarged() -> None:
    """One may be an index, and on a GPU no process survives an index that is too large."""
    seen: list[Any] = []

    def loss(given: Any) -> Tensor:
        seen.append(given["step"])
        return given["x"].mean() * torch.tensor([1.0, 2.0, 4.0])[given["step"]]

    ones = torch.ones(4)
    for step in (2, torch.tensor(1)):
        refuse_counts(loss, {"x": ones, "step": step}, {"x": torch.ones(8), "step": step})
    one, two = ({"x": ones[:rows], "step": torch.ones(rows).long()} for rows in (1, 2))
    refuse_counts(loss, one, two)  # these are samples, and no numbers
    assert seen and max(seen) == 2


def test_numbers_that_are_not_read_cost_two_calls() -> None:
    calls = []

    def loss(given: Any) -> Tensor:
        calls.append(given)
        return given["x"].sum()

    options = {f"option {number}": 1.0 * number for number in range(9)}
    refuse_counts(loss, {"x": torch.ones(4), **options}, {"x": torch.ones(8), **options})
    assert len(calls) == 2


def test_a_loss_that_is_a_sum_is_right_with_a_count() -> None:
    batch = {"x": X, "labels": LABELS, "count": torch.tensor(ROWS)}
    model = OwnLoss()
    whole = model(**batch)["loss"].item()
    pipeline = pipecompile(
        model,
        batch,
        k=1,
        microbatches=4,
        costs="flops",
        loss_fn=lambda output, _: output["loss"],
        loss_reduction="sum",
    )
    assert pipeline.step(batch).item() == pytest.approx(whole)


class Counted(nn.Module):
    """A loss with a layer of its own, and a number in its target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 3), nn.Dropout(0.0)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: tuple[Tensor, int]) -> Tensor:
        self.calls += 1
        return total(self.dropout(self.layer(output)), target[0]) / target[1]


def test_a_loss_module_is_asked_and_left_as_it_was() -> None:
    loss = Counted()
    with pytest.raises(InputError, match="divided by the target"):
        compiled(loss, sample_target=(LABELS, ROWS))
    assert loss.calls == 0 and all(module.training for module in loss.modules())


def test_a_loss_is_called_once_for_each_microbatch() -> None:
    calls, generator = [0], random.Random(0)

    def loss(output: Tensor, target: tuple[Tensor, int]) -> Tensor:
        calls[0] += 1
        return mean(output, target[0]) * generator.random()

    compiled(loss, sample_target=(LABELS, 3)).step(X, (LABELS, 3))
    assert calls == [4]
    drawn = random.Random(0)
    assert [drawn.random() for _ in range(5)][-1] == generator.random()


@settings(max_examples=25, deadline=None)
@given(st.floats(0.5, 1e4), st.integers(1, 9), st.booleans())
def test_any_count_of_a_sum_is_found(count: float, rows: int, is_sum: bool) -> None:
    values = torch.rand(rows) + 0.1

    def loss(given: Any) -> Tensor:
        own, number = given.values()
        return (own.sum() if is_sum else own.mean()) / number

    one, two = ({"values": each, "n": count} for each in (values, torch.cat([values, values])))
    if not is_sum:
        refuse_counts(loss, one, two)
        return
    with pytest.raises(InputError, match="divided by n, which"):
        refuse_counts(loss, one, two)


REDUCTIONS = pytest.mark.parametrize(
    ("loss", "reduction", "word"), [(total, "mean", "a sum"), (mean, "sum", "a mean")]
)


@REDUCTIONS
@pytest.mark.parametrize("microbatches", [2, 4, ROWS])
def test_a_loss_of_another_reduction_is_told_at_the_compile(
    loss: Any, reduction: str, word: str, microbatches: int, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(loss, sample_target=LABELS, loss_reduction=reduction, microbatches=microbatches)
    assert f"the loss is {word} over samples" in caplog.text


@REDUCTIONS
def test_so_it_is_of_an_odd_number_of_microbatches(loss: Any, reduction: Any, word: str) -> None:
    model = nn.Linear(4, 3)
    call, labels = arguments_of(model, X[:6]), LABELS[:6]
    target = Target(model, call, loss_fn=loss, targets=labels, loss_reduction=reduction)
    assert f"the loss is {word} over samples" in (other_reduction_of(target, 3) or "")


def test_a_mean_over_labelled_rows_of_which_a_part_has_none_is_no_sum(
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = LABELS.clone()
    labels[: len(labels) // 2] = -100

    def labelled(output: Tensor, target: Tensor) -> Tensor:
        rows = target != -100
        total = functional.cross_entropy(output, target, reduction="sum", ignore_index=-100)
        return total / rows.sum().clamp(min=1)

    compiled(labelled, sample_target=labels, microbatches=2).step(X, labels)
    assert "over samples" not in caplog.text


@REDUCTIONS
def test_without_a_sample_it_is_told_in_the_first_step(
    loss: Any, reduction: str, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = compiled(loss, loss_reduction=reduction)
    for _ in range(2):
        pipeline.step(X, LABELS)
    assert caplog.text.count(f"the loss is {word} over samples") == 1


@pytest.mark.parametrize("sample", [{}, {"sample_target": LABELS}])
@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (mean, "mean"),
        (total, "sum"),
        (lambda o, t: mean(o, t) + 0.1 * total(o, t), "mean"),
        (lambda o, _: o.sum() * 0, "mean"),
        # A contrastive loss of random rows grows by the logarithm of their number.
        (lambda o, _: functional.cross_entropy(o @ o.T, torch.arange(len(o))), "mean"),
    ],
)
def test_of_other_losses_nothing_is_told(
    loss: Any, reduction: str, sample: Any, caplog: pytest.LogCaptureFixture
) -> None:
    compiled(loss, loss_reduction=reduction, **sample).step(X, LABELS)
    assert "over samples" not in caplog.text
