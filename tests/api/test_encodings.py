"""Stages that save in other forms: where they are chosen, and steps that are those without, under
every schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional
from zoo import same

from pipecompile import InfeasibleError, InputError
from pipecompile.api.compilation import pipecompile
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.api.soundness import findings
from pipecompile.api.verification import verify
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured, capture_target
from pipecompile.ir.encodings import Encoding
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Plan
from pipecompile.ir.stage import EncodedNodes, Stage
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.planner.draft import draft
from pipecompile.planner.recompute import recompute_planner
from pipecompile.planner.scheduled_stages import predicted
from pipecompile.recompute.encoding_offers import encoding_offers
from pipecompile.recompute.stages import stages_of

SCHEDULES = (
    "gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1", "zb-h2",
    "zb-v", "v-half", "v-min", "dualpipe-v",
)  # fmt: skip


class Block(nn.Module):
    """Batch normalisation, ReLU that nothing but pooling reads, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, image: Tensor) -> Tensor:
        image = self.norm(self.convolution(image))
        return image + functional.dropout(functional.max_pool2d(image.relu(), 3, 1, 1), 0.3)


def target() -> Target:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Flatten(), nn.Linear(1024, 3))
    images = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    return Target(model, Arguments((images,), {}), lambda output, _: output.square().mean(), None)


@cache
def costed() -> tuple[Captured, CostGraph]:
    """The model, captured and costed once for all plans."""
    subject = target()
    captured = capture_target(
        subject, options_for(subject, k=2, microbatches=4, costs="flops"), verify=False
    )
    return captured, cost_graph(subject, "flops", 4, captured)


def planned(**options: Any) -> Plan:
    captured, graph = costed()
    return draft(
        graph,
        options_for(target(), **{"k": 2, "microbatches": 4, "costs": "flops", **options}),
        graph_digest=captured.digest,
        capture=captured.provenance,
        microbatch_shapes=[
            tensor.shape for tensor in captured.capture.inputs.flatten(captured.sample)
        ],
    )


def fitted(**options: Any) -> Plan:
    """The plan that fits as it is, its two stages made to fit `memory`: without the search for a
    cut.
    """
    plan, graph = planned(), costed()[1]
    chosen = options_for(target(), k=2, microbatches=4, costs="flops", **options)
    stages = stages_of(
        graph, plan.assignment, recompute_planner(graph, chosen, (0, 1), settled=True)
    )
    return restaged(replace(plan, options=chosen), stages)


def restaged(plan: Plan, stages: Sequence[Stage]) -> Plan:
    """With these stages, and what they take and hold."""
    prediction = predicted(
        stages, plan.schedule, plan.links, plan.options.caps(plan.ranks), plan.allocator
    )
    search = replace(plan.search, values={**plan.search.values, "step_ns": prediction.step_ns})
    return replace(plan, stages=tuple(stages), prediction=prediction, search=search)


def peaks(plan: Plan) -> list[int]:
    return [rank.total.bound for rank in plan.prediction.memory]


@cache
def reference() -> tuple[Plan, LiveRanges, tuple[list[Tensor], list[Tensor]]]:
    """A plan, the storages of its graph, and what it trains to."""
    plan = planned(k=4)
    return plan, LiveRanges(costed()[1]), trained(plan)


EDGES = ("placeholder", "output")


def formed(plan: Plan, forms: tuple[Encoding, ...]) -> Plan:
    """All stages save in all of these forms, as the options now say, whether they fit or not."""
    before, stages = list[str](), []
    plan = replace(plan, options=replace(plan.options, encodings=forms))
    for stage in plan.stages:
        offers = encoding_offers(reference()[1], before, stage.nodes, forms)
        found = [offer.encoded for offer in offers]
        if forms == ("offload",):  # on a CPU it frees nothing, and is not offered
            inner = tuple(
                name for name in stage.nodes if costed()[1].by_name[name].operator not in EDGES
            )
            found = [EncodedNodes(nodes=inner, encodings=forms, forward_ns=0, backward_ns=0)]
        stages.append(replace(stage, encoded_runs=tuple(found)))
        before += stage.nodes
    return restaged(plan, stages)


def trained(plan: Plan) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients and buffers after two steps."""
    subject = target()
    pipeline = pipecompile(
        subject.model, subject.call, loss_fn=subject.loss_fn, plan=plan, self_check=False
    )
    for _ in range(2):
        pipeline.step(subject.call)
    gradients = [p.grad for p in subject.model.parameters() if p.grad is not None]
    return gradients, [buffer.clone() for buffer in subject.model.buffers()]


@pytest.mark.one_case_in(8)
@pytest.mark.parametrize("forms", [("mask", "relu", "pool"), ("offload",)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_is_the_same_under_every_schedule(
    schedule: str, forms: tuple[Encoding, ...]
) -> None:
    plain, _, wanted = reference()
    changed = formed(planned(k=4, schedule=schedule, pin=plain.assignment), forms)
    assert {
        encoding for s in changed.stages for run in s.encoded_runs for encoding in run.encodings
    } == set(forms)
    got = trained(changed)
    assert len(got[0]) == len(list(target().model.parameters()))
    assert same(got, wanted)


def test_a_stage_that_does_not_fit_saves_otherwise_and_trains_the_same() -> None:
    fitting = planned()
    cap = int(0.85 * max(peaks(fitting)))
    plan = planned(memory=cap, pin=fitting.assignment, encodings=("relu", "pool", "mask"))
    assert max(peaks(plan)) <= cap
    assert plan.options.encodings == ("mask", "relu", "pool") and not plan.regions
    assert {len(stage.encoded_runs) > 0 for stage in plan.stages} == {
        True,
        False,
    }  # where it fits nothing is done
    assert not plan.search.proven
    assert same(trained(plan), trained(fitting))
    more = plan.prediction.step_ns - fitting.prediction.step_ns
    assert 0 < more <= 4 * sum(run.ns for stage in plan.stages for run in stage.encoded_runs) * 2


def test_what_takes_less_time_is_taken_and_nothing_where_all_fits() -> None:
    every = ("mask", "relu", "pool")
    for share in (0.95, 0.8, 0.7):
        cap = int(share * max(peaks(planned())))
        recomputed, both = (
            fitted(memory=cap, recompute="auto", encodings=encodings) for encodings in ((), every)
        )
        assert sum(s.extra_ns for s in both.stages) <= sum(s.extra_ns for s in recomputed.stages)
        assert max(peaks(both)) <= cap
        named = [
            set(chain(*s.regions)) & {n for run in s.encoded_runs for n in run.nodes}
            for s in both.stages
        ]
        assert not any(named)
        assert not any(
            s.recompute_bound_ns for s in both.stages
        )  # of all mixtures nothing is proven
    assert planned(memory="1GiB", recompute="auto", encodings=every).encoded_runs == {}
    assert planned(encodings=every).encoded_runs == {}


def test_half_precision_is_for_what_nothing_exact_lets_fit_and_is_said_not_to_be_exact() -> None:
    fitting = planned()
    exact = fitted(
        memory=int(0.85 * max(peaks(fitting))), encodings=("mask", "relu", "pool", "half")
    )
    assert "half" not in {
        encoding for s in exact.stages for run in s.encoded_runs for encoding in run.encodings
    }
    with pytest.raises(InfeasibleError):
        fitted(memory=int(0.66 * max(peaks(fitting))), encodings=("mask", "relu", "pool"))
    halved = fitted(
        memory=int(0.66 * max(peaks(fitting))), encodings=("mask", "relu", "pool", "half")
    )
    assert "half" in {
        encoding for s in halved.stages for run in s.encoded_runs for encoding in run.encodings
    }


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(("share", "exact"), [(0.85, True), (0.7, False)])
def test_verify_says_whether_a_step_is_exact(share: float, exact: bool) -> None:
    cap = int(share * max(peaks(planned(k=1))))
    encodings = ("mask", "relu", "pool", *([] if exact else ["half"]))
    plan, comparisons = verify(
        target(),
        self_check=False,
        k=1,
        microbatches=4,
        costs="flops",
        memory=cap,
        encodings=encodings,
    )
    assert max(peaks(plan)) <= cap and plan.encoded_runs
    for comparison in comparisons:
        assert comparison.passed and (comparison.distance is None) == exact
        assert exact or 2**-12 < (comparison.distance or 0) < 2**-6
        kinds = {difference.kind for difference in comparison.differences if not difference.equal}
        assert kinds == (set() if exact else {"gradient"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"encodings": ("zip",)},
            "unknown encoding 'zip'; choose from mask, relu, pool, offload, half",
        ),
        ({"encodings": "mask"}, "encodings='mask' is not a list of names"),
        (
            {"encodings": ("mask",), "recompute": "block"},
            "encodings go with recompute none or auto, not with 'block'",
        ),
        (
            {"encodings": ("mask",), "k": 4, "schedule": "looped-bfs"},
            "encodings are chosen for ranks of one stage each",
        ),
        (
            {"encodings": ("mask",), "schedule": "zb-h1"},
            "encodings are not planned under schedule 'zb-h1'",
        ),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(**options)


NODES = ("0.convolution", "0.norm")
UNASKED: dict[str, tuple[dict[str, Any], str]] = {
    "a form that is not exact": (
        {
            "encoded_runs": (
                EncodedNodes(nodes=NODES, encodings=("half",), forward_ns=0, backward_ns=0),
            )
        },
        "encodes by 'half', which the options do not allow",
    ),
    "regions": (
        {"regions": (NODES,), "recompute": "regions"},
        "recomputes by 'regions', but recompute is 'none'",
    ),
    "regions of a stage without": (
        {"regions": (NODES,)},
        "recomputes by 'none', but has 1 regions",
    ),
    "a stage with regions without": (
        {"recompute": "regions"},
        "recomputes by 'regions', but recompute is 'none'",
    ),
    "a time for nothing": ({"recompute_ns": 1}, "recomputes nothing, yet takes 1 ns for it"),
    "a bound above the time": ({"recompute_bound_ns": 1}, "takes 0 ns more, but at least 1"),
}


@pytest.mark.parametrize("what", UNASKED)
def test_what_the_options_do_not_ask_for_is_found_out(what: str) -> None:
    plan, (changed, message) = planned(), UNASKED[what]
    assert findings(plan) == []
    edited = restaged(plan, (replace(plan.stages[0], **changed), plan.stages[1]))
    (finding,) = findings(edited)
    assert finding.message == f"stage 0 {message}: the file was edited; plan again"


def test_another_encoding_than_the_plan_has_is_found_out() -> None:
    plan = planned(recompute="stage")
    assert findings(plan) == []
    edited = replace(plan, options=replace(plan.options, recompute="block"))
    assert [finding.message.split(":")[0] for finding in findings(edited)] == [
        "stage 0 recomputes by 'stage', but recompute is 'block'"
    ]
