"""Running averages are updated once a step, as one batch norm over the whole minibatch would.

The oracle records what each batch norm of the unsplit model normalises, microbatch by microbatch,
and gives it to a fresh copy of that batch norm as one batch.
"""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipecompile.codegen.regions import EncodedRuns, Regions
from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.batch_statistics import DeferredBatchNorm, record_forward
from pipecompile.graph.random_streams import StreamKey
from pipecompile.ir.plan import BatchNormUpdate
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.runtime.batch_statistics import MinibatchStatistics, minibatch_statistics
from pipecompile.runtime.stage import EagerStage

TOLERANCE = 1e-12
Rows = Sequence[Tensor]


class ActivatedNorm(nn.BatchNorm1d):
    """A batch norm with a forward of its own, like those of timm."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked.add_(1)
        normal = functional.batch_norm(
            *(input, self.running_mean, self.running_var, self.weight, self.bias),
            *(True, self.momentum, self.eps),
        )
        return functional.silu(normal)


class Shared(nn.Module):
    """One batch norm that is called twice."""

    def __init__(self, momentum: float | None) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum)
        self.last = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(self.norm(x)).tanh()))


class Functional(nn.Module):
    """Batch norms that are calls of a function, on buffers of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.batch_norm(x, self.mean, self.variance, training=True, momentum=0.3)
        return self.last(self.first(x).tanh())


def chain(*norms: nn.Module) -> nn.Module:
    """The norms with layers between them; the first one normalises the input."""
    layers = [part for norm in norms for part in (norm, nn.Linear(6, 6), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(6, 6))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: chain(nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=0.4)),
    "cumulative": lambda: chain(*(nn.BatchNorm1d(6, momentum=None) for _ in range(2))),
    "dropout": lambda: chain(nn.BatchNorm1d(6), nn.Dropout(0.5), nn.BatchNorm1d(6)),
    "untracked": lambda: chain(nn.BatchNorm1d(6), nn.BatchNorm1d(6, track_running_stats=False)),
    "no affine": lambda: chain(nn.BatchNorm1d(6, affine=False), nn.BatchNorm1d(6)),
    "own forward": lambda: chain(ActivatedNorm(6), ActivatedNorm(6, momentum=0.9)),
    "shared": lambda: Shared(0.1),
    "shared, cumulative": lambda: Shared(None),
}
EXACT = [name for name in MODELS if name != "dropout"]  # whose unsplit model draws nothing


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def rows(count: int, size: int = 8) -> list[Tensor]:
    """Microbatches whose means differ: averages of single microbatches would be far off."""
    return [torch.randn(size, 6) * (index + 1) + 3 * index - 2 for index in range(count)]


def stages_of(
    model: nn.Module,
    *,
    k: int = 2,
    batch_norm: BatchNormUpdate = "minibatch",
    regions: Regions | None = None,
    runs: EncodedRuns | None = None,
) -> list[EagerStage]:
    """The stages of `model`, cut into k parts of about as many groups of nodes each."""
    call = Arguments((torch.randn(8, 6),), {})
    module = capture(model, call).instantiate(call)
    apply_passes(module.graph, [Group()])
    emitted = emit(module, assignment(module, k), regions or {}, runs or {}, batch_norm)
    return [
        EagerStage(
            stage.module,
            gradient_inputs=stage.gradient_inputs,
            loss=mean_square if stage.index == k - 1 else None,
            buffers=stage.buffers,
            random=stage.random,
        )
        for stage in emitted
    ]


def assignment(module: Any, k: int) -> dict[str, int]:
    """A cut into k stages that keeps groups together, as far as these allow it."""
    nodes = [node for node in module.graph.nodes if node.op != "get_attr"]
    last = {node.meta["group"]: index for index, node in enumerate(nodes) if node.meta["group"]}
    ends, until = [], 0
    for index, node in enumerate(nodes):
        until = max(until, last.get(node.meta["group"], index))
        if index == until:
            ends.append(index + 1)
            until = index + 1
    assert len(ends) >= k, "the model has too few groups"
    cuts = [ends[len(ends) * part // k - 1] for part in range(1, k)]
    return {node.name: sum(index >= cut for cut in cuts) for index, node in enumerate(nodes)}


def mean_square(outputs: Sequence[Tensor], target: Any) -> Tensor:
    return outputs[0].square().mean()


def train(
    stages: Sequence[EagerStage], batch: Rows, *, step: int = 0, recompute: bool = False
) -> None:
    """All forwards, the last microbatch first, then all backwards, like GPipe."""
    saved: dict[tuple[int, int], Any] = {}
    for index in reversed(range(len(batch))):
        values: Sequence[Tensor] = (batch[index],)
        for number, stage in enumerate(stages):
            key = StreamKey(3, step, index)
            values, saved[number, index] = stage.forward(values, key, None, recompute=recompute)
    for index in range(len(batch)):
        gradients: Sequence[Tensor | None] = ()
        for number in reversed(range(len(stages))):
            if recompute:
                stages[number].recompute(saved[number, index])
            gradients = stages[number].backward(saved[number, index], gradients, {})


def norms_of(model: nn.Module) -> list[Any]:
    return [part for part in model.modules() if isinstance(part, nn.BatchNorm1d)]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def oracle(model: nn.Module, batch: Rows) -> None:
    """Run the microbatches, then give each batch norm all that it normalised as one batch."""
    before, inputs = copy.deepcopy(model), defaultdict[str, list[Tensor]](list)
    with torch.no_grad():
        for row in batch:
            calls = defaultdict[str, int](int)
            handles = []
            for name, part in model.named_modules():
                if isinstance(part, nn.BatchNorm1d):

                    def note(_: Any, args: Any, name: str = name, calls: Any = calls) -> None:
                        inputs[f"{name} {calls[name]}"].append(args[0])
                        calls[name] += 1

                    handles.append(part.register_forward_pre_hook(note))
            model(row)
            for handle in handles:
                handle.remove()
        model.load_state_dict(before.state_dict())
        for key, parts in inputs.items():  # in the order of the calls
            model.get_submodule(key.split()[0])(torch.cat(parts))


def assert_close(model: nn.Module, other: nn.Module) -> None:
    for (name, got), wanted in zip(model.named_buffers(), other.buffers(), strict=True):
        assert (got - wanted).abs().max() <= TOLERANCE, name


@pytest.mark.one_case_in(10)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_averages_are_those_of_one_batch_norm_over_the_minibatch(
    name: str, k: int, recompute: bool
) -> None:
    model = MODELS[name]()
    stages, unsplit = stages_of(model, k=min(k, 2) if "shared" in name else k), copy.deepcopy(model)
    for step, count in enumerate((4, 4, 3)):  # the last minibatch is short
        batch = rows(count)
        with minibatch_statistics():
            train(stages, batch, step=step, recompute=recompute)
        oracle(unsplit, batch)
        assert_close(model, unsplit)
    for norm in norms_of(model):
        if norm.track_running_stats:
            assert norm.num_batches_tracked == (6 if "shared" in name else 3)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_first_batch_norm_equals_that_of_a_large_batch(k: int) -> None:
    model = MODELS["plain"]()
    unsplit, batch = copy.deepcopy(model), rows(4)
    with minibatch_statistics():
        train(stages_of(model, k=k), batch)
    unsplit(torch.cat(batch))
    own, large = norms_of(model)[0], norms_of(unsplit)[0]
    assert (own.running_mean - large.running_mean).abs().max() <= TOLERANCE
    assert (own.running_var - large.running_var).abs().max() <= TOLERANCE
    assert own.num_batches_tracked == large.num_batches_tracked == 1


def test_averages_of_single_microbatches_are_far_off() -> None:
    model = MODELS["plain"]()
    unsplit, batch = copy.deepcopy(model), rows(4)
    train(stages_of(model, batch_norm="microbatch"), batch)
    oracle(unsplit, batch)
    assert (norms_of(model)[0].running_var - norms_of(unsplit)[0].running_var).abs().max() > 0.1


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_microbatch_updates(name: str, recompute: bool) -> None:
    model, batch = MODELS[name](), rows(3)
    other = copy.deepcopy(model)
    with minibatch_statistics():
        train(stages_of(model), batch, recompute=recompute)
    train(stages_of(other, batch_norm="microbatch"), batch, recompute=recompute)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)  # type: ignore[arg-type]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    "regions",
    [{0: [["_0", "_1"]]}, {0: [["_0", "_1", "_2"], ["_1", "_2"]], 1: [["_3", "_4"]]}],
)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_recomputed_regions_count_once(regions: Regions, momentum: float | None) -> None:
    model = chain(*(nn.BatchNorm1d(6, momentum=momentum) for _ in range(2)))
    module, batch = copy.deepcopy(model), rows(4)
    plain = copy.deepcopy(model)
    stages, plain_stages = stages_of(model, regions=regions), stages_of(plain)
    for step in range(2):
        with minibatch_statistics():
            train(stages, batch, step=step)
        with minibatch_statistics():
            train(plain_stages, batch, step=step)
        oracle(module, batch)
        assert_close(model, module)
    assert all(map(torch.equal, state_of(model).values(), state_of(plain).values()))


def test_regions_of_functions_count_once() -> None:
    model, batch = Functional(), rows(4)
    with minibatch_statistics():
        train(stages_of(model, regions={0: [["batch_norm", "first"]]}), batch)
    together = torch.cat(batch)
    assert (model.mean - 0.3 * together.mean(0)).abs().max() <= TOLERANCE
    assert (model.variance - 0.7 - 0.3 * together.var(0)).abs().max() <= TOLERANCE


def test_a_batch_norm_in_an_encoded_run_is_deferred() -> None:
    model = chain(nn.BatchNorm1d(6), nn.BatchNorm1d(6))
    unsplit, batch = copy.deepcopy(model), rows(4)
    with minibatch_statistics():
        train(stages_of(model, runs={0: [(("_0", "_1", "_2"), ("offload",))]}), batch)
    oracle(unsplit, batch)
    assert_close(model, unsplit)


@pytest.mark.parametrize("called", ["by position", "by name", "torch"])
def test_calls_of_both_functions_in_any_form(called: str) -> None:
    mean, variance, parts = torch.zeros(6), torch.ones(6), rows(3)
    weight, bias = torch.randn(6), torch.randn(6)
    large = functional.batch_norm(parts[0], None, None, weight, bias, training=True)
    with minibatch_statistics():
        for index, part in enumerate(parts):
            names = {"training": True, "momentum": 0.3, "eps": 1e-5, "weight": weight, "bias": bias}
            averages = {"running_mean": mean, "running_var": variance}
            with record_forward(StreamKey(0, 0, index)):
                if called == "by position":
                    result = DeferredBatchNorm(functional.batch_norm, "norm")(
                        part, mean, variance, weight, bias, True, 0.3
                    )
                elif called == "by name":
                    result = DeferredBatchNorm(functional.batch_norm, "norm")(
                        input=part, **averages, **names
                    )
                else:
                    result = DeferredBatchNorm(torch.batch_norm, "norm")(
                        part, **averages, **names, cudnn_enabled=False
                    )
            assert index or torch.equal(result, large)
    together = torch.cat(parts)
    assert (mean - 0.3 * together.mean(0)).abs().max() <= TOLERANCE
    assert (variance - 0.7 - 0.3 * together.var(0)).abs().max() <= TOLERANCE


@pytest.mark.parametrize("recompute", [False, True])
def test_a_call_of_the_function_is_deferred(recompute: bool) -> None:
    model, batch = Functional(), rows(4)
    with minibatch_statistics():
        train(stages_of(model), batch, recompute=recompute)
    together = torch.cat(batch)
    assert (model.mean - 0.3 * together.mean(0)).abs().max() <= TOLERANCE
    assert (model.variance - 0.7 - 0.3 * together.var(0)).abs().max() <= TOLERANCE


def test_microbatches_of_different_sizes_count_by_their_elements() -> None:
    """A data-dependent module may give a batch norm another number of elements each time."""
    norm, parts = nn.BatchNorm1d(6), [torch.randn(2, 6), torch.randn(9, 6) + 4, torch.randn(5, 6)]
    large, deferred = copy.deepcopy(norm), DeferredBatchNorm(operator.call, "norm")
    with minibatch_statistics():
        for index, part in enumerate(parts):
            with record_forward(StreamKey(0, 0, index)):
                deferred(norm, part)
    large(torch.cat(parts))
    assert_close(norm, large)


def test_a_microbatch_that_leaves_a_batch_norm_out_does_not_count() -> None:
    first, second = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
    large = copy.deepcopy(second)
    parts = [torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6)]
    with minibatch_statistics():
        for index, part in enumerate(parts):
            with record_forward(StreamKey(0, 0, index)):
                DeferredBatchNorm(operator.call, "first")(first, part)
                if index != 1:
                    DeferredBatchNorm(operator.call, "second")(second, part)
    large(torch.cat([parts[0], parts[2]]))
    assert_close(second, large)


def test_a_large_mean_costs_no_digits() -> None:
    norm = nn.BatchNorm1d(6, momentum=1.0)
    parts = [torch.randn(16, 6) + 1e6 for _ in range(8)]
    with minibatch_statistics():
        for index, part in enumerate(parts):
            with record_forward(StreamKey(0, 0, index)):
                DeferredBatchNorm(operator.call, "norm")(norm, part)
    wanted = torch.cat(parts).var(0)
    assert norm.running_var is not None
    assert ((norm.running_var - wanted) / wanted).abs().max() < 1e-9


@pytest.mark.parametrize("shape", [(8, 6, 5), (8, 6, 5, 3), (4, 6, 3, 2, 5)])
def test_images_and_volumes(shape: tuple[int, ...]) -> None:
    kind = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)]
    norm = kind(6)
    large, parts = copy.deepcopy(norm), [torch.randn(shape) + index for index in range(3)]
    with minibatch_statistics():
        for index, part in enumerate(parts):
            with record_forward(StreamKey(0, 0, index)):
                DeferredBatchNorm(operator.call, "norm")(norm, part)
    large(torch.cat(parts))
    assert_close(norm, large)


def test_float32_averages_are_as_near_as_their_type_allows() -> None:
    norm = nn.BatchNorm2d(6).float()
    large, parts = copy.deepcopy(norm), [torch.randn(4, 6, 3, 3).float() + i for i in range(4)]
    with minibatch_statistics():
        for index, part in enumerate(parts):
            with record_forward(StreamKey(0, 0, index)):
                DeferredBatchNorm(operator.call, "norm")(norm, part)
    large(torch.cat(parts))
    for got, wanted in zip(norm.buffers(), large.buffers(), strict=True):
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


def test_a_failed_step_leaves_the_averages() -> None:
    model = MODELS["plain"]()
    stages, before = stages_of(model), state_of(model)
    with pytest.raises(ValueError, match="Expected more than 1 value"), minibatch_statistics():
        train(stages, [torch.randn(1, 6), *rows(3)])  # the first microbatch runs last
    with suppress(KeyboardInterrupt), minibatch_statistics():
        train(stages, rows(4))
        raise KeyboardInterrupt
    assert all(map(torch.equal, state_of(model).values(), before.values()))
    unsplit, batch = copy.deepcopy(model), rows(2)
    with minibatch_statistics():
        train(stages, batch)
    oracle(unsplit, batch)
    assert_close(model, unsplit)


def test_evaluations_and_forwards_outside_a_step_record_nothing() -> None:
    model = MODELS["plain"]()
    stages, before = stages_of(model), state_of(model)
    train(stages, rows(2))
    with minibatch_statistics():
        values: Sequence[Tensor] = rows(1)
        for stage in stages:
            values = stage.evaluate(values, StreamKey(0, 0, 0))
    assert all(map(torch.equal, state_of(model).values(), before.values()))


def test_a_model_in_eval_mode_is_not_deferred() -> None:
    model = MODELS["plain"]().eval()
    stages, before = stages_of(model), state_of(model)
    with minibatch_statistics():
        train(stages, rows(2))
    assert all(map(torch.equal, state_of(model).values(), before.values()))


def test_the_order_of_microbatches_does_not_matter() -> None:
    first, second = (nn.BatchNorm1d(6) for _ in range(2))
    parts = rows(5)
    for norm, order in ((first, range(5)), (second, reversed(range(5)))):
        with minibatch_statistics():
            for index in order:
                with record_forward(StreamKey(0, 0, index)):
                    DeferredBatchNorm(operator.call, "norm")(norm, parts[index])
    assert all(map(torch.equal, first.buffers(), second.buffers()))


def test_accumulated_steps_are_one_minibatch() -> None:
    model, batch = MODELS["shared, cumulative"](), rows(6)
    unsplit, before = copy.deepcopy(model), state_of(model)
    stages, statistics = stages_of(model), MinibatchStatistics()
    with statistics.of_step(accumulate=True):
        train(stages, batch[:2], step=0)
    with suppress(KeyboardInterrupt), statistics.of_step(accumulate=True):
        train(stages, rows(3), step=1)
        raise KeyboardInterrupt
    assert all(map(torch.equal, state_of(model).values(), before.values()))
    with statistics.of_step():
        train(stages, batch[2:], step=1)
    oracle(unsplit, batch)
    assert_close(model, unsplit)


def test_statistics_that_were_put_aside_can_be_dropped() -> None:
    model, batch = MODELS["plain"](), rows(3)
    unsplit, stages, statistics = copy.deepcopy(model), stages_of(model), MinibatchStatistics()
    with statistics.of_step(accumulate=True):
        train(stages, rows(3), step=0)
    statistics.clear()
    with statistics.of_step():
        train(stages, batch, step=1)
    oracle(unsplit, batch)
    assert_close(model, unsplit)


class OwnAverages(nn.BatchNorm1d):
    """It writes to its averages itself."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        with torch.no_grad():
            self.running_mean.lerp_(input.mean(0), 0.1)
        return functional.batch_norm(input, None, None, self.weight, self.bias, True)


class LowerLevel(nn.BatchNorm1d):
    """It calls a function below `torch.batch_norm`."""

    def forward(self, input: Tensor) -> Tensor:
        arguments = self.weight, self.bias, self.running_mean, self.running_var
        return torch.native_batch_norm(input, *arguments, True, 0.1, 1e-5)[0]


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (OwnAverages, "_0 writes to its running averages itself, which batch_norm='minibatch'"),
        (LowerLevel, "_0 calls native_batch_norm, whose running averages batch_norm='minibatch'"),
    ],
)
def test_modules_that_update_in_a_way_of_their_own_are_refused(norm: Any, message: str) -> None:
    stages = stages_of(chain(norm(6), nn.BatchNorm1d(6)))
    with pytest.raises(InputError, match=message), minibatch_statistics():
        train(stages, rows(2))
