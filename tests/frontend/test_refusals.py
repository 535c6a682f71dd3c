"""A refusal is one line that names the module, the line of the model and a way out."""

from __future__ import annotations

import inspect
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from zoo import captured

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments


class Inner(nn.Module):
    """Its forward does what `act` does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)

    def act(self, x: Tensor) -> Any:
        raise NotImplementedError


class Outer(nn.Module):
    """Layers before and after, so that the refusal has to name the module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for block in self.blocks:
            x = block(x)
        return x * 2


def refusal(inner: Inner) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(Outer(inner), torch.randn(4, 4))
    message = str(caught.value)
    assert "\n" not in message
    return message


def line(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, source in enumerate(lines) if text in source)


def test_numpy() -> None:
    class Numpy(Inner):
        def act(self, x: Tensor) -> Tensor:
            return torch.from_numpy(np.sin(x.detach().numpy()))

    assert "blocks.1 (" in refusal(Numpy())


def test_an_assignment_to_data() -> None:
    class Assigns(Inner):
        def act(self, x: Tensor) -> Tensor:
            hidden = x * 2
            hidden.data = torch.zeros(4, 4)
            return hidden

    message = refusal(Assigns())
    assert message.startswith("blocks.1 (")
    assert f"test_refusals.py:{line(Assigns.act, 'hidden.data =')})" in message
    assert "assigns to an attribute of a tensor" in message


def test_a_failure_of_the_model_itself_is_reported_with_its_line() -> None:
    class Fails(Inner):
        def act(self, x: Tensor) -> Tensor:
            return x @ torch.zeros(5, 5)

    message = refusal(Fails())
    assert message.startswith("blocks.1 (")
    assert f"test_refusals.py:{line(Fails.act, 'torch.zeros(5, 5)')})" in message
    assert "cannot run on fake tensors" in message


def test_so_is_one_behind_a_branch_on_data() -> None:
    """What the first recording could not do is no cause, since the model itself fails later."""

    class Branches(Inner):
        def act(self, x: Tensor) -> Tensor:
            if x.sum() > -1e9:
                x = x.sin()
            first, second = x.split(1, dim=1)
            return first + second

    message = refusal(Branches())
    assert f"test_refusals.py:{line(Branches.act, 'first, second')})" in message
    assert "ValueError: too many values to unpack" in message and "branches" not in message


def test_a_failure_inside_a_torch_module_is_reported_with_its_path() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    with pytest.raises(CaptureError, match=r"^body\.1 \("):
        captured(Wrong(), torch.randn(4, 4))


def test_a_cache_is_left_out_of_the_output() -> None:
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=True
    )
    model = transformers.GPT2LMHeadModel(config)
    capture, _ = captured(model, input_ids=torch.randint(0, 16, (4, 8)))
    assert capture.outputs.is_tensor.count(True) == 1
    assert capture.outputs.unflatten([torch.ones(1)]).past_key_values is None


def test_parameters_without_a_shape() -> None:
    with pytest.raises(
        InputError, match="has parameters without a shape yet; run the model once first"
    ):
        captured(Outer(nn.Sequential(nn.LazyLinear(4))), torch.randn(4, 4))


def test_inference_mode() -> None:
    model = nn.Linear(4, 4)
    with (
        torch.inference_mode(),
        pytest.raises(InputError, match=r"leave torch\.inference_mode first"),
    ):
        captured(model, torch.randn(4, 4))


def test_a_scripted_module() -> None:
    scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(InputError, match=r"^1 is a scripted module; give the Python module"):
        captured(nn.Sequential(nn.Linear(4, 4), scripted), torch.randn(4, 4))


def test_a_sparse_gradient() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"the gradient of 0.weight is sparse"):
        captured(model, torch.randint(0, 8, (4, 3)))


def test_an_input_that_requires_a_gradient() -> None:
    with pytest.raises(InputError, match=r"the input 'input' requires a gradient"):
        captured(nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4, requires_grad=True))


def cond(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def while_loop(layer: nn.Module, x: Tensor) -> Tensor:
    def again(count: Tensor, value: Tensor) -> Tensor:
        return count < 3

    def once(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, value * 1.5

    return torch.while_loop(again, once, (torch.tensor(0), x))[1]


def exact_type(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if type(x) is torch.Tensor else x


def exact_class(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if x.__class__ is torch.Tensor else x


def type_of_a_weight(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if type(layer.weight) is nn.Parameter else x


def is_fake(layer: nn.Module, x: Tensor) -> Tensor:
    return x if isinstance(x, FakeTensor) else layer(x)


def from_secrets(layer: nn.Module, x: Tensor) -> Tensor:
    return x * secrets.randbits(60)


def from_the_system(layer: nn.Module, x: Tensor) -> Tensor:
    return x * int.from_bytes(os.urandom(7), "big")


def from_the_clock(layer: nn.Module, x: Tensor) -> Tensor:
    return x * time.perf_counter_ns()


def from_own_generator(layer: nn.Module, x: Tensor) -> Tensor:
    return x * GENERATOR.random()


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)
    return x + parts.values().sum()


GENERATOR = np.random.default_rng(0)
UNSEEDED = "two steps of the model itself differ for the same seed"
EXACT_TYPE = "the exact type of a tensor"
CAUSES: dict[Callable[[nn.Module, Tensor], Tensor], str] = {
    cond: "the forward calls cond, whose branches",
    while_loop: "the forward calls while_loop, whose branches",
    exact_type: EXACT_TYPE,
    exact_class: EXACT_TYPE,
    type_of_a_weight: EXACT_TYPE,
    is_fake: EXACT_TYPE,
    from_secrets: UNSEEDED,
    from_the_system: UNSEEDED,
    from_the_clock: UNSEEDED,
    from_own_generator: UNSEEDED,
    nested: "is nested, whose bytes no plan counts",
}


@pytest.mark.parametrize("function", CAUSES, ids=lambda function: function.__name__)
def test_the_cause_is_named(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    class Does(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def act(self, x: Tensor) -> Tensor:
            return function(self.layer, x)

    with pytest.raises(CaptureError) as caught:
        proven_capture(Outer(Does()), Arguments((torch.randn(4, 4),), {}))
    message = str(caught.value)
    assert CAUSES[function] in message
    assert "\n" not in message and " at 0x" not in message and len(message) < 700


@pytest.mark.parametrize("part", ["itself", "a view"])
@pytest.mark.parametrize("question", [Tensor.storage_offset, Tensor.data_ptr])
def test_where_an_input_begins_is_refused(question: Callable[[Tensor], int], part: str) -> None:
    with pytest.raises(CaptureError, match=r"asks where its input begins .*\(clone\)"):
        captured(Begins(question, part), torch.randn(4, 4))


def test_where_a_copy_begins_is_not() -> None:
    captured(Begins(Tensor.storage_offset, "a copy"), torch.randn(4, 4))


class Begins(nn.Module):
    """Asks where its input begins, or a part or a copy of it."""

    def __init__(self, question: Callable[[Tensor], int], part: str) -> None:
        super().__init__()
        self.question, self.part = question, part

    def forward(self, x: Tensor) -> Tensor:
        of = {"itself": x, "a view": x[1:].mT, "a copy": x.clone()}[self.part]
        return x * (2 if self.question(of) == 0 else 3)
