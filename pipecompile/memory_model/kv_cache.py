"""How many tokens of a KV cache fit on the ranks of a plan, beside all else that they hold."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from pipecompile.ir.plan import Plan
from pipecompile.memory_model.allocator import ALLOCATORS
from pipecompile.memory_model.rank import neighbour_ranks

__all__ = ["RankCache", "rank_caches", "tokens_that_fit"]


class RankCache(NamedTuple):
    """The KV cache of one rank: what each of its attentions adds for a token, in bytes, and how
    many tokens fit under the rank's cap; None without a cap, or without an attention.
    """

    token_bytes: tuple[int, ...]
    tokens: int | None


def rank_caches(plan: Plan) -> list[RankCache]:
    """Return the KV cache of each rank; tokens that the plan reserves are among those that fit."""
    caps = plan.options.caps(plan.ranks) or (None,) * plan.ranks
    caches = []
    for rank, cap in enumerate(caps):
        pairs = zip(plan.stages, plan.schedule.placement, strict=True)
        sizes = tuple(size for stage, at in pairs if at == rank for size in stage.kv_token_bytes)
        fits = None if cap is None or not sizes else _tokens_within(plan, rank, cap, sizes)
        caches.append(RankCache(sizes, fits))
    return caches


def tokens_that_fit(plan: Plan) -> int | None:
    """Return how many tokens fit on the tightest rank, which decides for all of them; None if that
    is not known.
    """
    fitting = [cache.tokens for cache in rank_caches(plan) if cache.tokens is not None]
    return min(fitting, default=None)


def _tokens_within(plan: Plan, rank: int, cap: int, token_bytes: tuple[int, ...]) -> int:
    """Return the most tokens with which a rank is within its cap, by the bound; each attention has
    a storage of its own.
    """
    memory, allocator = plan.prediction.memory[rank], ALLOCATORS[plan.allocator]
    peers = neighbour_ranks(plan.footprints(rank))
    persistent = memory.persistent.bound
    # What comes and goes has a bound within that of the plan.
    transient = allocator.most_transient(memory.total.bound, peers, persistent)

    def taken(tokens: int) -> int:
        cache = sum(allocator.rounded(tokens * size) for size in token_bytes)
        return allocator.padded(persistent - memory.kv_cache.bound + cache, transient, peers)

    # Ascending with the number of tokens, of which at most this many fit.
    candidates = range(cap // sum(token_bytes) + 1)
    return max(0, bisect_right(candidates, cap, key=taken) - 1)
