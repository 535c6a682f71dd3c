"""What ranks do for test_batch_statistics.py; each function runs on every rank."""

from __future__ import annotations

import io
import logging
import operator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import verify
from pipecompile.errors import InputError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.graph.batch_statistics import DeferredBatchNorm, record_forward
from pipecompile.graph.random_streams import StreamKey
from pipecompile.runtime.batch_statistics import minibatch_statistics

WIDTHS = (6, 3)


class Centred(nn.Module):
    """Subtracts a running mean, and is followed by a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, value: Tensor) -> Tensor:
        """From and to a tensor of shape (N, 6)."""
        with torch.no_grad():
            self.mean.lerp_(value.mean(0), 0.1)
        output: Tensor = self.norm(value - self.mean)
        return output


def warned_of_buffers() -> str:
    """What is logged of buffers where each of two processes is a replica."""
    rows = torch.randn(8, 6)
    handler = logging.StreamHandler(text := io.StringIO())
    logger = logging.getLogger("pipecompile")
    logger.addHandler(handler)
    try:
        pipecompile(
            nn.Sequential(Centred(), nn.Linear(6, 6)),
            rows,
            ranks=1,
            costs="flops",
            microbatches=2,
            self_check=False,
            batch_norm="minibatch",
            loss_fn=lambda output, _: output.square().mean(),
        )
    finally:
        logger.removeHandler(handler)
    return "".join(line for line in text.getvalue().splitlines() if "the forward writes" in line)


def norms() -> list[nn.BatchNorm1d]:
    """Two batch norms of different widths; the second one has a cumulative average."""
    return [nn.BatchNorm1d(6).double(), nn.BatchNorm1d(3, momentum=None).double()]


def batch(step: int) -> list[Tensor]:
    """What the norms are given in a step by all replicas together."""
    generator = torch.Generator().manual_seed(step)
    return [
        torch.randn(24, width, generator=generator, dtype=torch.float64)
        * torch.arange(1, 25)[:, None]
        for width in WIDTHS
    ]


def trained(steps: int) -> list[Tensor]:
    """The averages after some steps in which each replica sees its part in microbatches of 4."""
    own = norms()
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        with minibatch_statistics(dist.group.WORLD):
            for number, (norm, values) in enumerate(zip(own, batch(step), strict=True)):
                for index, part in enumerate(values.chunk(size)[rank].split(4)):
                    with record_forward(StreamKey(0, step, index)):
                        DeferredBatchNorm(operator.call, f"norm_{number}")(norm, part)
    return [buffer for norm in own for buffer in norm.buffers()]


def disagreeing() -> str:
    """What is raised where one replica leaves out a batch norm."""
    first, second = norms()
    before = [buffer.clone() for buffer in first.buffers()]
    try:
        with minibatch_statistics(dist.group.WORLD), record_forward(StreamKey(0, 0, 0)):
            DeferredBatchNorm(operator.call, "first")(first, batch(0)[0])
            if dist.get_rank():
                DeferredBatchNorm(operator.call, "second")(second, batch(0)[1])
    except InputError as error:
        assert all(map(torch.equal, before, first.buffers()))
        return str(error)
    return "nothing"


def without_norms() -> None:
    """A step of stages that have no batch norm."""
    with minibatch_statistics(dist.group.WORLD):
        pass


def verified(schedule: str, recompute: str) -> list[tuple[str, float]]:
    """What `verify` finds unequal, with a batch norm on each of the ranks, one for each stage."""
    torch.manual_seed(0)
    norms = [nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)]
    layers = [part for norm in norms for part in (norm, nn.Linear(6, 6), nn.Tanh())]
    model, batch = nn.Sequential(*layers, nn.Linear(6, 6)), torch.randn(24, 6) + 2
    target = Target(model, arguments_of(model, batch), lambda y, _: y.square().mean(), None)
    options = {"k": dist.get_world_size(), "microbatches": 4, "schedule": schedule}
    _, found = verify(
        target, batch_norm="minibatch", recompute=recompute, self_check=False, **options
    )
    compared = [difference for comparison in found for difference in comparison.differences]
    assert "0.running_var" in {difference.name for difference in compared}
    assert all(comparison.passed for comparison in found), found
    return [(each.name, each.relative) for each in compared if not each.equal]
