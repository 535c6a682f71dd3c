"""Stages with encoded runs train as without them, and hold what is predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import pytest
import torch
from allocations import events, highest
from msgspec.structs import replace
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.profiler import record_function

from pipecompile.codegen.stages import emit
from pipecompile.cost_models.flops import Flops
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.encoded_run import EncodedRun
from pipecompile.graph.random_streams import StreamKey
from pipecompile.graph.recomputability import recompute_limits
from pipecompile.ir.encodings import CHUNK_ELEMENTS, Encoding
from pipecompile.ir.graph import CostGraph
from pipecompile.memory_model.live_ranges import LiveRanges
from pipecompile.memory_model.stage import footprint_of
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group
from pipecompile.profiling.profile import profile
from pipecompile.recompute.encoding_offers import encoding_offers
from pipecompile.runtime.stage import EagerStage
from pipecompile.runtime.stage_loss import StageLoss
from tests.codegen.test_footprint import expected, loss_of

Runs = dict[int, list[tuple[Sequence[str], tuple[Encoding, ...]]]]
TRIALS = 2  # on a busy machine the profiler loses events
WORKSPACE = 5 * CHUNK_ELEMENTS["cpu"]
SMALL = 1 << 14  # of sums that kernels make inside


class Block(nn.Module):
    """A part of a convolutional network."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution, self.norm = (
            nn.Conv2d(inputs, outputs, 3, padding=1),
            nn.BatchNorm2d(outputs),
        )

    def forward(self, image: Tensor) -> Tensor:
        return functional.max_pool2d(self.norm(self.convolution(image)).relu(), 2)


class Wide(nn.Module):
    """A part of a Transformer, with dropout twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, value: Tensor) -> Tensor:
        inner = functional.dropout(functional.gelu(self.wide(self.norm(value))), 0.1)
        return value + functional.dropout(self.narrow(inner), 0.2)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "wide": (
        lambda: nn.Sequential(nn.Linear(64, 64), Wide(), Wide(), nn.Linear(64, 8)),
        (64, 64, 64),
    ),
    "blocks": (
        lambda: nn.Sequential(
            Block(16, 32), Block(32, 32), Block(32, 32), nn.Flatten(), nn.Linear(2048, 8)
        ),
        (8, 16, 64, 64),
    ),
}


class Case:
    """A model, cut into two stages in the middle."""

    def __init__(self, name: str) -> None:
        make, size = MODELS[name]
        torch.manual_seed(0)
        self.model, self.sample = make(), Arguments((torch.randn(size),), {})
        self.capture = capture(self.model, self.sample)
        graph = profile(self.module(), self.sample.args, Flops(), loss=loss_of)
        limits = recompute_limits(self.module())
        nodes = tuple(
            replace(node, is_recomputable=node.name not in limits.never) for node in graph.nodes
        )
        self.graph: CostGraph = replace(graph, nodes=nodes, recomputed_together=limits.together)
        names = [node.name for node in self.graph.nodes]
        self.cut = names[: len(names) // 2], names[len(names) // 2 :]
        self.assignment = {name: index for index, names in enumerate(self.cut) for name in names}

    def module(self) -> fx.GraphModule:
        module = self.capture.instantiate(self.sample)
        apply_passes(module.graph, [Group()])
        return module

    def runs(self, *encodings: Encoding) -> Runs:
        """All that these encodings make smaller."""
        found = (
            encoding_offers(LiveRanges(self.graph), chain(*self.cut[:i]), names, encodings)
            for i, names in enumerate(self.cut)
        )
        return {
            i: [(offer.encoded.nodes, offer.encoded.encodings) for offer in each]
            for i, each in enumerate(found)
        }

    def predicted(self, runs: Runs) -> dict[str, tuple[int, int]]:
        """The most in each action, and what it leaves."""
        footprints = (
            footprint_of(LiveRanges(self.graph), chain(*self.cut[:index]), names, (), runs[index])
            for index, names in enumerate(self.cut)
        )
        return {
            f"{i} {what}": figures
            for i, each in enumerate(footprints)
            for what, figures in expected(each).items()
        }

    def train(self, runs: Runs) -> list[Tensor]:
        """Return gradients and buffers after two microbatches in turn; restore the model."""
        before = {name: value.clone() for name, value in self.model.state_dict().items()}
        stages = emit(self.module(), self.assignment, {}, runs)
        eager = [
            EagerStage(s.module, gradient_inputs=s.gradient_inputs, random=s.random) for s in stages
        ]
        eager[-1].loss = StageLoss(loss_of)
        self.model.zero_grad()
        sent: list[object] = []
        for microbatch in range(2):
            values: Sequence[Tensor] = self.sample.args
            saved = []
            for index, stage in enumerate(eager):
                with record_function(f"{index} forward {microbatch}"):
                    values, own = stage.forward(values, StreamKey(0, 0, microbatch))
                saved.append(own)
                sent.append(values)
                del own
            given: Sequence[Tensor | None] = ()
            for index, stage in reversed(list(enumerate(eager))):
                with record_function(f"{index} backward {microbatch}"):
                    given = stage.backward(saved.pop(), given, {})
                sent.append(given)
        found = [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        found += [buffer.clone() for buffer in self.model.buffers()]
        self.model.load_state_dict(before)
        return found


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("name", "encodings"),
    [
        ("wide", ("mask",)),
        ("blocks", ("relu", "pool")),
        ("wide", ("half",)),
        ("blocks", ("relu", "pool", "half")),
    ],
)
def test_a_stage_holds_what_is_predicted_and_trains_the_same(
    name: str, encodings: tuple[Encoding, ...]
) -> None:
    case = Case(name)
    runs, plain = case.runs(*encodings), case.train({})
    assert all(runs.values())
    predicted = case.predicted(runs)
    for _ in range(TRIALS):
        with events() as found:
            got = case.train(runs)
        measured = {label: (highest(found[label]), sum(found[label])) for label in predicted}
        wrong = {label: (predicted[label], measured[label]) for label in predicted}
        wrong = {label: pair for label, pair in wrong.items() if not is_near(label, *pair)}
        if not wrong:
            break
    assert not wrong
    if "half" not in encodings:
        assert all(map(torch.equal, got, plain))
    without = case.predicted({0: [], 1: []})
    for stage in (0, 1):
        assert predicted[f"{stage} forward 0"][1] < without[f"{stage} forward 0"][1]


def is_near(label: str, predicted: tuple[int, int], measured: tuple[int, int]) -> bool:
    """What is left must be exact, and so must the peak of a backward.

    In a forward, workspace is predicted besides all that a node makes. That of a batch norm, which
    only its backward takes, is predicted there too.
    """
    more = SMALL + (max(WORKSPACE, predicted[0] // 16) if "forward" in label else 0)
    return -SMALL <= predicted[0] - measured[0] <= more and abs(predicted[1] - measured[1]) <= SMALL


def test_all_nodes_in_one_run_and_none_of_its_inputs_or_parameters_is_moved() -> None:
    case = Case("blocks")
    order = [name for name in case.cut[1] if name != "output"]
    emitted = emit(case.module(), case.assignment, {}, {1: [(order, ("relu", "pool", "offload"))]})
    (call,) = [
        node for node in emitted[1].module.graph.nodes if isinstance(node.target, EncodedRun)
    ]
    runs: Runs = {0: [], 1: [(order, ("relu", "pool", "offload"))]}
    assert all(map(torch.equal, case.train(runs), case.train({})))
    assert call.target.exempt  # the tensor that comes in, and parameters read by themselves
    kept = footprint_of(
        LiveRanges(case.graph), case.cut[0], case.cut[1], (), runs[1]
    ).activations.expected
    state = sum(value.nbytes for value in case.model.state_dict().values())
    assert (
        0
        < kept
        < state
        + footprint_of(LiveRanges(case.graph), case.cut[0], case.cut[1]).activations.expected
    )


def test_runs_that_cannot_be_are_refused() -> None:
    case = Case("blocks")
    names = case.cut[1]
    with pytest.raises(
        InputError,
        match=rf"{names[1]} of stage 1 encodes its saved tensors twice, or in a region too",
    ):
        emit(case.module(), case.assignment, {1: [names[1:3]]}, {1: [(names[:2], ("relu",))]})
    with pytest.raises(
        InputError, match=r"of stage 1, which encodes saved tensors, is no run of the stage's nodes"
    ):
        emit(case.module(), case.assignment, {}, {1: [((names[0], names[2]), ("relu",))]})
    with pytest.raises(InputError, match=r"may not hold output: it computes nothing"):
        emit(case.module(), case.assignment, {}, {1: [(names[-1:], ("mask",))]})
