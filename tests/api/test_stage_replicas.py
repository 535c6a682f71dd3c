"""Plans whose stages have several ranks, in one process."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from pipecompile import InfeasibleError, InputError, Plan, pipecompile
from pipecompile.api.choices import requested_options
from pipecompile.api.soundness import findings
from pipecompile.ir.links import Links
from pipecompile.ir.serialization import decode, encode
from pipecompile.training.pipeline import Pipeline

WIDTH, ROWS = 64, 24
LINKS = Links(bandwidth_bytes_per_s=10**6, latency_ns=7)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(6)]
    return nn.Sequential(*blocks).double()


def pipeline_on(replicas: Any, model: nn.Module | None = None, **options: Any) -> Pipeline:
    batch = torch.ones(ROWS, WIDTH, dtype=torch.float64)
    return pipecompile(
        model or layers(),
        batch,
        stage_replicas=replicas,
        costs="flops",
        self_check=False,
        loss_fn=nn.functional.mse_loss,
        sample_target=batch,
        **{"microbatches": 6, **options},
    )


def test_one_process_takes_the_step_of_the_unsplit_model() -> None:
    model = layers()
    unsplit, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH, dtype=torch.float64)
    pipeline = pipeline_on("2,3,1", model)
    wanted = nn.functional.mse_loss(unsplit(x), x.roll(1))
    wanted.backward()
    loss = pipeline.step(x, x.roll(1))
    assert abs(loss - wanted).item() <= 1e-12
    by_name = dict(pipeline.named_parameters())
    for name, parameter in unsplit.named_parameters():
        own = by_name[name]
        assert own.grad is not None and parameter.grad is not None
        assert (own.grad - parameter.grad).abs().max() <= 1e-12


def test_the_cut_gives_more_work_to_stages_with_more_ranks() -> None:
    plan = pipeline_on("3,1").plan
    first, last = plan.stages
    assert first.forward_ns > 2 * last.forward_ns
    assert (plan.k, plan.ranks, plan.microbatches) == (2, 4, 6)
    loads = plan.prediction.loads_ns
    # What a rank takes for one of all microbatches: of six it has two.
    assert loads[:3] == ((first.forward_ns + first.backward_ns) * 2 // 6,) * 3
    assert loads[3] == last.forward_ns + last.backward_ns


def test_sums_are_around_the_ranks_of_a_stage_and_copies_are_held() -> None:
    plan = pipeline_on("3,1", links=LINKS).plan
    trained = sum(p.bytes for p in plan.parameters_of(0))
    exchange = plan.stages[0].replica_sum
    assert exchange is not None and plan.stages[1].replica_sum is None
    assert (exchange.messages, exchange.bytes) == (2 * 2, -(-trained // 3))
    whole = pipeline_on("1,1", links=LINKS).plan
    held = plan.prediction.memory[0].gradients
    assert plan.stages[0].footprint.gradient_copies.expected == trained  # one bucket
    assert held.expected == trained and whole.stages[0].footprint.gradient_copies.expected == 0
    assert plan.prediction.memory[0] == plan.prediction.memory[1]


def test_a_plan_says_what_it_has_and_is_read_back() -> None:
    plan = pipeline_on("2,1", links=LINKS).plan
    assert decode(encode(plan), Plan, origin="here") == plan
    assert plan.schedule.placement == (0, 2)
    assert findings(plan) == []
    edited = msgspec.structs.replace(plan.options, stage_replicas=(3, 1))
    with pytest.raises(ValueError, match=r"the options ask for stages on \[3, 1\] ranks"):
        msgspec.structs.replace(plan, options=edited)


def test_a_slow_link_to_one_rank_is_that_of_the_stage() -> None:
    def makespan(slow: tuple[int, int] | None) -> int:
        rows = [[0 if (a, b) != slow else 10**6 for b in range(3)] for a in range(3)]
        links = {
            "schema": "pipecompile/links/1",
            "bandwidth_bytes_per_s": None,
            "latency_ns": rows,
        }
        return pipeline_on("2,1", links=links).plan.prediction.step_ns

    free = makespan(None)
    # From rank 1 to rank 2: forwards wait for it, and the sum around ranks 0 and 1 does not.
    assert makespan((1, 2)) >= free + 10**6
    assert makespan((1, 0)) >= free + 2 * 10**6


def test_caps_are_those_of_all_ranks() -> None:
    plan = pipeline_on("2,1", memory="1GiB", recompute="auto").plan
    most = max(rank.total.bound for rank in plan.prediction.memory)
    assert most < 2**30
    tight = pipeline_on("2,1", memory=most, recompute="auto", microbatches=8).plan
    assert max(rank.total.bound for rank in tight.prediction.memory) <= most
    with pytest.raises(InfeasibleError):
        pipeline_on("2,1", memory=most // 4, recompute="auto")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage_replicas": "1,2"}, "the last stage has one rank"),
        ({"stage_replicas": "2,x"}, "is not the ranks of each stage; write 7,1"),
        ({"stage_replicas": [0, 1]}, "is not the ranks of each stage"),
        ({"stage_replicas": "2,1", "k": 3}, r"k=3, but stage_replicas=2,1 is k=2"),
        ({"stage_replicas": "2,1", "ranks": 2}, r"ranks=2, but stage_replicas=2,1 is ranks=3"),
        ({"stage_replicas": "2,1", "schedule": "search"}, "choose one of gpipe, 1f1b"),
        ({"stage_replicas": "2,1", "objective": "throughput"}, "choose one of gpipe, 1f1b"),
        ({"stage_replicas": "3,1", "microbatches": 2}, "use 3 or more"),
        ({"stage_replicas": "2,1", "replicas": 2}, "or whole pipelines have; leave one out"),
        ({"stage_replicas": "2,1", "batch_norm": "minibatch"}, "leave batch_norm out"),
        ({"stage_replicas": "2,1", "memory": "1GiB,1GiB,1GiB"}, "give one memory for all ranks"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        requested_options(**options)


def test_as_many_microbatches_as_ranks_unless_given() -> None:
    options = requested_options(stage_replicas=(2, 1))
    assert (options.k, options.microbatches, options.stage_replicas) == (2, 3, (2, 1))


@pytest.mark.parametrize("objective", ["step-time", "max-load"])
def test_no_bound_is_above_what_is_found(objective: str) -> None:
    """Loads of stages on several ranks are rounded up, which a step is not."""
    search = pipeline_on("2,1", objective=objective).plan.search
    assert search.bound <= search.value
    if objective == "max-load":
        assert search.proven
