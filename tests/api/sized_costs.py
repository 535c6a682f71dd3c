"""A chain of nodes whose costs grow with the size of a microbatch, for joint searches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

from hypothesis import strategies as st

from pipecompile.ir.graph import CostGraph, Node, Parameter, Tensor
from pipecompile.ir.plan import Options, Plan, Provenance
from pipecompile.planner.target_costs import Source

__all__ = ["ChainNode", "SizedChain", "chains", "contiguous_cuts"]


@dataclass(frozen=True)
class ChainNode:
    """Times in ns: what a kernel takes at least, and more for each sample in each direction.

    `bytes` of a sample are its output, which the next node saves.
    """

    launch_ns: int = 0
    forward_ns: int = 10
    input_ns: int = 10
    weight_ns: int = 10
    parameter_bytes: int = 0
    bytes: int = 8


@dataclass(frozen=True)
class SizedChain:
    """The costs of a chain for a minibatch of `samples`, cut into any number of microbatches."""

    nodes: tuple[ChainNode, ...]
    samples: int

    def check(self, plan: Plan) -> None:
        """Any plan is of this chain."""

    def source(self, options: Options) -> Source:
        """Nothing but a name."""
        return Source("chain", Provenance(verified=False), ())

    def graph(self, options: Options) -> CostGraph:
        """Return the chain for one microbatch."""
        size = self.samples // options.microbatches
        names = [f"n{index}" for index in range(len(self.nodes))]
        return CostGraph(
            nodes=tuple(_node(*pair, size) for pair in zip(names, self.nodes, strict=True)),
            tensors=tuple(
                Tensor(
                    producer=one,
                    consumers=(other,),
                    bytes=each.bytes * size,
                    gradient_bytes=each.bytes * size,
                    storage=index,
                )
                for index, ((one, other), each) in enumerate(
                    zip(pairwise(names), self.nodes, strict=False)
                )
            ),
            storages=tuple(each.bytes * size for each in self.nodes),
            contents=(None,) * len(self.nodes),
            parameters=tuple(
                Parameter(name=f"{name}.weight", bytes=each.parameter_bytes, trainable=True)
                for name, each in zip(names, self.nodes, strict=True)
            ),
        )


def _node(name: str, each: ChainNode, size: int) -> Node:
    inner, weight = (each.launch_ns + ns * size for ns in (each.input_ns, each.weight_ns))
    index = int(name[1:])
    return Node(
        name=name,
        forward_ns=each.launch_ns + each.forward_ns * size,
        backward_ns=inner + weight,
        backward_input_ns=inner,
        backward_weight_ns=weight,
        parameter_bytes=0,
        saved_bytes=0,
        group=None,
        saved=(index - 1,) if index else (),
        forward_peak_bytes=each.bytes * size,
        parameters=(f"{name}.weight",),
    )


def contiguous_cuts(nodes: int, k: int) -> list[dict[str, int]]:
    """Return all cuts of the chain into `k` stages of one node or more."""
    cuts = []
    for ends in combinations(range(1, nodes), k - 1):
        stages = [sum(index >= end for end in ends) for index in range(nodes)]
        cuts.append({f"n{index}": stage for index, stage in enumerate(stages)})
    return cuts


@st.composite
def chains(draw: st.DrawFn, samples: int) -> SizedChain:
    """Chains of two to six nodes."""
    times = st.integers(0, 20)
    nodes = st.builds(
        ChainNode,
        launch_ns=st.integers(0, 5),
        forward_ns=times,
        input_ns=times,
        weight_ns=times,
        parameter_bytes=st.sampled_from([0, 1000, 100_000]),
        bytes=st.sampled_from([1, 100, 1000]),
    )
    return SizedChain(tuple(draw(st.lists(nodes, min_size=2, max_size=6))), samples)
