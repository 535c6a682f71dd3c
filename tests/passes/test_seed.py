from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn

from pipecompile.codegen.stages import emit
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.graph.random_streams import StreamKey, reseed, use_stream
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.seed import Seed

NOW = StreamKey(seed=1, step=2, microbatch=3)
X = torch.randn(4, 32)


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(4))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + torch.rand_like(x)


def graph(model: nn.Module) -> fx.GraphModule:
    call = arguments_of(model, X)
    return capture(model, call).instantiate(call)


def unsplit(model: nn.Module) -> fx.GraphModule:
    module = graph(model)
    apply_passes(module.graph, [Seed()])
    module.recompile()
    return module


def chained(model: nn.Module, cuts: Sequence[int], key: StreamKey = NOW) -> Tensor:
    """Return the result of the stages whose first nodes are at these positions."""
    module = graph(model)
    nodes = [node for node in module.graph.nodes if node.op != "get_attr"]
    stages = emit(
        module, {node.name: sum(index >= cut for cut in cuts) for index, node in enumerate(nodes)}
    )
    values: Sequence[Tensor] = [X]
    for stage in stages:
        with use_stream(key):
            values = stage.module(*values)
    return values[0]


@pytest.fixture
def model() -> Random:
    torch.manual_seed(0)
    return Random()


@pytest.mark.parametrize("cuts", [[1], [3], [2, 4, 6], [1, 2, 3, 4, 5, 6, 7]])
def test_random_numbers_do_not_depend_on_the_cut(model: Random, cuts: list[int]) -> None:
    with use_stream(NOW):
        (expected,) = unsplit(model)(X)
    assert torch.equal(chained(model, cuts), expected)


@pytest.mark.parametrize("other", [StreamKey(0, 2, 3), StreamKey(1, 0, 3), StreamKey(1, 2, 0)])
def test_seed_step_and_microbatch_each_decide(model: Random, other: StreamKey) -> None:
    assert not torch.equal(chained(model, [3]), chained(model, [3], other))
    assert torch.equal(chained(model, [3], other), chained(model, [4], other))


def test_nodes_draw_from_streams_of_their_own(model: Random) -> None:
    ones = torch.ones(4, 32)
    with use_stream(NOW):
        reseed("layers_0_1")
        first = nn.functional.dropout(ones)
        reseed("layers_1_1")
        second = nn.functional.dropout(ones)
        reseed("layers_0_1")
        again = nn.functional.dropout(ones)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_draws_outside_do_not_matter(model: Random) -> None:
    first = chained(model, [3])
    torch.rand(100)
    assert torch.equal(chained(model, [3]), first)


def test_the_generator_is_restored(model: Random) -> None:
    before = torch.get_rng_state()
    chained(model, [3])
    assert torch.equal(torch.get_rng_state(), before)


def test_the_generator_is_restored_after_a_failure() -> None:
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError), use_stream(NOW):
        reseed("node") or torch.dropout(X, 2.0, True)
    assert torch.equal(torch.get_rng_state(), before)


def test_only_random_nodes_are_seeded(model: Random) -> None:
    seeded = [node.next.name for node in unsplit(model).graph.nodes if node.target is reseed]
    assert seeded == ["layers_0_1", "layers_1_1", "layers_2_1", "layers_3_1", "rand_like"]
    still = unsplit(copy.deepcopy(model).eval())
    assert [node.next.name for node in still.graph.nodes if node.target is reseed] == ["rand_like"]


def test_dropout_of_zero_is_not_random() -> None:
    seeded = unsplit(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.0)))
    assert not [node for node in seeded.graph.nodes if node.target is reseed]


def test_a_seeded_graph_outside_a_stream_is_a_defect(model: Random) -> None:
    with pytest.raises(AssertionError, match="inside `use_stream`"):
        unsplit(model)(X)
