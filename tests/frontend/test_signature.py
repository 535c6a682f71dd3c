"""Arguments and results of models become lists of tensors and back, whatever their structure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from zoo import captured, example, first, same

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.batch_dims import batch_size
from pipecompile.frontend.signature import Arguments


@dataclass
class Result:
    logits: Tensor
    count: int


@dataclass
class Query:
    left: Tensor
    name: str


def test_nested_inputs_and_outputs() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(
            self, pair: Any, options: Any, *, scale: float, mask: Tensor | None = None
        ) -> Any:
            left, (right,) = pair
            hidden = self.linear(left + right * options["weight"]) * scale
            return {"all": (hidden, [hidden.sum(), None, "text"]), "scale": scale}

    x = torch.randn(4, 4)
    call = Arguments(
        ((x, [x + 1]), {"weight": x * 2, "mode": "fast"}), {"scale": 0.5, "mask": None}
    )
    model = Nested()
    captured_model, module = captured(model, *call.args, **call.kwargs)
    assert same(
        captured_model.outputs.unflatten(module(*captured_model.inputs.flatten(call))),
        model(*call.args, **call.kwargs),
    )
    assert captured_model.inputs.tensor_names == ("pair_0", "pair_1_0", "options_weight")


def test_a_dataclass_that_pytree_knows_is_an_output() -> None:
    pytree.register_dataclass(Result)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Result:
            return Result(self.linear(x), 3)

    x = torch.randn(4, 4)
    model = Model()
    captured_model, module = captured(model, x)
    result = captured_model.outputs.unflatten(module(x))
    assert isinstance(result, Result)
    assert torch.equal(result.logits, model(x).logits)
    assert result.count == 3


def test_a_dataclass_that_pytree_does_not_know_is_input_and_output() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, query: Query) -> dict[str, Query]:
            return {"result": Query(self.linear(query.left), query.name + "b")}

    model, query = Model(), Query(torch.randn(4, 4), "a")
    captured_model, module = captured(model, query)
    result = captured_model.outputs.unflatten(module(query.left))["result"]
    assert torch.equal(result.left, model(query)["result"].left)
    assert result.name == "ab"


def test_an_object_of_another_kind_is_refused_as_output_and_input() -> None:
    class Box:
        def __init__(self, value: Tensor) -> None:
            self.value = value

    class Model(nn.Module):
        def forward(self, query: Any) -> Any:
            return Box(query.sin()) if isinstance(query, Tensor) else query.value

    with pytest.raises(
        CaptureError, match=r"the model returns a Box, which cannot travel between stages"
    ):
        captured(Model(), torch.randn(4, 4))
    with pytest.raises(
        CaptureError, match=r"the argument 'query' holds a Box; inputs are tensors, constants"
    ):
        captured(Model(), Box(torch.randn(4, 4)))


def test_a_models_output_class_is_kept() -> None:
    target = example("bert")
    call = first(4, target.call)
    captured_model, module = captured(target.model.eval(), *call.args, **call.kwargs)
    result = captured_model.outputs.unflatten(module(*captured_model.inputs.flatten(call)))
    assert type(result) is type(target.model(**call.kwargs))
    assert result.loss.dim() == 0


def test_another_structure_or_constant_is_an_error() -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return x * scale

    x = torch.randn(4, 4)
    captured_model, _ = captured(Model(), x, scale=2.0)
    with pytest.raises(
        InputError, match=r"an argument is 3.0, but the plan was made with 2.0; plan again"
    ):
        captured_model.inputs.flatten(Arguments((x,), {"scale": 3.0}))
    with pytest.raises(InputError, match=r"an argument is a tensor \[4, 4\], but the plan"):
        captured_model.inputs.flatten(Arguments((x,), {"scale": x}))
    with pytest.raises(InputError, match=r"another structure .* it lacks keyword\['scale'\]"):
        captured_model.inputs.flatten(Arguments((x,), {}))
    with pytest.raises(InputError, match="x is a float, but the plan was made for a tensor"):
        captured_model.inputs.flatten(Arguments((1.0,), {"scale": 2.0}))


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.left(a) - self.right(b.sin())

    model, x = Two(), torch.randn(4, 4)
    captured_model, module = captured(model, x, x)
    assert captured_model.inputs.tensor_names == ("a", "b")
    assert torch.equal(module(x + 1, x - 1)[0], model(x + 1, x - 1))


def test_a_keyword_of_python_may_name_an_input() -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor, **more: Tensor) -> Tensor:
            return self.linear(x) + more["class"] * more["lambda"]

    call = {"class": torch.randn(4, 4), "lambda": torch.randn(4, 1)}
    captured_model, _ = captured(Keyed(), torch.randn(4, 4), **call)
    assert sorted(captured_model.inputs.tensor_names) == ["class_", "lambda_", "x"]


def test_inputs_of_different_batches_are_an_error() -> None:
    with pytest.raises(
        InputError, match=r"no common number of samples.*x \(4, 2\), y \(3, 2\); say with batch_dim"
    ):
        batch_size("xy", [torch.zeros(4, 2), torch.zeros(3, 2)], [0, 0])
    three = [torch.zeros(5, 4), torch.tensor(1.0), torch.zeros(4)]
    assert batch_size("xyz", three, [1, None, 0]) == 4
