"""Arguments of another kind than they must be are refused in one line, wherever they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import InputError, Pipeline, pipecompile

X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def compiled(sample: Any = X, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    return pipecompile(
        model,
        sample,
        k=2,
        microbatches=2,
        costs="flops",
        loss_fn=nn.functional.mse_loss,
        self_check=False,
        **options,
    )


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return compiled()


def quantized() -> Tensor:
    return torch.quantize_per_tensor(X, 0.1, 0, torch.qint8)


COMPILES: dict[str, tuple[dict[str, Any], str]] = {
    "seconds as text": ({"step_timeout": "1"}, "step_timeout='1', but it is a number"),
    "a type by name": ({"autocast": "bf16"}, "autocast='bf16', but it is a type of floating"),
    "a whole type": ({"autocast": torch.int8}, "autocast=torch.int8, but it is a type of floating"),
    "one shape": ({"shapes": 3}, "shapes is a int, but it is a list"),
    "a number of links": ({"links": 3}, "links is a int; give a file"),
    "a quantized sample": ({"sample": quantized}, "an input is quantized"),
}


@pytest.mark.parametrize("what", COMPILES)
def test_a_compile_refuses_other_kinds(what: str) -> None:
    options, message = COMPILES[what]
    given = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(InputError, match=message) as caught:
        compiled(**given)
    assert "\n" not in str(caught.value)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


CALLS: dict[str, tuple[Callable[[Pipeline], Any], str]] = {
    "a sparse target": (lambda p: p.step(X, X.to_sparse()), "a target is sparse_coo"),
    "a target without values": (lambda p: p.step(X, X.to("meta")), "target is on the meta device"),
    "a norm as text": (lambda p: p.clip_grad_norm_("1"), "max_norm='1', but it is a number"),
    "a norm below 0": (lambda p: p.clip_grad_norm_(-1.0), "max_norm=-1.0, but it is a number"),
    "an optimizer by name": (lambda p: p.checkpoint("sgd"), "the optimizer of a checkpoint is a s"),
    "a scheduler by name": (
        lambda p: p.checkpoint(None, "linear"),
        "the scheduler of a checkpoint is a str",
    ),
    "a scaler that is a number": (
        lambda p: p.checkpoint(scaler=2.0),
        "the scaler of a checkpoint is a float",
    ),
    "a norm that is a text": (lambda p: p.clip_grad_norm_("1"), "max_norm='1', but it is a"),
    "two norms": (lambda p: p.clip_grad_norm_(X[0, :2]), "max_norm=tensor"),
    "a norm of no order": (lambda p: p.clip_grad_norm_(1.0, "two"), "norm_type='two', but it is"),
    "a folder that is a number": (lambda p: p.checkpoint().load(3), "a checkpoint is a folder"),
    "a state that is a list": (lambda p: p.load_state_dict([X]), "a state dict maps names"),
    "batches that are a number": (lambda p: list(p.train(3, sgd)), "batches is a int; give pairs"),
    "an optimizer that is made": (
        lambda p: list(p.train([(X, X)], sgd(p.parameters()))),
        "the optimizer is of type SGD, but",
    ),
    "a scheduler that is a number": (
        lambda p: list(p.train([(X, X)], sgd, 3)),
        "the scheduler is of type int, but",
    ),
    "an optimizer that wants the loss": (
        lambda p: list(p.train([(X, X)], torch.optim.LBFGS)),
        "LBFGS computes the loss of its stage",
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_a_pipeline_refuses_other_kinds(pipeline: Pipeline, what: str, tmp_path: Path) -> None:
    call, message = CALLS[what]
    with pytest.raises(InputError, match=message) as caught:
        call(pipeline)
    assert "\n" not in str(caught.value)
    assert torch.isfinite(pipeline.step(X, X))


def test_an_evaluation_in_inference_mode_leaves_a_pipeline_that_trains() -> None:
    """Also the first one, for which the model is captured in eval mode."""
    pipeline = compiled()
    with torch.inference_mode():
        inside, again = pipeline.evaluate(X), pipeline.evaluate(X + 0)
    assert torch.equal(inside, again) and torch.equal(inside, pipeline.evaluate(X))
    assert torch.isfinite(pipeline.step(X, X))


def test_a_model_is_compiled_and_trained_under_anomaly_detection() -> None:
    with torch.autograd.set_detect_anomaly(True):
        pipeline = compiled()
        assert torch.is_anomaly_enabled()
        assert torch.isfinite(pipeline.step(X, X))
