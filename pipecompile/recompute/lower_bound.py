"""A lower bound on the time of any regions that fit; it needs no search."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from pipecompile.memory_model.recompute_problem import RecomputeProblem, StoredTensor

__all__ = ["least_ns"]


def least_ns(problem: RecomputeProblem, in_flight: int, available: int) -> int | None:
    """Return a time in ns that no fitting regions take less than; None if no regions can fit.

    Regions fit if `in_flight` microbatches take at most `available` bytes. Each of them keeps every
    saved tensor that is not recomputed, so at least

        missing = saved bytes − available / in_flight

    bytes per microbatch must be freed. To free a tensor its producer runs once more, which takes
    producer's ns / producer's saved bytes for each byte. Freeing the cheapest bytes first, parts of
    a producer included, is the fractional knapsack: no real choice frees as much in less time.

    Whatever is recomputed, a node's backward needs what that node saves, and its gradients.
    """
    # However much is recomputed, the other microbatches in flight still hold what they sent.
    if _backward_bytes(problem) + (in_flight - 1) * problem.sent_bytes > available:
        return None
    # Two in flight within 20 bytes, 14 saved: 4 must be freed. Producers
    # of 10 bytes in 20 ns and of 4 in 12 ns cost 2 and 3 ns a byte, so
    # the bound is 8 ns; a real choice runs the first one, 20 ns.
    saved_bytes = sum(t.bytes for t in problem.tensors if t.savers and not t.is_sent)
    missing = problem.sent_bytes + saved_bytes - max(0, available) // in_flight
    spent = Fraction(0)
    for ns_per_byte, size in sorted(_rates(problem)):
        freed = max(0, min(missing, size))
        spent += ns_per_byte * freed
        missing -= freed
    return None if missing > 0 else ceil(spent)


def _backward_bytes(problem: RecomputeProblem) -> int:
    """Return what the largest backward of a single node takes, with what is sent."""
    needed = list(problem.backward_peak)
    for tensor in problem.tensors:
        if not tensor.is_sent:
            for position in tensor.savers:
                needed[position] += tensor.bytes
    return problem.sent_bytes + max(needed, default=0)


def _rates(problem: RecomputeProblem) -> list[tuple[Fraction, int]]:
    """Return for each producer the ns per byte, and the bytes, that may be freed."""
    bytes_by_producer: dict[int, int] = {}
    free_of_charge = 0
    for tensor in problem.tensors:
        is_freeable = tensor.savers and not tensor.is_sent and tensor.producer >= 0
        # What enters the stage has no producer here: to recompute does not bring it back.
        if not is_freeable or tensor.producer in problem.excluded:
            continue
        if _is_saved_before_kernels(problem, tensor):
            free_of_charge += tensor.bytes
        else:
            # One run of a producer brings back all of its tensors, so they share its time.
            known = bytes_by_producer.get(tensor.producer, 0)
            bytes_by_producer[tensor.producer] = known + tensor.bytes
    rates = [(Fraction(0), free_of_charge)]
    for producer, size in bytes_by_producer.items():
        if size:
            rates.append((Fraction(problem.forward_ns[producer], size), size))
    return rates


def _is_saved_before_kernels(problem: RecomputeProblem, tensor: StoredTensor) -> bool:
    """Return whether only the producer saves it, before its kernels run, which need not rerun."""
    # PyTorch ends a recompute with the last saved tensor: see `RegionSearch._recomputed_until`.
    is_early = problem.saves_at[tensor.producer] == "before"
    return is_early and set(tensor.savers) == {tensor.producer}
