"""Plans for inference: their cuts against all cuts, their memory, what they refuse and run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from pipecompile import pipecompile
from pipecompile.api.choices import requested_options
from pipecompile.api.layouts import export_of
from pipecompile.api.soundness import findings
from pipecompile.api.verification import verify
from pipecompile.errors import InfeasibleError, InputError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.ir.graph import CostGraph, Node, Parameter
from pipecompile.ir.graph import Tensor as Edge
from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Plan, Provenance
from pipecompile.memory_model.kv_cache import rank_caches, tokens_that_fit
from pipecompile.planner.draft import draft
from pipecompile.report.inference import beat_ns, latency_ns

Times = Sequence[int]
SLOW = Links.of(Link(bandwidth_bytes_per_s=10**9, latency_ns=3))


def _chain(times: Times, sizes: Sequence[int], *, backward: int = 7, token: int = 48) -> CostGraph:
    """Nodes in a row, with forwards of these times and outputs of these sizes; every second one is
    an attention.
    """
    names = [f"n{index}" for index in range(len(times))]
    return CostGraph(
        allocator="cpu",
        nodes=tuple(
            Node(
                name=name,
                forward_ns=time,
                backward_ns=backward * index,
                parameter_bytes=1000,
                saved_bytes=4096,
                group=None,
                saved=(index,),
                parameters=(f"{name}.weight",),
                kv_token_bytes=token * (index % 2),
            )
            for index, (name, time) in enumerate(zip(names, times, strict=True))
        ),
        tensors=tuple(
            Edge(producer=a, consumers=(b,), bytes=size, gradient_bytes=size, storage=index)
            for index, ((a, b), size) in enumerate(zip(pairwise(names), sizes, strict=False))
        ),
        storages=(4096,) * len(times),
        parameters=tuple(
            Parameter(name=f"{name}.weight", bytes=1000, trainable=True) for name in names
        ),
    )


def _plan(graph: CostGraph, links: Links = FREE, **choices: Any) -> Plan:
    return draft(
        graph,
        requested_options(**{"costs": "flops", "objective": "throughput", **choices}),
        graph_digest="0" * 64,
        capture=Provenance(verified=True),
        microbatch_shapes=[],
        links=links,
    )


def _pinned(graph: CostGraph, starts: Sequence[int], **choices: Any) -> Plan:
    """Return the plan whose stages begin at these nodes."""
    pins = {
        node.name: sum(index >= start for start in starts) for index, node in enumerate(graph.nodes)
    }
    return _plan(graph, k=len(starts) + 1, pin=pins, **choices)


def _cuts(count: int, k: int) -> Iterator[tuple[int, ...]]:
    return combinations(range(1, count), k - 1)


TIMES = st.lists(st.integers(1, 30), min_size=4, max_size=7)
SIZES = st.lists(st.sampled_from([0, 1, 5, 40]), min_size=6, max_size=6)


@settings(max_examples=25)
@given(TIMES, SIZES, st.integers(1, 4), st.sampled_from([FREE, SLOW]))
def test_no_cut_has_less_latency_or_a_lighter_heaviest_forward(
    times: Times, sizes: Sequence[int], k: int, links: Links
) -> None:
    transfer = [links.transfer_ns(0, 1, size) for size in sizes]
    latencies, heaviest = [], []
    for starts in _cuts(len(times), k):
        ends = [0, *starts, len(times)]
        sent = [0, *(transfer[start - 1] for start in starts), 0]
        loads = [sum(times[a:b]) for a, b in pairwise(ends)]
        latencies.append(sum(times) + sum(sent))
        # In a full pipeline a rank computes one microbatch while others are sent.
        heaviest.append(max(max(load, sum(sent[i : i + 2])) for i, load in enumerate(loads)))
    graph = _chain(times, sizes)
    for objective, expected in (("latency", min(latencies)), ("throughput", min(heaviest))):
        search = _plan(graph, links, k=k, objective=objective).search
        assert (search.objective, search.value, search.bound) == (objective, expected, expected)


@settings(max_examples=25)
@given(TIMES, SIZES, st.integers(1, 4), st.integers(1, 5))
def test_the_simulated_step_is_the_latency_and_a_beat_for_each_further_microbatch(
    times: Times, sizes: Sequence[int], k: int, microbatches: int
) -> None:
    for links in (FREE, SLOW):
        plan = _plan(_chain(times, sizes), links, k=k, microbatches=microbatches)
        assert findings(plan) == []
        assert plan.search.values["latency_ns"] == latency_ns(plan)
        assert plan.search.value == beat_ns(plan)
        # The simulator lets any number of messages travel at a time: there ranks set the beat.
        beat = max(plan.prediction.loads_ns)
        assert plan.prediction.step_ns == latency_ns(plan) + (microbatches - 1) * beat


@settings(max_examples=25)
@given(TIMES, SIZES, st.integers(0, 20))
def test_backwards_change_nothing(times: Times, sizes: Sequence[int], backward: int) -> None:
    plans = [_plan(_chain(times, sizes, backward=each), k=3) for each in (0, backward)]
    assert plans[0] == plans[1]
    for memory in plans[0].prediction.memory:
        assert not memory.gradients.bound and not memory.optimizer.bound


@settings(max_examples=10)
@given(TIMES, SIZES, st.sampled_from([50, 120, 300]), st.integers(0, 6))
def test_the_best_cut_within_memory_has_room_for_the_cache(
    times: Times, sizes: Sequence[int], tokens: int, step: int
) -> None:
    graph, k = _chain(times, sizes), 2
    free = [_pinned(graph, starts, kv_tokens=tokens) for starts in _cuts(len(times), k)]
    needs = [max(rank.total.bound for rank in plan.prediction.memory) for plan in free]
    cap = sorted(needs)[min(step, len(needs) - 1)]
    fitting = [plan.search.value for plan, need in zip(free, needs, strict=True) if need <= cap]
    assert _plan(graph, k=k, kv_tokens=tokens, memory=cap).search.value == min(fitting)
    with pytest.raises(InfeasibleError):
        _plan(graph, k=k, kv_tokens=tokens, memory=min(needs) - 1)


@settings(max_examples=15)
@given(TIMES, SIZES, st.integers(70_000, 120_000), st.sampled_from([48, 64, 100]))
def test_one_token_more_than_fit_does_not(
    times: Times, sizes: Sequence[int], cap: int, token: int
) -> None:
    graph, starts = _chain(times, sizes, token=token), (2,)
    try:
        plan = _pinned(graph, starts, memory=cap)
    except InfeasibleError:
        return
    tokens = tokens_that_fit(plan)
    assert tokens is not None
    assert tokens == min(cache.tokens or 0 for cache in rank_caches(plan) if cache.token_bytes)
    if tokens:
        reserved = _pinned(graph, starts, memory=cap, kv_tokens=tokens)
        assert tokens_that_fit(reserved) == tokens
    with pytest.raises(InfeasibleError):
        _pinned(graph, starts, memory=cap, kv_tokens=tokens + 1)


def test_a_rank_without_attention_does_not_decide() -> None:
    plan = _pinned(_chain([9, 9, 9, 9], [1] * 3), (1,), memory="1MiB")
    first, second = rank_caches(plan)
    assert (first.token_bytes, first.tokens, second.token_bytes) == ((), None, (48, 48))
    assert tokens_that_fit(plan) == second.tokens
    assert tokens_that_fit(_plan(_chain([9, 9], [1]), k=2)) is None


def test_the_cache_of_latent_attention_is_given_by_hand() -> None:
    graph = _chain([9] * 4, [1] * 3)
    plan = _plan(graph, k=2, kv_token_bytes=10, kv_tokens=64)
    assert [stage.kv_token_bytes for stage in plan.stages] == [(10,), (10,)]
    assert [rank.kv_cache.expected for rank in plan.prediction.memory] == [640, 640]


def test_a_cache_that_is_unknown_is_not_reserved() -> None:
    with pytest.raises(InputError, match=r"KV cache of this model is unknown.*subtract the cache"):
        _plan(_chain([9] * 4, [1] * 3, token=0), k=2, kv_tokens=64)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"objective": "latency", "schedule": "1f1b"}, "'latency' is of inference, but schedule"),
        ({"kv_tokens": 5}, "kv_tokens is of inference, but schedule '1f1b' trains"),
        ({"objective": "throughput", "recompute": "auto"}, "recompute is of training"),
        ({"objective": "throughput", "optimizer": "adam"}, "optimizer is of training"),
        ({"objective": "throughput", "shard": "gradients", "replicas": 2}, "shard is of training"),
        ({"objective": "latency", "kv_tokens": 0}, "kv_tokens=0, but a KV cache has at least one"),
    ],
)
def test_options_that_do_not_go_with_inference(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        requested_options(k=2, costs="flops", **choices)


def test_schedule_and_objective_imply_each_other_and_a_device_its_memory() -> None:
    options = requested_options(k=2, costs="roofline:h100", objective="latency")
    assert options.schedule == "forward-only" and options.memory_bytes is not None
    options = requested_options(k=2, costs="flops", schedule="forward-only")
    assert (options.objective, options.memory_bytes) == ("throughput", None)
    training = requested_options(k=2, costs="roofline:h100")
    assert (training.schedule, training.objective) == ("1f1b", "variance")
    assert training.memory_bytes is None


# -- with a model


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1))
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).unbind(2)
        heads = [part.transpose(1, 2) for part in (q, k, v)]
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        result: Tensor = x + self.down(self.mlp(x))
        return result


class Decoder(nn.Module):
    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def _decoder() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Decoder(), torch.randint(0, 32, (4, 6))


def test_counts_of_layers_are_cut_run_and_exported() -> None:
    model, tokens = _decoder()
    pipeline = pipecompile(
        model, tokens, layout="1,3", objective="throughput", costs="flops", microbatches=2
    )
    plan = pipeline.plan
    assert [stage.kv_token_bytes for stage in plan.stages] == [(128,), (128,) * 3]
    assert export_of(plan, "vllm").text.strip().endswith("1,3")
    whole = pipeline.evaluate(tokens)
    model.eval()
    assert torch.equal(whole, torch.cat([model(tokens[:2]), model(tokens[2:])]))
    with pytest.raises(InputError, match="forward-only, which trains nothing; evaluate"):
        pipeline.step(tokens)


def test_verify_compares_the_outputs_of_each_microbatch() -> None:
    model, tokens = _decoder()
    target = Target(model, arguments_of(model, tokens))
    plan, (comparison,) = verify(target, k=2, microbatches=2, objective="latency")
    assert plan.options.is_inference and comparison.losses is None
    assert [difference.kind for difference in comparison.differences] == ["output"] * 2
    assert comparison.passed and model.training
