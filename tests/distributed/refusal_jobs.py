"""What two ranks do with what is right or refused; each function runs on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import reference_for
from pipecompile.errors import PipecompileError
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.training.pipeline import Pipeline

WIDTH = 8
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


class Does(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.function(value)


def mean_square(output: Tensor, _: Any) -> Tensor:
    return output.square().mean()


def compiled(model: nn.Module, sample: Tensor = X, step_timeout: float = 20.0) -> Pipeline:
    return pipecompile(
        model,
        sample,
        ranks=2,
        k=2,
        microbatches=4,
        costs="flops",
        self_check=False,
        loss_fn=mean_square,
        step_timeout=step_timeout,
    )


def between(make: Callable[[], nn.Module]) -> nn.Module:
    """A layer with one on each side, so that a stage ends beside it; the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Linear(WIDTH, WIDTH))


DRAWS: dict[str, Callable[[], nn.Module]] = {
    "dropout": nn.Dropout,
    "rrelu": nn.RReLU,
    "noise": lambda: Does(lambda v: v + torch.randn_like(v)),
    "a mask": lambda: Does(lambda v: v * torch.bernoulli(torch.full_like(v, 0.5))),
    "an order": lambda: Does(lambda v: v[:, torch.randperm(WIDTH)]),
    "a choice": lambda: Does(lambda v: v * torch.multinomial(torch.ones(9), 1)),
    "in place": lambda: Does(lambda v: v * torch.empty(WIDTH).uniform_(0.5, 1.5)),
}
BOUNDARIES: dict[str, Callable[[], nn.Module]] = {
    "not contiguous": lambda: Does(lambda v: v.T.contiguous().T),
    "expanded": lambda: Does(lambda v: v[:, :1].expand(-1, WIDTH)),
    "conjugate": lambda: nn.Sequential(
        Does(lambda v: torch.complex(v, v * 2).conj()), Does(lambda v: v.real + v.imag)
    ),
    "negated": lambda: nn.Sequential(
        Does(lambda v: torch.complex(v, v * 2).conj().imag), Does(torch.tanh)
    ),
    "a part": lambda: Does(lambda v: torch.cat([v, v], 1)[:, ::2]),
    "weight_norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
}


class Turned(nn.Module):
    """Returns one layout of positive values, and another one of others."""

    def __init__(self, other: Callable[[Tensor], Tensor], *, sample_is_other: bool = False) -> None:
        super().__init__()
        self.lin, self.other, self.sign = nn.Linear(WIDTH, WIDTH), other, 1 - 2 * sample_is_other

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        result = self.lin(value)
        return result if float(value.detach().sum()) * self.sign > 0 else self.other(result)


def _by_columns(value: Tensor) -> Tensor:
    return value.t().contiguous().t()


def _with_gaps(value: Tensor) -> Tensor:
    return torch.cat([value, value], 1)[:, :WIDTH]


def _repeated(value: Tensor) -> Tensor:
    return value[:, :1].expand(-1, WIDTH)


CHANNELS_LAST = {"memory_format": torch.channels_last}
LAYOUTS: dict[str, tuple[Callable[[], nn.Module], Tensor, Tensor]] = {
    "other strides": (lambda: Turned(_by_columns), X.abs(), -X.abs()),
    "those of what was computed from it": (
        lambda: nn.Sequential(Turned(_by_columns), nn.PReLU()),
        X.abs(),
        -X.abs(),
    ),
    "gaps": (lambda: Turned(_with_gaps), X.abs(), -X.abs()),
    "no gaps": (lambda: Turned(_with_gaps, sample_is_other=True), X.abs(), -X.abs()),
    "nothing repeated": (lambda: Turned(_repeated, sample_is_other=True), X.abs(), -X.abs()),
    "another input": (lambda: nn.PReLU(), X, _by_columns(X)),
    "an image with channels last": (
        lambda: nn.Conv2d(2, 2, 1),
        torch.randn(8, 2, 4, 4),
        torch.randn(8, 2, 4, 4).contiguous(**CHANNELS_LAST),
    ),
}


class Features(nn.Module):
    """A layer times an array of numpy, which is in some `place`."""

    def __init__(self, array: np.ndarray, place: str) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        table, held = {"array": array}, SimpleNamespace(array=array)
        Features.of_class = array
        self.array = array if place == "an attribute" else None
        self.features = {
            "an attribute": lambda: torch.from_numpy(self.array),
            "a table that it encloses": lambda: torch.from_numpy(table["array"]),
            "what it encloses": lambda: torch.from_numpy(array),
            "an object": lambda: torch.from_numpy(held.array),
            "its class": lambda: torch.from_numpy(Features.of_class),
        }[place]

    of_class: np.ndarray | None = None

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.lin(value) * self.features()


def said_of_arrays(seed_of_rank: bool, place: str) -> tuple[str, str]:
    """The kind and the text of what a rank says of a model with an array that ranks draw."""
    seed = dist.get_rank() if seed_of_rank else 0
    torch.manual_seed(0)
    array = np.random.default_rng(seed).random(WIDTH).astype("float32")
    model = nn.Sequential(Features(array, place), nn.Linear(WIDTH, WIDTH))
    said = _said(nullcontext, lambda: compiled(model).step(X, None))
    dist.destroy_process_group()
    return said


def said_of_no_module() -> tuple[str, str]:
    """The kind and the text of what a rank says where rank 1 has no module, but a text."""
    model: Any = nn.Linear(WIDTH, WIDTH) if dist.get_rank() == 0 else "model"
    said = _said(nullcontext, lambda: compiled(model).step(X, None))
    dist.destroy_process_group()
    return said


def said_of_a_model_on_meta(rank: int) -> tuple[str, str]:
    """The kind and the text of what a rank says where one has its model on the meta device."""
    with torch.device("meta" if dist.get_rank() == rank else "cpu"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    said = _said(nullcontext, lambda: compiled(model).step(X, None))
    dist.destroy_process_group()
    return said


EVALUATIONS: dict[str, Callable[[int], Tensor | None]] = {
    "a target on last stages": lambda rank: X if rank % 2 else None,
    "a target on first stages": lambda rank: None if rank % 2 else X,
    "a rank forgets it": lambda rank: X if rank != 3 else None,
}


def said_of_evaluations() -> list[tuple[str, str, bool]]:
    """The kind and the text of what a rank of two replicas says of evaluations, and whether a step
    and an evaluation follow.
    """
    pipeline = compiled(between(nn.Tanh))
    said = []
    for target_of in EVALUATIONS.values():
        target = target_of(dist.get_rank())
        found = _said(nullcontext, lambda target=target: pipeline.evaluate(X, target))
        is_well = _steps_well(pipeline)
        pipeline.evaluate(X, X)
        said.append((*found, is_well))
    # What only some ranks of each pipeline begin, as where one looks at the loss that it alone has.
    for act in (lambda: pipeline.evaluate(X, X), lambda: pipeline.clip_grad_norm_(1.0)):
        is_last = dist.get_rank() % 2 == 1
        taken = act if is_last else partial(pipeline.step, X, None)
        said.append((*_said(nullcontext, taken), _steps_well(pipeline)))
    # One that is refused before ranks compare anything, on a rank without a target or with one.
    for rank, target in ((1, X), (2, None)):
        given = _on_one(rank, "x")
        own = target if dist.get_rank() == rank else X
        found = _said(nullcontext, lambda given=given, own=own: pipeline.evaluate(given, own))
        said.append((*found, _steps_well(pipeline)))
    return said


def said_of_layout(name: str) -> tuple[str, str]:
    """The kind and the text of what a rank says of a batch that leads to another layout."""
    make, sample, other = LAYOUTS[name]
    torch.manual_seed(0)
    pipeline = compiled(nn.Sequential(make(), make()), sample, step_timeout=2.0)
    pipeline.step(sample, None)
    said = _said(nullcontext, lambda: pipeline.step(other, None))
    dist.destroy_process_group()  # a step that failed midway has ended it
    return said


def distances(kinds: str, names: Sequence[str]) -> list[float]:
    """How far loss and gradients of ranks that are seeded apart are from those of one process."""
    makers = {"draws": DRAWS, "boundaries": BOUNDARIES}[kinds]
    return [_distance(makers[name]) for name in names]


def _distance(make: Callable[[], nn.Module]) -> float:
    model = between(make)
    whole = Target(copy.deepcopy(model), Arguments((X,), {}), mean_square)
    torch.manual_seed(1 + dist.get_rank())
    pipeline = compiled(model)
    loss = pipeline.step(X, None, everywhere=True)
    reference = reference_for(whole, pipeline.plan)
    wanted = reference.step(whole, 4, seed=pipeline.seed, step=0)
    gradients = dict(reference.model.named_parameters())
    found = [(loss - wanted).abs()]
    for name, parameter in pipeline.named_parameters():
        found.append((parameter.grad - gradients[name].grad).abs().max())
    return float(torch.stack(found).max())


Step = Callable[[Pipeline], Any]
Around = Callable[[], AbstractContextManager[Any]]


def _on_one(rank: int, given: Any) -> Any:
    return given if dist.get_rank() == rank else X


def _recorded_on(rank: int, pipeline: Pipeline) -> None:
    with pipeline.record() if dist.get_rank() == rank else nullcontext():
        pipeline.step(X, None)


@contextmanager
def _default_dtype_on(rank: int) -> Iterator[None]:
    torch.set_default_dtype(torch.float64 if dist.get_rank() == rank else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STEPS: dict[str, tuple[Around, Step]] = {
    # First, since values are compared in the first steps.
    "another batch": (nullcontext, lambda p: p.step(_on_one(1, X + 1), None)),
    "no_grad": (torch.no_grad, lambda p: p.step(X, None)),
    "inference_mode": (torch.inference_mode, lambda p: p.step(X, None)),
    "no_grad on one rank": (
        lambda: torch.no_grad() if dist.get_rank() == 1 else nullcontext(),
        lambda p: p.step(X, None),
    ),
    "another default dtype on one rank": (
        lambda: _default_dtype_on(1),
        lambda p: p.step(X, None),
    ),
    "another number of dimensions": (nullcontext, lambda p: p.step(X[None], None)),
    "likewise on one rank": (nullcontext, lambda p: p.step(_on_one(1, X[None]), None)),
    "another type on one rank": (nullcontext, lambda p: p.step(_on_one(0, X.double()), None)),
    "sparse on one rank": (nullcontext, lambda p: p.step(_on_one(0, X.to_sparse()), None)),
    "a text": (nullcontext, lambda p: p.step("x", None)),
    "on one rank only a text": (nullcontext, lambda p: p.step(_on_one(1, "x"), None)),
    "a gradient": (nullcontext, lambda p: p.step(X.clone().requires_grad_(), None)),
    "a recording on one rank": (nullcontext, lambda p: _recorded_on(0, p)),
    "too many samples": (nullcontext, lambda p: p.step(torch.cat([X, X]), None)),
}


def said_of_steps(names: Sequence[str]) -> list[tuple[str, str, bool]]:
    """The kind and the text of what a rank says of each step, and whether a good one follows."""
    pipeline = compiled(between(nn.Tanh))
    said = []
    for name in names:
        around, step = STEPS[name]
        said.append((*_said(around, lambda step=step: step(pipeline)), _steps_well(pipeline)))
    return said


def _said(around: Around, act: Callable[[], Any]) -> tuple[str, str]:
    try:
        with around():
            act()
    except PipecompileError as error:
        return type(error).__name__, str(error)
    return "", ""


def _steps_well(pipeline: Pipeline) -> bool:
    pipeline.zero_grad()
    pipeline.step(X, None)
    return all(p.grad is not None for p in pipeline.parameters())
