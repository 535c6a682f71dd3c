"""What reports say of plans for inference: what a load is, latency, and tokens in the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.plan import Plan
from pipecompile.ir.size import size_text
from pipecompile.memory_model.kv_cache import rank_caches, tokens_that_fit

__all__ = [
    "beat_ns",
    "cache_header",
    "cache_rows",
    "cache_text",
    "latency_ns",
    "latency_text",
    "load_text",
]

CACHE_UNKNOWN = "unknown: no scaled_dot_product_attention was found"


def load_text(plan: Plan) -> str:
    """Return what the load of a rank counts."""
    work = "forward" if plan.options.is_inference else "forward, backward and recompute"
    waits = any(stage.backward_sum or stage.action_gather for stage in plan.stages)
    sums = ", with what its actions sum and gather over replicas" if waits else ""
    return f"{work} of one microbatch{sums}"


def latency_ns(plan: Plan) -> int:
    """Return the time of one microbatch, alone, through all stages and the messages in between."""
    # Alone, so that nothing overlaps: it waits for each forward and for each message.
    return sum(stage.forward_ns for stage in plan.stages) + sum(ns for *_, ns in _boundaries(plan))


def beat_ns(plan: Plan) -> int:
    """Return how often a full pipeline is done with a microbatch: the longest that a rank computes
    for it, or is sent and sends.
    """
    # Loads of 5 and 4, and a message of 6 between: one is done every 6. Messages of a rank run
    # beside its compute, but one after the other.
    messages = [0] * plan.ranks
    for *ends, ns in _boundaries(plan):
        for rank in ends:
            messages[rank] += ns
    return max(*plan.prediction.loads_ns, *messages)


def _boundaries(plan: Plan) -> Iterator[tuple[int, int, int]]:
    """Yield the ranks on both sides of each boundary, and the time of the messages over it."""
    # zip ends with the pairs: no boundary is behind the last stage.
    pairs = pairwise(plan.schedule.placement)
    for stage, (here, there) in zip(plan.stages, pairs, strict=False):
        sizes = (tensor.bytes for tensor in stage.outputs)
        yield here, there, sum(plan.links.transfer_ns(here, there, size) for size in sizes)


def latency_text(plan: Plan) -> str:
    """Return how long a microbatch takes through all stages, and how often one is done."""
    times = latency_ns(plan), beat_ns(plan)
    texts = [time_with_unit(time_ns, plan.time_unit) for time_ns in times]
    return f"{texts[0]} for one microbatch; in a full pipeline one is done every {texts[1]}"


def cache_text(plan: Plan) -> str:
    """Return how many tokens fit into the KV cache, and which rank decides it."""
    caches, tokens = rank_caches(plan), tokens_that_fit(plan)
    if not any(cache.token_bytes for cache in caches):
        return CACHE_UNKNOWN
    if tokens is None:
        return "give a cap (--memory) to see how many tokens fit"
    ranks = [str(rank) for rank, cache in enumerate(caches) if cache.tokens == tokens]
    decides = f"rank {ranks[0]} decides" if len(ranks) == 1 else f"ranks {', '.join(ranks)} decide"
    reserved = plan.options.kv_tokens
    reservation = "" if reserved is None else f"; {reserved:,} are reserved"
    return f"{tokens:,} tokens fit, {decides}{reservation}"


def cache_header(plan: Plan) -> list[str]:
    """Return the names of the columns of `cache_rows`."""
    capped = plan.options.memory_bytes is not None
    return ["rank", "attentions", "a token", *["tokens that fit"] * capped]


def cache_rows(plan: Plan) -> Iterator[list[str]]:
    """Yield of each rank its attentions, what all of them add for a token, and the tokens that fit
    where there are caps; nothing if no attention is known.
    """
    caches = rank_caches(plan)
    if not any(cache.token_bytes for cache in caches):
        return
    for rank, cache in enumerate(caches):
        cells = [str(rank), str(len(cache.token_bytes)), size_text(sum(cache.token_bytes))]
        if plan.options.memory_bytes is not None:
            cells.append("" if cache.tokens is None else f"{cache.tokens:,}")
        yield cells
