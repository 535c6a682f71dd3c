"""Training that never empties the pipeline, against a plain loop with delayed gradients."""

from __future__ import annotations

import copy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import InputError, pipecompile
from pipecompile.frontend.target import Target
from pipecompile.training.pipeline import Pipeline
from tests.allocations import allocations, highest
from tests.delayed_gradients import OPTIMIZERS, Batches, DelayedGradients
from tests.device import DEVICE
from tests.distributed.training_jobs import mixture

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
EXACT = 1e-12
RULES = {"pipedream": 1, "pipedream-vertical-sync": 1, "pipedream-2bw": 4}


def batches_of(samples: int, count: int = 20) -> Batches:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 11, (samples, 6), generator=generator) for _ in range(count)]
    return [(each, each.roll(1, 1)) for each in (every.to(DEVICE) for every in tokens)]


def pipeline_of(
    target: Target, k: int, schedule: str, microbatches: int, **options: Any
) -> Pipeline:
    return pipecompile(
        copy.deepcopy(target.model),
        target.call.args[0],
        k=k,
        microbatches=microbatches,
        schedule=schedule,
        loss_fn=target.loss_fn,
        **{"costs": "flops", "self_check": False, **options},
    )


def distance(pipeline: Pipeline, wanted: dict[str, Tensor], *, buffers: bool = True) -> float:
    named = [*pipeline.named_parameters(), *(pipeline.named_buffers() if buffers else ())]
    own: dict[str, Tensor] = dict(named)
    assert own.keys() == wanted.keys()
    return max(
        ((own[name] - value).abs().max() / (1 + value.abs().max())).item()
        for name, value in wanted.items()
    )


@cache
def oracle_of(microbatches: int) -> tuple[Target, DelayedGradients]:
    """The mixture for microbatches of 2 samples, and the unsplit model; each is captured once."""
    target = mixture(2 * microbatches)
    return target, DelayedGradients(target, pipeline_of(target, 2, "1f1b", microbatches).plan)


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("schedule", RULES)
def test_every_rule_is_its_recurrence(schedule: str, k: int) -> None:
    target, oracle = oracle_of(RULES[schedule])
    batches = batches_of(2 * RULES[schedule])
    pipeline = pipeline_of(target, k, schedule, RULES[schedule])
    for name, optimizer in OPTIMIZERS.items():
        pipeline.load_state_dict(target.model.state_dict())
        pipeline.steps = 0
        losses = [loss.item() for loss in pipeline.train(batches, optimizer)]
        wanted, state = oracle.train(pipeline.plan, batches, optimizer)
        assert losses == pytest.approx(wanted, rel=EXACT), name
        assert distance(pipeline, state) <= EXACT, name
        _, synchronous = oracle.train(pipeline.plan, batches, optimizer, schedule="1f1b")
        assert distance(pipeline, synchronous) > 1e-3, name


@pytest.mark.parametrize("schedule", RULES)
def test_replicas_of_stages_in_one_process_follow_their_recurrence(schedule: str) -> None:
    """Stage 0 has two ranks, whose microbatches one process takes."""
    target, oracle = oracle_of(4)
    batches = batches_of(8, 10)
    pipeline = pipeline_of(target, 3, schedule, 4, stage_replicas=(2, 1, 1))
    adamw = OPTIMIZERS["adamw"]
    pipeline.load_state_dict(target.model.state_dict())
    losses = [loss.item() for loss in pipeline.train(batches, adamw)]
    wanted, state = oracle.train(pipeline.plan, batches, adamw)
    assert losses == pytest.approx(wanted, rel=EXACT)
    assert distance(pipeline, state) <= EXACT


WIDTHS = (8, 20, 28, 36, 8)


def chain_of(schedule: str, microbatches: int = 4, **options: Any) -> Pipeline:
    """Four layers on four stages; the weight of each has a size that no other tensor has."""
    torch.manual_seed(0)
    layers = [nn.Linear(*pair, bias=False) for pair in pairwise(WIDTHS)]
    return pipecompile(
        nn.Sequential(*layers).double(),
        torch.zeros(2 * microbatches, 8, dtype=torch.float64),
        microbatches=microbatches,
        schedule=schedule,
        loss_fn=nn.functional.mse_loss,
        pin={f"_{stage}": stage for stage in range(4)},
        **{"costs": "flops", "self_check": False, **options},
    )


def chain_batches(count: int = 12, samples: int = 8) -> Batches:
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(2, count, samples, 8, generator=generator, dtype=torch.float64)
    return list(zip(*values, strict=True))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)


def state_of(pipeline: Pipeline) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in pipeline.named_parameters()}


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def weight_changes(pipeline: Pipeline, samples: int = 8) -> list[list[int]]:
    """For each parameter the storages of its size that a run makes (1) and frees (-1), in order."""

    def run() -> None:
        for parameter in pipeline.parameters():
            parameter.data = parameter.data.clone()  # else what was there before is not counted
        list(pipeline.train(chain_batches(samples=samples), sgd))

    allocated, sizes = allocations(run), [p.nbytes for p in pipeline.parameters()]
    return [[each // size for each in allocated if abs(each) == size] for size in sizes]


@pytest.mark.parametrize(
    ("schedule", "copies", "gradients"),
    [
        ("pipedream", [4, 3, 2, 1], 1),
        ("pipedream-vertical-sync", [4, 4, 4, 4], 1),
        # The sum of a minibatch, and what a microbatch adds to it.
        ("pipedream-2bw", [2, 2, 2, 2], 2),
        ("1f1b", [1, 1, 1, 1], 2),
    ],
)
def test_copies_of_weights_are_those_of_the_papers(
    schedule: str, copies: list[int], gradients: int
) -> None:
    """There are n − s, n and 2, in the plan and by storages that live at once in a run."""
    pipeline = chain_of(schedule)
    sizes = [p.nbytes for p in pipeline.parameters()]
    planned = [rank.parameters.expected for rank in pipeline.plan.prediction.memory]
    assert planned == [size * count for size, count in zip(sizes, copies, strict=True)]
    # What is there after the run: the newest version, and gradients where steps leave them.
    left = [1 if schedule in RULES else 2] * 4
    # The profiler loses events on a busy machine.
    tries = (weight_changes(chain_of(schedule)) for _ in range(4))
    made = next(each for each in tries if [sum(changes) for changes in each] == left)
    # Gradients are as large as weights.
    assert [highest(changes) - gradients for changes in made] == copies


@pytest.mark.parametrize(
    ("schedule", "copies"),
    [("pipedream", [3, 2, 2, 1]), ("pipedream-vertical-sync", [3, 3, 3, 3])],
)
def test_copies_of_weights_where_updates_are_those_of_minibatches(
    schedule: str, copies: list[int]
) -> None:
    """Two ranks of stage 0 begin 4 microbatches ahead, the others 2, 1 and 0: with 2 in an update
    that is 2, 1, 1 and 0 older versions.
    """
    options: Any = {"stage_replicas": (2, 1, 1, 1), "microbatches": 2}
    pipeline = chain_of(schedule, **options)
    sizes = [p.nbytes for p in pipeline.parameters()]
    planned = [rank.parameters.expected for rank in pipeline.plan.prediction.memory]
    pairs = zip(sizes[:1] + sizes, copies[:1] + copies, strict=True)
    assert planned == [size * count for size, count in pairs]
    tries = (weight_changes(chain_of(schedule, **options), 4) for _ in range(4))
    made = next(each for each in tries if all(sum(changes) == 1 for changes in each))
    assert [highest(changes) - 2 for changes in made] == copies  # 2 gradients


@pytest.mark.parametrize("schedule", RULES)
def test_drained_runs_and_resumed_ones_are_those_that_went_on(
    schedule: str, tmp_path: Path
) -> None:
    batches = chain_batches()
    through = chain_of(schedule)
    losses = list(through.train(batches, adamw, halving))
    drained = chain_of(schedule)
    run = drained.train(batches, adamw, halving)
    own = [next(run) for _ in range(5)]
    drained.drain()
    assert drained.steps > 5 or schedule == "pipedream-2bw"
    drained.checkpoint(data=drained.steps).save(tmp_path)
    drained.evaluate(batches[0][0])
    assert torch.equal(torch.stack([*own, *run]), torch.stack(losses))
    assert_same(state_of(drained), state_of(through))
    resumed = chain_of(schedule)
    rest = iter(batches)
    run = resumed.train(rest, adamw, halving)
    resumed.checkpoint(data=0).load(tmp_path)
    done = resumed.steps
    for _ in range(done):
        next(rest)
    assert torch.equal(torch.stack(list(run)), torch.stack(losses[done:]))
    assert_same(state_of(resumed), state_of(through))


def test_a_checkpoint_of_another_rule_is_refused(tmp_path: Path) -> None:
    pipeline = chain_of("pipedream")
    next(pipeline.train(chain_batches(3), adamw))
    pipeline.checkpoint().save(tmp_path)
    other = chain_of("pipedream-vertical-sync")
    other.train(chain_batches(), adamw)
    with pytest.raises(InputError, match="versions of 'pipedream' with k=4 and microbatches=4"):
        other.checkpoint().load(tmp_path)
    replicated = chain_of("pipedream", stage_replicas=(2, 1, 1, 1))
    replicated.train(chain_batches(), adamw)
    with pytest.raises(InputError, match=r"but this run is \('pipedream', 4, 4, 2, 1, 1, 1\)"):
        replicated.checkpoint().load(tmp_path)
    # Without a run of its own it takes the newest weights.
    synchronous = chain_of("1f1b")
    synchronous.checkpoint().load(tmp_path)
    assert_same(state_of(synchronous), state_of(pipeline))


@pytest.mark.parametrize("schedule", RULES)
def test_a_run_that_is_over_leaves_the_newest_weights_only(schedule: str, tmp_path: Path) -> None:
    """To save it is to save a run that begins anew; a new run begins with these weights too."""
    batches = chain_batches()
    pipeline, again = chain_of(schedule), chain_of(schedule)
    run = pipeline.train(batches, sgd)
    checkpoint = pipeline.checkpoint(data=None)
    losses = list(run)
    assert len(losses) == len(batches) and list(run) == []
    checkpoint.save(tmp_path)
    wanted = list(pipeline.train(batches, sgd))
    rest = again.train(batches, sgd)
    again.checkpoint().load(tmp_path)
    assert again.steps == len(batches)
    assert torch.equal(torch.stack(list(rest)), torch.stack(wanted))
    assert_same(state_of(again), state_of(pipeline))


def test_another_run_ends_the_one_before() -> None:
    batches = chain_batches()
    pipeline = chain_of("pipedream")
    first = pipeline.train(batches, sgd)
    next(first)
    begun = pipeline.steps
    list(pipeline.train(batches, sgd))
    # What had been read has gone back, and nothing else was read.
    assert len(list(first)) == pipeline.steps - len(batches) - begun


@pytest.mark.parametrize("schedule", RULES)
def test_minibatches_that_are_given_one_by_one_are_trained_as_all_of_them_are(
    schedule: str,
) -> None:
    batches = chain_batches()
    at_once, stepped = chain_of(schedule), chain_of(schedule)
    wanted = list(at_once.train(batches, adamw, halving))
    rest = stepped.train(optimizer=adamw, scheduler=halving)
    losses = [stepped.step(*batch) for batch in batches[:5]]
    stepped.drain()
    losses += [stepped.step(*batch) for batch in batches[5:]]
    # A loss comes so many steps later, also behind a drain.
    late = losses.index(next(loss for loss in losses if loss is not None))
    assert late == 1
    assert torch.equal(torch.stack([*losses[late:], *rest]), torch.stack(wanted))
    assert stepped.steps == len(batches)
    assert_same(state_of(stepped), state_of(at_once))
    with pytest.raises(InputError, match="one that is over takes no more"):
        stepped.step(*batches[0])


def test_steps_in_flight_say_what_they_need() -> None:
    batches = chain_batches(3)
    pipeline = chain_of("pipedream")
    with pytest.raises(InputError, match=r"call pipeline\.train\(optimizer=lambda parameters"):
        pipeline.step(*batches[0])
    pipeline.train(batches, sgd)
    with pytest.raises(InputError, match="reads its own batches"):
        pipeline.step(*batches[0])
    pipeline.train(optimizer=sgd)
    with pytest.raises(InputError, match="given accumulate=True and everywhere=True, but under"):
        pipeline.step(*batches[0], accumulate=True, everywhere=True)
    with pytest.raises(InputError, match="drop the last batch if it is smaller"):
        pipeline.step(*(each[:4] for each in batches[0]))
    for given in ({"scheduler": halving}, {"max_norm": 1.0}, {"skip_nonfinite": True}):
        with pytest.raises(InputError, match="has no function that makes optimizers"):
            pipeline.train(**given)
    with pytest.raises(InputError, match="batches is a NoneType"):
        pipeline.train(None, sgd)
    with pytest.raises(InputError, match="a step leaves gradients for an optimizer of yours"):
        chain_of("1f1b").train(optimizer=sgd)


@pytest.mark.parametrize("schedule", RULES)
def test_a_batch_that_is_refused_leaves_what_is_in_flight(schedule: str) -> None:
    batches = chain_batches(6)
    wanted, pipeline = chain_of(schedule), chain_of(schedule)
    expected = list(wanted.train(batches, sgd))
    short = [each[:4] for each in batches[0]]
    run = pipeline.train(iter([*batches[:3], short, *batches[3:]]), sgd)
    losses = [next(run)]
    with pytest.raises(InputError, match="drop the last batch if it is smaller"):
        list(map(losses.append, run))
    pipeline.evaluate(batches[0][0])
    losses += run
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert_same(state_of(pipeline), state_of(wanted))


def test_a_batch_in_other_modes_is_refused() -> None:
    target, _ = oracle_of(1)
    pipeline = pipeline_of(target, 2, "pipedream", 1)
    run = pipeline.train(batches_of(2, 6), OPTIMIZERS["sgd"])
    losses = [next(run)]
    pipeline.eval()
    with pytest.raises(InputError, match="in other modes than when the run began"):
        list(map(losses.append, run))
    pipeline.train()
    losses += run
    assert len(losses) == pipeline.steps == 5  # but for the batch that was refused


def test_rates_follow_the_versions_and_the_norm_is_that_of_all_stages() -> None:
    pipeline = chain_of("pipedream-2bw")
    batches = chain_batches()
    target = Target(pipeline._target.model, pipeline._target.call, nn.functional.mse_loss)
    oracle = DelayedGradients(target, pipeline.plan)
    losses = [loss.item() for loss in pipeline.train(batches, sgd, halving, max_norm=0.05)]
    wanted, state = oracle.train(
        pipeline.plan, batches, sgd, max_norm=0.05, rate=lambda update: 0.5 ** (update // 3)
    )
    assert losses == pytest.approx(wanted, rel=EXACT)
    assert distance(pipeline, state) <= EXACT
    _, unclipped = oracle.train(pipeline.plan, batches, sgd)
    assert distance(pipeline, unclipped) > 1e-3


@pytest.mark.parametrize("schedule", RULES)
def test_recomputed_stages_read_their_version(schedule: str) -> None:
    """Whole stages in an action of their own, and regions within a backward."""
    batches = chain_batches(6)
    wanted = chain_of(schedule)
    list(wanted.train(batches, sgd))
    for recompute in ("stage", "block"):
        pipeline = chain_of(schedule, recompute=recompute)
        list(pipeline.train(batches, sgd))
        assert_same(state_of(pipeline), state_of(wanted))


def test_synchronous_schedules_are_trained_in_the_same_loop() -> None:
    batches = chain_batches(4)
    pipeline, stepped = chain_of("1f1b"), chain_of("1f1b")
    losses = list(pipeline.train(batches, sgd, max_norm=0.1))
    optimizer = sgd(list(stepped.parameters()))
    for (x, y), loss in zip(batches, losses, strict=True):
        optimizer.zero_grad()
        assert torch.equal(stepped.step(x, y), loss)
        stepped.clip_grad_norm_(0.1)
        optimizer.step()
    assert_same(state_of(pipeline), state_of(stepped))


def test_vertical_sync_is_another_rule() -> None:
    pipelines = [chain_of(name) for name in ("pipedream", "pipedream-vertical-sync")]
    plain, synced = (
        torch.stack(list(each.train(chain_batches(4), sgd))).tolist() for each in pipelines
    )
    assert plain[0] != pytest.approx(synced[0], rel=1e-6)


def test_sums_are_not_divided() -> None:
    batches = chain_batches(4)
    mean, total = (
        chain_of("pipedream-2bw", loss_reduction=reduction) for reduction in ("mean", "sum")
    )
    losses = [
        list(each.train(batches, optimizer)) for each, optimizer in ((mean, sgd), (total, quarter))
    ]
    # Four microbatches at a quarter of the rate.
    assert torch.allclose(torch.stack(losses[0]) * 4, torch.stack(losses[1]), rtol=EXACT)


def quarter(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05 / 4)


class Overlapping(nn.Module):
    """Two parameters with a row in common."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.randn(3, 4)
        self.first, self.second = nn.Parameter(rows[:2]), nn.Parameter(rows[1:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first.T) @ self.second


def test_parameters_in_the_same_memory_are_refused() -> None:
    x = torch.randn(4, 4)
    pipeline = pipecompile(
        Overlapping(),
        x,
        k=2,
        schedule="pipedream",
        loss_fn=nn.functional.mse_loss,
        costs="flops",
        self_check=False,
        microbatches=2,
    )
    with pytest.raises(InputError, match="first and second are parameters in the same memory"):
        pipeline.train([(x, x)], sgd)


def test_modes_are_switched_by_the_same_name() -> None:
    pipeline = chain_of("pipedream")
    model = pipeline._target.model
    assert pipeline.train(False) is pipeline
    assert not model.training
    assert pipeline.train() is pipeline
    assert model.training


def test_what_cannot_be_right_in_flight_is_refused() -> None:
    batches = chain_batches(3)
    pipeline = chain_of("pipedream")
    with pytest.raises(InputError, match="the first stage steps before the last one has"):
        pipeline.train(batches, sgd, max_norm=1.0)
    with pytest.raises(InputError, match=r"clip_grad_norm_\(\) is for what a step leaves"):
        pipeline.clip_grad_norm_(1.0)
    with pytest.raises(InputError, match="drop the last batch if it is smaller"):
        list(pipeline.train([batches[0], [each[:4] for each in batches[1]]], sgd))
    with pytest.raises(InputError, match="each is a pair"):
        list(pipeline.train([batches[0][0]], sgd))
    with pytest.raises(InputError, match="returned an optimizer of other parameters"):
        pipeline.train(batches, lambda _: sgd(list(pipeline.parameters())))
    next(pipeline.parameters()).register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match="weight has a hook on its gradient"):
        pipeline.train(batches, sgd)
    with pytest.raises(InputError, match="statistics when a minibatch is over"):
        chain_of("pipedream", batch_norm="minibatch").train(batches, sgd)
    with pytest.raises(InputError, match="at least 3 microbatches on 4 ranks"):
        chain_of("pipedream-2bw", 2)


@pytest.mark.parametrize("schedule", ["pipedream-2bw", "1f1b"])
def test_what_cannot_step_a_stage_alone_is_refused(schedule: str) -> None:
    pipeline, batches = chain_of(schedule), chain_batches(3)
    given: Any = [
        (torch.optim.LBFGS, None, "LBFGS computes the loss of its stage"),
        (sgd(list(pipeline.parameters())), None, "the optimizer is of type SGD, but"),
        (sgd, torch.optim.lr_scheduler.ReduceLROnPlateau, r"steps by a value .* \(metrics\)"),
        (sgd, 3, "the scheduler is of type int, but"),
        (sgd, lambda optimizer: None, "the scheduler factory returned a NoneType"),
    ]
    for optimizer, scheduler, message in given:
        with pytest.raises(InputError, match=message):
            pipeline.train(batches, optimizer, scheduler)
    for max_norm in (-1.0, torch.nan, "1"):
        with pytest.raises(InputError, match="but it is a number, 0 or more"):
            pipeline.train(batches, sgd, max_norm=max_norm)  # type: ignore[call-overload]
    with pytest.raises(InputError, match="has no function that makes optimizers"):
        pipeline.train(batches)  # type: ignore[call-overload]


def test_hooks_are_found_between_minibatches_too() -> None:
    pipeline = chain_of("pipedream")
    run = pipeline.train(chain_batches(), sgd)
    next(run)
    next(pipeline.parameters()).register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match="weight has a hook on its gradient"):
        next(run)


def test_a_run_goes_on_whatever_the_mode_around_it() -> None:
    """An evaluation drains it, and is often under inference_mode, which forbids backwards."""
    batches = chain_batches(6)
    wanted, pipeline = chain_of("pipedream"), chain_of("pipedream")
    list(wanted.train(batches, sgd))
    run = pipeline.train(batches, sgd)
    next(run)
    with torch.inference_mode():
        pipeline.drain()
    with torch.no_grad():
        list(run)
    assert_same(state_of(pipeline), state_of(wanted))


class Scaled(nn.Module):
    """Outputs times a trained number, and their distance; with a target it is a loss."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner or nn.Identity()
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, values: Tensor, target: Tensor | None = None) -> Tensor:
        scaled = self.inner(values) * self.scale
        return scaled if target is None else (scaled - target).square().mean()


@pytest.mark.parametrize("schedule", RULES)
def test_what_a_loss_trains_is_trained_as_in_the_model(schedule: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)]
    model = nn.Sequential(*layers).double()
    data = [(torch.randn(8, 4).double(), torch.randn(8, 3).double()) for _ in range(8)]
    scales = []
    for net, loss in (
        (copy.deepcopy(model), Scaled()),
        (Scaled(copy.deepcopy(model)), lambda output, wanted: (output - wanted).square().mean()),
    ):
        target = Target.of({"model": net, "sample_input": data[0][0], "loss_fn": loss}, "net")
        pipeline = pipeline_of(target, 3, schedule, 4, sample_target=data[0][1])
        for _ in pipeline.train(data, lambda parameters: torch.optim.AdamW(parameters, lr=0.05)):
            pass
        named = dict(pipeline.named_parameters())
        scales.append(next(named[name].item() for name in named if name.endswith("scale")))
    assert scales[0] == scales[1] != 1.5
