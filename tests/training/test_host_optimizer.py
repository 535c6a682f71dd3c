"""Optimizers in the host's memory, against the same ones on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import HostOptimizer, InputError, Pipeline, pipecompile
from pipecompile.report.summary import summary

Batches = list[tuple[Tensor, Tensor]]
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.02, weight_decay=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05),
}


def pipeline_of(dtype: torch.dtype = torch.float64, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return pipecompile(
        nn.Sequential(*layers).to(dtype),
        torch.zeros(8, 8, dtype=dtype),
        k=3,
        microbatches=4,
        loss_fn=nn.functional.mse_loss,
        costs="flops",
        self_check=False,
        **options,
    )


def batches(count: int, dtype: torch.dtype = torch.float64) -> Batches:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(2, 8, 8, generator=generator).to(dtype)) for _ in range(count)]


def halved(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def same(left: Pipeline, right: Pipeline) -> bool:
    return all(map(torch.equal, left.parameters(), right.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_result_is_that_of_the_optimizer_on_the_device(name: str) -> None:
    device, host = pipeline_of(), pipeline_of()
    first = torch.stack(list(device.train(batches(8), OPTIMIZERS[name], halved, max_norm=0.5)))
    on_host = lambda parameters: HostOptimizer(parameters, OPTIMIZERS[name])  # noqa: E731
    assert torch.equal(
        torch.stack(list(host.train(batches(8), on_host, halved, max_norm=0.5))), first
    )
    assert same(device, host)


def test_groups_keep_their_options() -> None:
    device, host = pipeline_of(), pipeline_of()
    for pipeline in (device, host):
        named = list(pipeline.named_parameters())
        groups = [
            {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.5},
            {"params": [p for _, p in named if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = OPTIMIZERS["adamw"](groups) if pipeline is device else None
        optimizer = optimizer or HostOptimizer(groups, OPTIMIZERS["adamw"])
        for x, y in batches(4):
            pipeline.zero_grad()
            pipeline.step(x, y)
            optimizer.step()
    assert same(device, host)


@pytest.mark.parametrize("master_weights", [False, True])
def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, master_weights: bool) -> None:
    """In bfloat16 with float32 copies, whose digits the parameters do not have."""
    dtype = torch.bfloat16 if master_weights else torch.float64

    def on_host(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return HostOptimizer(parameters, OPTIMIZERS["adamw"], master_weights=master_weights)

    through, stopped, resumed = (pipeline_of(dtype) for _ in range(3))
    data = batches(8, dtype)
    list(through.train(data, on_host))
    run = stopped.train(data, on_host)
    for _ in range(5):
        next(run)
    stopped.checkpoint().save(tmp_path)
    rest = resumed.train(data[5:], on_host)
    resumed.checkpoint().load(tmp_path)
    list(rest)
    assert same(resumed, through)


def test_master_weights_are_those_of_a_loop_with_float32_copies() -> None:
    pipeline = pipeline_of(torch.bfloat16)
    oracle = copy.deepcopy(list(pipeline.parameters()))
    masters = [nn.Parameter(p.detach().float()) for p in oracle]
    stepped = OPTIMIZERS["adamw"](masters)
    optimizer = HostOptimizer(pipeline.parameters(), OPTIMIZERS["adamw"], master_weights=True)
    for x, y in batches(6, torch.bfloat16):
        optimizer.zero_grad()
        pipeline.step(x, y)
        for master, parameter in zip(masters, pipeline.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        stepped.step()
        optimizer.step()
        for master, parameter in zip(masters, pipeline.parameters(), strict=True):
            assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_host_holds_what_the_plan_says(dtype: torch.dtype) -> None:
    """And the device nothing of it."""
    options = {"optimizer": "adamw", "master_weights": True, "optimizer_on_host": True}
    pipeline = pipeline_of(dtype, **options)
    optimizer = HostOptimizer(pipeline.parameters(), OPTIMIZERS["adamw"], master_weights=True)
    pipeline.step(*batches(1, dtype)[0])
    optimizer.step()
    held = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in _host_tensors(optimizer)
    }
    stages = pipeline.plan.stages
    assert sum(stage.footprint.host.expected for stage in stages) == sum(held.values())
    assert sum(memory.optimizer.expected for memory in pipeline.plan.prediction.memory) == 0
    assert "adamw and master weights on the host" in summary(pipeline.plan)


def _host_tensors(optimizer: HostOptimizer) -> Iterator[Tensor]:
    for leaf in optimizer._copies.values():
        assert leaf.grad is not None
        yield from (leaf, leaf.grad)
    for state in optimizer.state.values():
        yield from state.values()


def test_what_is_not_for_a_host_is_refused() -> None:
    with pytest.raises(InputError, match="optimizer_on_host is of an optimizer; name one of sgd"):
        pipeline_of(optimizer_on_host=True)
    with pytest.raises(InputError, match="FSDP2 moves its parts of parameters to the host"):
        pipeline_of(optimizer="adamw", optimizer_on_host=True, shard="gradients", replicas=2)


def test_values_that_are_loaded_are_stepped_from() -> None:
    """Into the parameters alone, behind the copies' back; so does a rollback."""
    device, host = pipeline_of(), pipeline_of()
    optimizers = [
        OPTIMIZERS["momentum"](list(device.parameters())),
        HostOptimizer(host.parameters(), OPTIMIZERS["momentum"]),
    ]
    for step, (x, y) in enumerate(batches(4)):
        for pipeline, optimizer in zip((device, host), optimizers, strict=True):
            if step == 2:
                with torch.no_grad():
                    for parameter in pipeline.parameters():
                        parameter.mul_(0.5)
            pipeline.zero_grad()
            pipeline.step(x, y)
            optimizer.step()
    assert same(device, host)


def test_a_group_that_is_added_later_is_stepped_as_on_the_device() -> None:
    device, host = (
        [nn.Parameter(torch.arange(6, dtype=torch.float64)), nn.Parameter(torch.ones(2, 3))]
        for _ in range(2)
    )
    optimizers = (
        torch.optim.AdamW(device[:1], lr=0.1),
        HostOptimizer(host[:1], lambda groups: torch.optim.AdamW(groups, lr=0.1)),
    )
    for step in range(4):
        for parameters, optimizer in zip((device, host), optimizers, strict=True):
            if step == 2:
                optimizer.add_param_group({"params": parameters[1:], "lr": 0.03})
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, step + 0.5)
            optimizer.step()
        assert all(map(torch.equal, device, host)), step
    assert [group["lr"] for group in optimizers[1].param_groups] == [0.1, 0.03]
    assert optimizers[1].param_groups[1]["betas"] == (0.9, 0.999)
