"""A stage of a plan, and what it exchanges with others."""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from typing import Literal

from pipecompile.ir.encodings import Encoding
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["Boundary", "EncodedNodes", "ModuleRun", "ReplicaExchange", "Stage", "TiedSum"]


class Boundary(Value, frozen=True, kw_only=True):
    """A tensor of one microbatch as it crosses from one stage to the next."""

    name: str
    bytes: NonNegative
    gradient_bytes: NonNegative


class EncodedNodes(Value, frozen=True, kw_only=True):
    """A run of nodes of a stage whose saved tensors are encoded, and the encodings.

    The times are what that adds to the forward and to the backward of a microbatch.
    """

    nodes: tuple[str, ...]
    encodings: tuple[Encoding, ...]
    forward_ns: NonNegative
    backward_ns: NonNegative

    @property
    def ns(self) -> int:
        """The extra time of forward and backward."""
        return self.forward_ns + self.backward_ns


class ReplicaExchange(Value, frozen=True, kw_only=True):
    """What a stage exchanges with other replicas: `messages` one after another, all of `bytes`.

    n replicas in a ring send n - 1 messages of one n-th each to sum gradients, and as many again
    to bring the sums to all of them (Patarasuk and Yuan 2009) or to gather sharded parameters.
    """

    # The sum of 100 MB over 4 replicas is 2 · (4 − 1) = 6 messages of 25 MB: after three of them
    # each replica has a quarter of the sum, and after three more all of it.
    messages: Positive
    bytes: NonNegative


class TiedSum(Value, frozen=True, kw_only=True):
    """The sum of a tied parameter's gradients over the `ranks` that hold it, at the end of a step:
    `messages` one after another, all of `bytes`, around a ring as for replicas.
    """

    ranks: tuple[NonNegative, ...]
    messages: Positive
    bytes: NonNegative


class ModuleRun(Value, frozen=True, kw_only=True):
    """A run of nodes of a stage in one module: the place of the first one in the graph, how many
    they are, and what forward and backward of a microbatch take in all of them.

    `digests` say of each node what it does, so that `pipecompile check` finds those that changed;
    a plan that was not made from a model has none.
    """

    module: str
    place: NonNegative
    nodes: Positive
    ns: NonNegative
    digests: tuple[str, ...] = ()


class Stage(Value, frozen=True, kw_only=True, dict=True, rename={"blocks": "nodes"}):
    """One stage: what it runs, what that costs for one microbatch, what crosses its boundaries.

    `blocks` (in files: `nodes`) are the names of its nodes in the order of the forward, in runs
    that lie in one block of the model. `module_runs` say where each of them lies in the model, for
    `pipecompile export`; plans of older versions have none. `copies` are those of its nodes that an
    earlier stage runs too, which are in no run: it makes their values itself. `per_step_ns` is what
    it costs once a step: the division of its gradients, and entering and leaving the step.
    `replica_sum` is what it exchanges once a step with the same stage of other replicas,
    `backward_sum` with each backward that sums gradients, and `action_gather` before each action
    that gathers parameters. `tied_sums` are what its rank exchanges after it with others that hold
    the same parameters. `kv_token_bytes` is what each of its attentions adds to a KV cache for a
    token, as far as that is known.

    `recompute` says what it recomputes, in `recompute_ns`: everything, in an action of its own
    ("stage", or for all microbatches but a step's last one "except-last"), or `regions` of its
    nodes, as part of the backward. `encoded_runs` are runs of nodes outside of these whose saved
    tensors are encoded; what that takes is in no other time. Under `auto`, `recompute_bound_ns` is
    a lower bound: no choice of disjoint regions and encodings that lets the stage fit takes less
    time (0 if nothing is known). Under another policy it is `recompute_ns`.
    """

    blocks: tuple[tuple[str, ...], ...]
    modules: tuple[str, ...]
    module_runs: tuple[ModuleRun, ...] = ()
    copies: tuple[str, ...] = ()
    groups: tuple[str, ...]
    forward_ns: NonNegative
    backward_ns: NonNegative
    backward_input_ns: NonNegative | None
    backward_weight_ns: NonNegative | None
    recompute_ns: NonNegative
    recompute_bound_ns: NonNegative = 0
    per_step_ns: NonNegative = 0
    replica_sum: ReplicaExchange | None = None
    backward_sum: ReplicaExchange | None = None
    action_gather: ReplicaExchange | None = None
    tied_sums: tuple[TiedSum, ...] = ()
    kv_token_bytes: tuple[NonNegative, ...] = ()
    inputs: tuple[Boundary, ...]
    outputs: tuple[Boundary, ...]
    recompute: Literal["none", "stage", "except-last", "regions"]
    regions: tuple[tuple[str, ...], ...] = ()
    encoded_runs: tuple[EncodedNodes, ...] = ()
    footprint: Footprint

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The names of all its nodes, in the order of the forward."""
        return tuple(chain.from_iterable(self.blocks))

    @cached_property
    def own_nodes(self) -> tuple[str, ...]:
        """The names of its nodes that no earlier stage runs, in the order of the forward."""
        # Each node of the model is among these in one stage only: whoever counts nodes counts
        # these.
        return tuple(name for name in self.nodes if name not in self.copies)

    @property
    def extra_ns(self) -> int:
        """The time that recompute and encodings add to a microbatch."""
        # Both buy memory with time, and neither is in `forward_ns` or `backward_ns`.
        return self.recompute_ns + sum(run.ns for run in self.encoded_runs)

    @property
    def recomputes(self) -> bool:
        """Whether it recomputes its whole forward, in actions of its own."""
        return self.recompute in ("stage", "except-last")
