"""The option `batch_norm` from end to end."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from pipecompile import InputError, pipecompile
from pipecompile.api import verification
from pipecompile.api.verification import verify
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import decode, encode


def images(*, dropout: float = 0.0) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.BatchNorm2d(3)]
    for inputs, outputs in ((3, 4), (4, 4), (4, 4)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Dropout(dropout), nn.Flatten(), nn.Linear(4 * 36, 2))
    return model, torch.randn(16, 3, 6, 6) * torch.arange(1, 17)[:, None, None, None] + 5


def squares(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


def plan_of(**options: Any) -> Plan:
    model, x = images()
    return pipecompile(model, x, loss_fn=squares, costs="flops", microbatches=4, **options).plan


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"recompute": "stage"}, {"recompute": "block"}])
def test_a_pipeline_trains_by_the_minibatch(k: int, options: dict[str, Any]) -> None:
    model, x = images()
    model, x = model.double(), x.double()
    unsplit, other = copy.deepcopy(model), copy.deepcopy(model)
    options = {"loss_fn": squares, "costs": "flops", "k": k, "microbatches": 4, **options}
    pipeline = pipecompile(model, x, batch_norm="minibatch", **options)
    plain = pipecompile(other, x, batch_norm="microbatch", **options)
    for batch in (x, x.flip(0)[:12]):  # the last minibatch is short
        assert torch.equal(pipeline.step(batch), plain.step(batch))
        unsplit[0](batch)
    for own, wanted in zip(model[0].buffers(), unsplit[0].buffers(), strict=True):
        assert (own - wanted).abs().max() <= 1e-12
    assert model[5].num_batches_tracked == 2
    assert other[5].num_batches_tracked == 7
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_evaluation_uses_the_averages_and_leaves_them() -> None:
    model, x = images()
    pipeline = pipecompile(
        model, x, loss_fn=squares, costs="flops", k=2, microbatches=4, batch_norm="minibatch"
    )
    pipeline.step(x)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    output = pipeline.evaluate(x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.testing.assert_close(output, copy.deepcopy(model).eval()(x))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_verify_compares_averages_of_the_minibatch(dropout: float) -> None:
    model, x = images(dropout=dropout)
    target = Target(model, arguments_of(model, x), squares, None)
    options = {"k": 3, "microbatches": 4, "recompute": "stage", "self_check": False}
    _, found = verify(target, batch_norm="minibatch", **options)
    names = [d.name for d in found[0].differences if d.kind == "buffer"]
    assert "1.running_var" in names or "2.running_var" in names
    assert all(comparison.passed for comparison in found)


def test_verify_notices_averages_that_were_not_updated() -> None:
    model, x = images()
    target = Target(model, arguments_of(model, x), squares, None)
    with patch.object(verification, "minibatch_statistics", lambda: patch.dict({})):
        _, (found,) = verify(target, k=2, microbatches=4, batch_norm="minibatch", self_check=False)
    assert not found.passed


def test_the_plan_has_the_option_and_is_otherwise_the_same() -> None:
    options = {"k": 2, "recompute": "auto", "memory": "1GiB"}
    plan, other = plan_of(batch_norm="minibatch", **options), plan_of(**options)
    assert (plan.options.batch_norm, other.options.batch_norm) == ("minibatch", "microbatch")
    text = encode(plan).decode()
    assert decode(text.encode(), Plan, origin="test").options.batch_norm == "minibatch"
    assert text.replace('"minibatch"', '"microbatch"') == encode(other).decode()


def test_a_plan_file_of_before_has_the_default() -> None:
    text = encode(plan_of(k=2)).decode()
    assert '"batch_norm": "microbatch"' in text
    older = text.replace('"batch_norm": "microbatch", ', "").replace(
        ', "batch_norm": "microbatch"', ""
    )
    assert "batch_norm" not in older.split('"capture"')[0]
    assert decode(older.encode(), Plan, origin="test").options.batch_norm == "microbatch"


def test_synchronised_batch_norms_are_refused_with_the_way() -> None:
    model, x = images()
    model[5] = nn.SyncBatchNorm(4)
    with pytest.raises(InputError, match=r"5 is a SyncBatchNorm, .* batch_norm='minibatch'"):
        pipecompile(model, x, k=2, loss_fn=squares, costs="flops", microbatches=2)
    model[5].eval()  # it then only reads its averages
    pipecompile(model, x, k=2, loss_fn=squares, costs="flops", microbatches=2).step(x)


def test_an_unknown_rule_is_answered_with_the_nearest() -> None:
    model, x = images()
    with pytest.raises(InputError, match="unknown batch_norm 'minibatches'; did you mean 'minib"):
        pipecompile(model, x, batch_norm="minibatches")  # type: ignore[arg-type]
