"""Backward hooks that read values, of which fake tensors have none."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pipecompile import pipecompile
from pipecompile.errors import CaptureError
from pipecompile.profiling.kernel_workspace import workspace_on
from pipecompile.profiling.observer import observe
from pipecompile.profiling.workload import Workload

X = torch.randn(8, 4)
LOG: list[Any] = []


class Norms:
    """A hook that is an object."""

    def __call__(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        LOG.append(outputs[0].norm().item())


def clip(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    LOG.append(1)
    return (inputs[0] * 0.5,) if inputs[0].norm() > 1e-6 else None


def own_gradients(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    assert (inputs[0].norm() > 1e-6).numel() == 1
    return (inputs[0].clone(),)


READING: dict[str, Callable[..., Any]] = {
    "item": lambda module, inputs, outputs: LOG.append(outputs[0].norm().item()),
    "branch": lambda module, inputs, outputs: LOG.append(0 if inputs[0].isnan().any() else 1),
    "text": lambda module, inputs, outputs: LOG.append(f"{outputs[0].mean():.3f}"),
    "array": lambda module, inputs, outputs: LOG.append(outputs[0].numpy()),
    "object": Norms(),
    "before": lambda module, outputs: LOG.append(outputs[0].norm().item()),
    "clipping": clip,
}


def model(hook: Callable[..., Any]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), hooked(nn.Tanh(), hook), nn.Linear(4, 4))


def hooked(module: nn.Module, hook: Callable[..., Any]) -> nn.Module:
    """Return `module` with a hook, which runs before its backward if it takes no inputs."""
    if len(inspect.signature(hook).parameters) == 2:
        module.register_full_backward_pre_hook(hook)
    else:
        module.register_full_backward_hook(hook)
    return module


def backward_peak(layers: nn.Sequential) -> int:
    """Return the bytes that the backward of the last module makes beyond those that come."""
    module = fx.symbolic_trace(layers)
    workload = Workload(module, module.graph, (X,), loss=None, targets=())
    with FakeTensorMode(allow_non_fake_inputs=True), workload.faked() as fake:
        return observe(fake, workspace_on("cpu")).nodes["_1"].backward_peak


def mean_square(output: Tensor, target: Any) -> Tensor:
    return output.square().mean()


@pytest.mark.parametrize("hook", READING.values(), ids=READING)
def test_a_hook_of_a_module_that_reads_a_value_runs_once_for_each_microbatch(
    hook: Callable[..., Any],
) -> None:
    reading, loop = model(hook), model(hook)
    steps = pipecompile(reading, X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    LOG.clear()
    steps.step(X)
    assert len(LOG) == 2
    for part in X.split(4):
        (mean_square(loop(part), None) / 2).backward()
    for ours, its in zip(reading.parameters(), loop.parameters(), strict=True):
        assert ours.grad is not None and its.grad is not None
        assert torch.equal(ours.grad, its.grad)


@pytest.mark.parametrize("costs", ["flops", "measured"])
def test_a_forward_hook_may_put_a_hook_on_the_output_as_in_a_step(costs: str) -> None:
    """A tensor without a gradient takes no hook."""

    def doubled(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradient * 2)

    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for each in models:
        each[1].register_forward_hook(doubled)
    steps = pipecompile(models[0], X, k=2, microbatches=2, loss_fn=mean_square, costs=costs)
    steps.step(X)
    for part in X.split(4):
        (mean_square(models[1](part), None) / 2).backward()
    for ours, its in zip(*(each.parameters() for each in models), strict=True):
        assert torch.equal(ours.grad, its.grad)  # type: ignore[arg-type]


def test_memory_is_counted_for_the_gradients_that_it_may_return() -> None:
    """A view has no gradients of its own."""
    none, own, reading = (
        backward_peak(nn.Sequential(nn.Linear(4, 4), hooked(nn.Flatten(), hook)))
        for hook in (lambda module, inputs, outputs: None, own_gradients, clip)
    )
    assert none < own <= reading


class Hooked(nn.Module):
    """Its forward registers a hook on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.register_hook(refuse_nan)
        return self.second(hidden)


def refuse_nan(gradient: Tensor) -> None:
    if gradient.isnan().any():
        raise ValueError


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2 if gradient.norm() < 1e9 else gradient


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Doubled.apply(self.first(x)))


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        (Hooked, "the hook refuse_nan must not read values in it: let it keep the tensor"),
        (Doubles, "a custom autograd.Function must not read values in its backward"),
    ],
)
def test_a_hook_of_a_tensor_and_a_function_that_read_are_refused(
    kind: type[nn.Module], advice: str
) -> None:
    with pytest.raises(CaptureError, match=f"does not run on fake tensors: .*; {advice}"):
        pipecompile(kind(), X, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
