"""A refusal is one line that names the module, the line of the model and a way out."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from zoo import captured

from pipecompile.errors import CaptureError, InputError


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
