"""Messages over ranks: gradients that are missing or lie otherwise, conjugate tensors, and memory
that is shared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipecompile import InputError, pipecompile
from pipecompile.runtime.rank_step import RankStep
from tests.distributed.workers import Workers

WIDTH = 8
BATCHES = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(3)]


class Layers(nn.Module):
    """Four layers of the same size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Unread(Layers):
    """The loss does not read what its first layer gives, which crosses all boundaries."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor of shape (N, WIDTH) to two of them."""
        unread = self.first(x)
        return self.last(self.third(self.second(x)).tanh()), unread.tanh()


class TiedUnread(Layers):
    """A weight of the first and of the last rank leads to what the loss does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor of shape (N, WIDTH) to two of them."""
        unread = self.first(x)
        read = self.last(self.third(self.second(x)).tanh())
        return read, self.tied(unread)


class HalfRead(Layers):
    """Only the last half of a minibatch leads to the loss by its first layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A tensor of shape (N, WIDTH) to two of them."""
        sometimes = self.first(x)
        return self.last(self.third(self.second(x)).tanh()), sometimes.tanh()


class Conjugate(Layers):
    """A complex tensor crosses a boundary, and back, with the bit that says it is conjugate."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """A tensor of shape (N, WIDTH) to one like it."""
        waves = torch.fft.fft(self.second(self.first(x))).conj()
        return (self.last(self.third(waves.real) + waves.imag),)


class Negative(Layers):
    """The imaginary part of a conjugate tensor has a bit that says it is negative."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """A tensor of shape (N, WIDTH) to one like it."""
        part = torch.fft.fft(self.second(self.first(x))).conj().imag
        return (self.last(self.third(part) * part),)


class Turned(nn.Module):
    """Its result lies in memory in rows or in columns, as data says."""

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, WIDTH) to one like it."""
        return x.tanh() if x[0, 0] > 0 else x.mT.contiguous().mT.tanh()


class LaidOutByData(Layers):
    """Data says how a tensor that crosses boundaries lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = Turned()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """A tensor of shape (N, WIDTH) to one like it."""
        turned = self.turned(self.first(x))
        return (self.last(self.third(self.second(turned).tanh()).tanh() + turned),)


def first_of(output: tuple[Tensor, ...], _: object) -> Tensor:
    return output[0].square().mean()


def both_later(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The mean squares of the first output, and where the targets are 1 those of the second."""
    loss = output[0].square().mean()
    return loss + output[1].square().mean() if target.all() else loss


def steps_with(
    kind: type[Layers], loss_fn: Callable[..., Tensor], targets: Tensor, schedule: str
) -> list[str]:
    """The parameters whose gradients differ from the loop's, after each of three steps of AdamW."""
    model, unsplit = kind(), kind()
    pipeline = pipecompile(
        model,
        BATCHES[0],
        k=dist.get_world_size(),
        microbatches=2,
        loss_fn=loss_fn,
        costs="flops",
        schedule=schedule,  # type: ignore[arg-type]
        self_check=False,
    )
    own, whole = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (pipeline, unsplit))
    different: list[str] = []
    for batch in BATCHES:
        pipeline.zero_grad(), whole.zero_grad()
        pipeline.step(batch, targets)
        for rows, wanted in zip(batch.chunk(2), targets.chunk(2), strict=True):
            (loss_fn(unsplit(rows), wanted) / 2).backward()
        own.step(), whole.step()
        expected = dict(unsplit.named_parameters())
        for name, parameter in pipeline.named_parameters():
            there = expected[name].grad
            same_gradient = (parameter.grad is None) == (there is None)
            if not (same_gradient and torch.equal(parameter, expected[name])):
                different.append(name)
    return different


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("kind", "loss_fn", "read"),
    [
        (Unread, first_of, (1, 1)),
        (TiedUnread, first_of, (1, 1)),
        (HalfRead, both_later, (0, 1)),
        (HalfRead, both_later, (0, 0)),
        (HalfRead, both_later, (1, 1)),
        (Conjugate, first_of, (1, 1)),
        (Negative, first_of, (1, 1)),
    ],
)
def test_steps_over_ranks_leave_the_gradients_of_the_loop(
    workers: Workers,
    tmp_path: Path,
    kind: type[Layers],
    loss_fn: Callable[..., Tensor],
    read: tuple[int, int],
    schedule: str,
) -> None:
    targets = torch.tensor(read).repeat_interleave(4)
    assert workers.run(3, steps_with, kind, loss_fn, targets, schedule, folder=str(tmp_path)) == [
        [],
        [],
        [],
    ]


def changed_pattern() -> str:
    """What this rank says if a gradient is missing in a later step that was there in the first."""
    pipeline = pipecompile(
        HalfRead(),
        BATCHES[0],
        k=2,
        microbatches=2,
        loss_fn=both_later,
        costs="flops",
        self_check=False,
        step_timeout=2,
    )
    try:
        pipeline.step(BATCHES[0], torch.ones(8))
        pipeline.step(BATCHES[0], torch.zeros(8))
    except Exception as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return ""


def steps_ended() -> tuple[int, int]:
    """How many steps messages have ended, and what they leave out."""
    options: dict[str, Any] = {"microbatches": 2, "costs": "flops", "self_check": False}
    pipeline = pipecompile(Unread(), BATCHES[0], k=3, loss_fn=first_of, **options)
    for batch in BATCHES:
        pipeline.step(batch)
    (distributed,) = pipeline._runner._stages._pipelines.values()
    (messages,) = distributed._messages_by_placement.values()
    return messages.steps, len(messages._states._known)


def test_ranks_know_what_is_missing_after_one_step(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(3, steps_ended, folder=str(tmp_path)) == [(3, 1), (3, 2), (3, 1)]


def test_a_gradient_that_is_missing_later_is_refused(workers: Workers, tmp_path: Path) -> None:
    first, last = workers.run(2, changed_pattern, folder=str(tmp_path))
    text = "before stage 1 was there in the first step, and is missing now"
    assert first.startswith("RankFaultError: rank 1 failed in 1SEND_B0") and text in first
    assert last.startswith("InputError: the gradient of tensor ") and text in last


def laid_out_by_data() -> str:
    """What a rank says of steps of which data says how a tensor lies that crosses a boundary."""
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "self_check": False}
    pipeline = pipecompile(
        LaidOutByData(), BATCHES[0], loss_fn=first_of, step_timeout=10, **options
    )
    try:
        for batch in BATCHES:
            pipeline.step(batch)
    except Exception as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return ""


def test_how_a_tensor_lies_in_memory_is_not_left_to_data(workers: Workers, tmp_path: Path) -> None:
    unsplit = LaidOutByData()
    turned = unsplit.first.register_forward_hook(lambda _, __, out: seen.append(out[0, 0] > 0))
    seen: list[Tensor] = []
    for batch in BATCHES:
        unsplit(batch)
    turned.remove()
    assert len({bool(each) for each in seen}) == 2, "both layouts occur"
    sender, receiver = workers.run(2, laid_out_by_data, folder=str(tmp_path))
    text = "what stage 0 sends lies in memory in another way"
    assert sender.startswith(f"InputError: {text}")
    assert receiver.startswith("RankFaultError: rank 0 failed in 0SEND_F1") and text in receiver


class Mixed(nn.Module):
    """Its second half mixes rows, so that the gradient which it gives back lies in columns.

    What is before sums over that: a bias.
    """

    rows = 64

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.bias = nn.Linear(24, 24), nn.Parameter(torch.zeros(24))
        self.mix, self.last = nn.Linear(self.rows, self.rows), nn.Linear(self.rows, self.rows)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, rows, 24) to one of (N, 24, rows)."""
        hidden = self.first(x) + self.bias
        return self.last(self.mix(hidden.transpose(1, 2)).tanh())


class Either(nn.Module):
    """Data says whether it mixes rows or columns."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Linear(64, 64), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, 64, 24) to one like it."""
        return self.columns(x) if x[0, 0, 0] > 0 else self.rows(x.mT).mT * 2


class MixedByData(Mixed):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Either()
        self.last = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, 64, 24) to one like it."""
        hidden = self.first(x) + self.bias
        return self.last(self.mix(hidden).contiguous())


def mean_square(output: Tensor, _: object) -> Tensor:
    return output.square().mean()


def mixed_steps(kind: type[Mixed], signs: list[tuple[int, int]], schedule: str) -> list[str]:
    """The parameters whose gradients differ from the loop's in some step; of each microbatch all
    the values have one sign.
    """
    model, unsplit = kind(), kind()
    for each in (model, unsplit):
        nn.init.eye_(each.first.weight)
        nn.init.zeros_(each.first.bias)
    generator, different = torch.Generator().manual_seed(0), set()
    batches = [
        torch.cat([sign * torch.rand(4, 64, 24, generator=generator) for sign in both])
        for both in signs
    ]
    pipeline = pipecompile(
        model,
        batches[0],
        k=2,
        microbatches=2,
        loss_fn=mean_square,
        costs="flops",
        schedule=schedule,  # type: ignore[arg-type]
        pin={"add": 0, "mix" if kind is MixedByData else "transpose": 1},
        self_check=False,
        step_timeout=10,
    )
    for batch in batches:
        pipeline.zero_grad(), unsplit.zero_grad()
        pipeline.step(batch)
        for rows in batch.chunk(2):
            mean_square(unsplit(rows), None).backward()
        expected = {name: value.grad for name, value in unsplit.named_parameters()}
        for name, parameter in pipeline.named_parameters():
            there = expected[name]
            if there is not None and not torch.equal(parameter.grad, there / 2):
                different.add(name)
    return sorted(different)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("kind", "signs"), [(Mixed, [(1, 1)] * 3), (MixedByData, [(1, -1), (-1, 1), (-1, -1)])]
)
def test_a_gradient_arrives_as_it_lay_where_it_was_sent(
    workers: Workers,
    tmp_path: Path,
    kind: type[Mixed],
    signs: list[tuple[int, int]],
    schedule: str,
) -> None:
    assert workers.run(2, mixed_steps, kind, signs, schedule, folder=str(tmp_path)) == [[], []]


def laid_out_otherwise_later() -> str:
    """What a rank says if a gradient lies otherwise in a later step than in the first one."""
    try:
        mixed_steps(MixedByData, [(1, 1), (-1, -1)], "1f1b")
    except Exception as error:
        dist.destroy_process_group()
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_gradient_that_lies_otherwise_later_is_refused(workers: Workers, tmp_path: Path) -> None:
    first, last = workers.run(2, laid_out_otherwise_later, folder=str(tmp_path))
    text = "was in one order of dimensions in memory in the first step, and is in another one now"
    assert first.startswith("RankFaultError: rank 1 failed in 1SEND_B0") and text in first
    assert last.startswith("InputError: the gradient of tensor ") and text in last


class Shared(Layers):
    """A buffer is a view of a parameter that another stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("view", self.first.weight.detach()[:4])

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, WIDTH) to one of shape (N, 4)."""
        return self.last(self.third(self.second(self.first(x)))) @ self.view.T


def shared_memory() -> str:
    """What a rank says of memory that two ranks would share."""
    try:
        pipecompile(Shared(), BATCHES[0], k=2, costs="flops", self_check=False, microbatches=2)
    except InputError as error:
        return str(error)
    return ""


def test_memory_that_ranks_would_share_is_refused(workers: Workers, tmp_path: Path) -> None:
    words = "first.weight and view are tensors in the same memory, but on ranks [0] and [1]"
    for text in workers.run(2, shared_memory, folder=str(tmp_path)):
        assert text.startswith(words)


class Buffered(Layers):
    """Every layer has a view of one table, which nobody writes to."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.ones(WIDTH, WIDTH)
        for name in ("one", "two", "three"):
            self.register_buffer(name, table.view(1, WIDTH, WIDTH)[0])

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """A tensor of shape (N, WIDTH) to one like it."""
        x = self.second(self.first(x @ self.one) @ self.two)
        return (self.last(self.third(x) @ self.three),)


def test_constants_of_one_memory_may_lie_on_several_ranks(workers: Workers, tmp_path: Path) -> None:
    arguments = Buffered, first_of, torch.ones(8), "1f1b"
    assert workers.run(3, steps_with, *arguments, folder=str(tmp_path)) == [[], [], []]


class Drawn(Layers):
    """Both ranks read a buffer, a transposed one, a plain tensor and a parameter that is none of
    the model, drawn on each by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("mixture", torch.rand(WIDTH, WIDTH).mT)
        self.shift = torch.rand(WIDTH)
        self.frozen = [nn.Parameter(torch.rand(WIDTH), requires_grad=False)]

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, WIDTH) to one like it."""
        first = self.second(self.first(self._mixed(x)).tanh())
        return self.last(self._mixed(self.third(first).tanh()))

    def _mixed(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift) @ self.mixture * self.frozen[0]


def drawn_values() -> tuple[list[list[float]], bool]:
    """What this rank holds after it was compiled, and whether a step had a loss."""
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "self_check": False}
    model = Drawn()
    pipeline = pipecompile(model, BATCHES[0], loss_fn=lambda out, _: out.square().mean(), **options)
    drawn = (model.scale, model.mixture, model.shift, *model.frozen)
    values = [value.flatten().tolist() for value in drawn]
    return values, torch.isfinite(pipeline.step(BATCHES[0], everywhere=True)).item()


def test_what_several_ranks_read_is_the_same_on_all(workers: Workers, tmp_path: Path) -> None:
    (first, is_finite), last = workers.run(2, drawn_values, folder=str(tmp_path))
    assert (first, is_finite) == last and is_finite


class ViewedElsewhere(Layers):
    """A plain tensor of one rank is a view of a parameter of another."""

    def __init__(self) -> None:
        super().__init__()
        self.view = self.first.weight.detach()

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, WIDTH) to one like it."""
        return self.last(self.third(self.second(self.first(x)))) @ self.view


def viewed_elsewhere() -> str:
    """What a rank says of that."""
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "self_check": False}
    with pytest.raises(InputError) as caught:
        pipecompile(ViewedElsewhere(), BATCHES[0], **options)
    return str(caught.value)


def test_a_plain_tensor_that_shares_memory_is_refused(workers: Workers, tmp_path: Path) -> None:
    for text in workers.run(2, viewed_elsewhere, folder=str(tmp_path)):
        assert "_constant_0 and first.weight are tensors in the same memory" in text


class Sized(Layers):
    """Small microbatches send one tensor less to the next stage."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """A tensor of shape (N, WIDTH) to one like it."""
        one, other = self.first(x), self.second(x)
        if x.shape[0] > 2:
            return (self.last(self.third(one).tanh()) + other,)
        return (self.last(self.third(one + other).tanh()),)


def sizes_alike(sizes: list[int]) -> bool:
    """Whether steps of so many samples leave the weights of the loop."""
    model, unsplit = Sized(), Sized()
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "self_check": False}
    pipeline = pipecompile(model, BATCHES[0], loss_fn=first_of, **options)
    own, whole = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (pipeline, unsplit))
    for size in sizes:
        pipeline.zero_grad(), whole.zero_grad()
        pipeline.step(BATCHES[0][:size])
        for rows in BATCHES[0][:size].split(4):
            (first_of(unsplit(rows), None) * len(rows) / size).backward()
        own.step(), whole.step()
    expected = dict(unsplit.named_parameters())
    pairs = [(p, expected[name]) for name, p in pipeline.named_parameters()]
    return all((one - other).abs().max() < 1e-6 for one, other in pairs)


@pytest.mark.parametrize("sizes", [[8, 5, 8], [1, 8, 5, 1]])
def test_smaller_microbatches_have_messages_of_their_own(
    workers: Workers, tmp_path: Path, sizes: list[int]
) -> None:
    assert workers.run(2, sizes_alike, sizes, folder=str(tmp_path)) == [True, True]


def replicas_alike() -> list[str]:
    """The parameters that differ from a step of the whole batch, if replicas lead to the loss by
    other parameters.
    """
    rank = dist.get_rank()
    targets = torch.zeros(8) if rank < 2 else torch.ones(8)
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "self_check": False}
    pipeline = pipecompile(HalfRead(), BATCHES[0], loss_fn=both_later, **options)
    pipeline.step(BATCHES[rank // 2], targets)
    unsplit = HalfRead()
    for batch, wanted in ((BATCHES[0], torch.zeros(8)), (BATCHES[1], torch.ones(8))):
        for rows, part in zip(batch.chunk(2), wanted.chunk(2), strict=True):
            (both_later(unsplit(rows), part) / 4).backward()
    expected = dict(unsplit.named_parameters())
    gradients = [(n, p.grad, expected[n].grad) for n, p in pipeline.named_parameters()]
    return [n for n, own, other in gradients if own is None or not torch.allclose(own, other)]


@pytest.mark.sweep
def test_replicas_may_lead_to_the_loss_by_other_parameters(
    workers: Workers, tmp_path: Path
) -> None:
    assert workers.run(4, replicas_alike, folder=str(tmp_path)) == [[]] * 4


def repeated_after_failure() -> bool:
    """Whether a step goes well that failed on one rank, which the others have ended."""
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "self_check": False}
    pipeline = pipecompile(Unread(), BATCHES[0], loss_fn=first_of, **options)
    backward = RankStep._backward

    def failing(own: RankStep, index: int, microbatch: int) -> None:
        backward(own, index, microbatch)
        if index == 0 and microbatch == 1:
            raise ValueError("planted")

    try:
        with patch.object(RankStep, "_backward", failing):
            pipeline.step(BATCHES[0])
    except ValueError:
        pass
    pipeline.steps = 1
    pipeline.zero_grad()
    pipeline.step(BATCHES[0])
    missing = [name for name, p in pipeline.named_parameters() if p.grad is None]
    return missing == (["first.weight", "first.bias"] if dist.get_rank() == 0 else [])


def test_a_step_is_repeated_that_failed_on_one_rank(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, repeated_after_failure, folder=str(tmp_path)) == [True, True]


def evaluated_after_refusal() -> bool:
    """Whether an evaluation goes well after one that was refused on one rank."""
    pipeline = pipecompile(
        Layered(), BATCHES[0], k=2, costs="flops", self_check=False, step_timeout=10, microbatches=2
    )
    try:
        pipeline.evaluate(BATCHES[0][:, : 4 if dist.get_rank() else WIDTH])
    except InputError:
        output = pipeline.evaluate(BATCHES[0])
        return (output is None) == (dist.get_rank() == 0)
    return False


class Layered(Layers):
    """One layer after the other."""

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, WIDTH) to one like it."""
        return self.last(self.third(self.second(self.first(x))))


def test_an_evaluation_follows_one_that_a_rank_refused(workers: Workers, tmp_path: Path) -> None:
    assert workers.run(2, evaluated_after_refusal, folder=str(tmp_path)) == [True, True]
