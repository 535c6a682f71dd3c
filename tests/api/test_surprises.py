"""Models and surroundings that once gave, or could give, wrong results without an error."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from examples import models
from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import verify
from pipecompile.errors import (
    CaptureError,
    InfeasibleError,
    InputError,
    PipecompileError,
    ScheduleError,
    StalePlanError,
)
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target, sum_of_squares
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import encode
from tests.sweeps import sweep

X = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))


def compiled(model: nn.Module, **options: Any) -> Any:
    choices = options if "plan" in options else {"k": 2, "microbatches": 4, **options}
    return pipecompile(model, X, costs="flops", loss_fn=sum_of_squares, **choices)


def linears(count: int = 3, width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))


class FunctionalNorm(nn.Module):
    """Batch normalisation as a function on buffers, which it updates without a trace; one is read
    again later.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.batch_norm(self.first(x), self.mean, self.variance, training=True)
        return self.second(hidden.relu()) + self.mean


class Regions(nn.Module):
    """What runs under no_grad, and under autocast, matters for the result."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            fixed = hidden.sin() * 2
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = self.second(hidden.relu())
        return self.third(low.float()) + fixed


class LayerDrop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if random.random() < 0.5 else x
        return x


class WritesAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.average = linears(), torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.mul_(0.9).add_(x.mean(0))
        return self.layers(x) + self.average


class WithSummary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(x), self.layers[0].weight.sum(0)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("recompute", ["none", "stage"])
@pytest.mark.parametrize("model", [FunctionalNorm, Regions])
def test_hidden_effects_are_exact(model: type[nn.Module], recompute: str) -> None:
    _, found = verify(
        Target(model(), arguments_of(model(), X)),
        k=2,
        microbatches=4,
        costs="flops",
        recompute=recompute,
    )
    assert all(comparison.passed for comparison in found), found


@pytest.mark.sweep
def test_attention_that_takes_another_path_without_gradients() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    target = Target(model, arguments_of(model, X[:, None].expand(8, 5, 8).contiguous()))
    _, found = verify(target, k=2, microbatches=4, costs="flops")
    assert len(found) == 2 and all(comparison.passed for comparison in found), found


def test_a_functional_norm_stays_with_who_reads_its_buffers() -> None:
    pipeline = compiled(FunctionalNorm())
    stages = pipeline.plan.assignment
    # What comes after reads a copy, which is made where the norm writes.
    assert stages["batch_norm"] == stages["clone"]


@pytest.mark.sweep
@pytest.mark.parametrize("k", [2, sweep(4)])
def test_a_tie_forced_onto_one_stage(k: int) -> None:
    # The group spans the whole model, so the stages around it are not contiguous in the order of
    # the forward.
    target = Target.of(models.gpt2(), "gpt2")
    plan, found = verify(
        target, k=k, microbatches=4, costs="flops", no_split=[["transformer.wte", "lm_head"]]
    )
    assert all(comparison.passed for comparison in found), found
    (tied,) = [parameter for parameter in plan.parameters if parameter.aliases]
    assert len(tied.stages) == 1


class SharedUnderAutocast(nn.Module):
    """An embedding tied to the head, and a layer that is called after each block."""

    def __init__(self, calls: int, region: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.blocks, self.shared = (
            nn.Embedding(32, 16),
            linears(4, 16),
            nn.Linear(16, 16),
        )
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight
        self.calls, self.region = calls, region

    def forward(self, tokens: Tensor) -> Tensor:
        with self.region():
            x = self.embedding(tokens)
            for index, block in enumerate(self.blocks):
                x = block(x).tanh()
                x = x + self.shared(x) if index < self.calls else x
            out: Tensor = self.head(x).float()
        return out


def in_halves(*, cache: bool = True) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("calls", "region", "around", "layers"),
    [
        (4, in_halves, nullcontext, 1),  # cast once: all calls of the shared layer are in one stage
        (4, nullcontext, in_halves, 1),
        (4, partial(in_halves, cache=False), nullcontext, 2),  # cast for each call: in two stages
        (0, in_halves, nullcontext, 0),  # only the tie, of which the embedding is not cast
    ],
)
def test_weights_that_autocast_casts_once_have_the_gradients_of_the_whole(
    calls: int, region: Any, around: Any, layers: int
) -> None:
    model, tokens = SharedUnderAutocast(calls, region), torch.arange(32).view(8, 4)
    with around():
        plan, found = verify(
            Target(model, arguments_of(model, tokens)),
            k=2,
            microbatches=4,
            costs="flops",
            pin={"blocks_0": 0},
        )
    assert all(comparison.passed for comparison in found), found
    stages = {parameter.name: parameter.stages for parameter in plan.parameters}
    assert len(stages.get("shared.weight", ())) == layers
    assert stages["embedding.weight"] == tuple(range(plan.k))


class TwoRegions(nn.Module):
    """Two regions of autocast read one weight; on what lies between them the second does not
    depend.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.twice, self.between, self.head = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        with in_halves():
            low = self.twice(x).tanh()
        between = self.between(x)
        with in_halves():
            low = self.twice(low).tanh()
        out: Tensor = self.head(low.float() + between.sin())
        return out


def test_regions_that_the_cut_brings_side_by_side_cast_for_themselves() -> None:
    target = Target(TwoRegions(), arguments_of(TwoRegions(), X))
    _, (found,) = verify(
        target, k=2, microbatches=4, costs="flops", pin={"tanh_1": 0, "between": 1}
    )
    assert found.passed, found


def test_a_cut_between_readers_that_autocast_keeps_together_says_so() -> None:
    message = (
        r"at most \d+ stages .*shared with \d+ nodes.* so its readers share a stage \(shared, "
        r"shared_1, shared_2, shared_3\): to part them, call them outside autocast, or enter it "
        r"with cache_enabled=False"
    )
    with pytest.raises(InfeasibleError, match=message):
        pipecompile(
            SharedUnderAutocast(4, in_halves),
            torch.arange(32),
            k=16,
            costs="flops",
            self_check=False,
            microbatches=16,
        )


def test_no_cut_lies_before_a_sum() -> None:
    """Its gradient repeats elements; laid out in full, as a message is, a bias before the cut has
    another sum of it.
    """

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 33), nn.Linear(1, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).sum(-1, keepdim=True))

    with pytest.raises(
        InfeasibleError, match="first=0 and sum_1=1: these nodes cannot be separated"
    ):
        compiled(Sum(), pin={"first": 0, "sum_1": 1})


def test_another_autocast_than_at_compile_time_is_refused() -> None:
    pipeline = compiled(linears())
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(InputError, match="autocast"):
        pipeline.step(X)


def test_parameters_unfrozen_later_are_refused() -> None:
    model = linears()
    model[0].requires_grad_(False)
    pipeline = compiled(model)
    model[0].requires_grad_(True)
    with pytest.raises(InputError, match=r"^0.weight requires a gradient, but did not"):
        pipeline.step(X)


@pytest.mark.parametrize(
    ("model", "message"),
    [(LayerDrop, "Python's random module"), (WritesAttribute, "register_buffer")],
)
def test_what_a_graph_cannot_hold_is_refused(model: type[nn.Module], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        compiled(model())


def test_writing_to_the_input_is_refused() -> None:
    class Writes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.add_(1))

    before = X.clone()
    with pytest.raises(CaptureError, match="writes to its input"):
        compiled(Writes(nn.Linear(8, 8), nn.Linear(8, 8)))
    assert torch.equal(X, before)


def test_outputs_without_a_batch_are_not_joined() -> None:
    with pytest.raises(InputError, match=r"output 1 of shape \(8,\)"):
        compiled(WithSummary()).evaluate(X)


def test_a_larger_batch_than_planned_is_refused() -> None:
    with pytest.raises(InputError, match="holds 8 microbatches, but the plan was made for 4"):
        compiled(linears()).step(torch.cat([X, X]))


def test_a_larger_batch_is_evaluated_all_the_same() -> None:
    model = linears()
    found, rows = compiled(model).evaluate(torch.cat([X, X])), X.split(2)
    with torch.no_grad():
        assert torch.equal(found, torch.cat([model(row) for row in (*rows, *rows)]))


def test_a_group_that_names_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no node or module is called 'encoder'"):
        compiled(linears(), no_split=[["encoder"]])


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    pipeline = pipecompile(
        linears(), X, k=2, costs="flops", loss_fn=lambda output, target: output, microbatches=2
    )
    with pytest.raises(InputError, match="must be a real scalar tensor"):
        pipeline.step(X)


def test_an_edited_plan_is_refused() -> None:
    made = compiled(linears(6)).plan
    first, second = made.stages
    moved = [
        msgspec.structs.replace(first, blocks=(*first.blocks, (second.nodes[-1],)), module_runs=()),
        msgspec.structs.replace(second, blocks=(second.nodes[:-1],), module_runs=()),
    ]
    edited: Plan = msgspec.structs.replace(made, stages=tuple(moved))
    with pytest.raises(PipecompileError):
        compiled(linears(6), plan=edited)
    dropped = msgspec.structs.replace(
        made,
        stages=(
            first,
            msgspec.structs.replace(second, blocks=(second.nodes[1:],), module_runs=()),
        ),
    )
    with pytest.raises(StalePlanError, match="the plan was edited"):
        compiled(linears(6), plan=dropped)


def test_an_unsound_plan_is_refused_before_the_model_runs(tmp_path: Path) -> None:
    edited = tmp_path / "plan.json"
    plan = encode(compiled(linears(6)).plan)
    edited.write_bytes(plan.replace(b'"0REDUCE_GRAD"', b'"0SEND_B0"'))
    model = linears(6)
    model.register_forward_pre_hook(lambda *_: pytest.fail("the model has run"))
    with pytest.raises(ScheduleError, match="not sound: rank 0: 0REDUCE_GRAD is missing"):
        compiled(model, plan=edited)
