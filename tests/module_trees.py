"""Random models with a tree of modules, and problems of cutting them at its levels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec
from cuts import chain, node
from hypothesis import strategies as st

from pipecompile.errors import InfeasibleError
from pipecompile.ir.graph import CostGraph, Tensor
from pipecompile.ir.links import FREE, Links
from pipecompile.partition.memory_constraint import MemoryConstraint
from pipecompile.partition.problem import PartitionProblem
from pipecompile.partition.result import Partition
from pipecompile.partition.solver import solve

SECONDS = 1.0


@st.composite
def models(draw: st.DrawFn) -> CostGraph:
    """A forward through nested modules and lists; each operator reads a few earlier ones."""

    def forward(path: str, depth: int) -> Iterator[str]:
        """The module of each operator that a module's forward runs."""
        for step in draw(
            st.lists(st.sampled_from(["own", "leaf", "module", "list"]), min_size=1, max_size=3)
        ):
            inner = f"{path}.{step}".lstrip(".")
            if step == "own" or depth == 0:
                yield path
            elif step == "leaf":
                yield inner
            elif step == "module":
                yield from forward(inner, depth - 1)
            else:
                for place in range(draw(st.integers(1, 3))):
                    yield from forward(f"{inner}.{place}", depth - 1)

    paths = list(forward("", 3))[:14]
    nodes = tuple(
        msgspec.structs.replace(
            node(f"n{index}", draw(st.integers(0, 9)), held=draw(st.integers(0, 3))), module=path
        )
        for index, path in enumerate(paths)
    )
    read = [
        draw(st.sets(st.integers(max(0, i - 4), i - 1), max_size=2)) | {i - 1}
        for i in range(1, len(nodes))
    ]
    consumers = {
        i: tuple(f"n{j}" for j, sources in enumerate(read, 1) if i in sources)
        for i in range(len(nodes))
    }
    tensors = (
        Tensor(producer=f"n{i}", consumers=to, bytes=1, gradient_bytes=1)
        for i, to in consumers.items()
        if to
    )
    return CostGraph(nodes=nodes, tensors=tuple(tensors))


@st.composite
def level_problems(draw: st.DrawFn) -> PartitionProblem:
    """Problems with free links or not, with and without caps, one stage a rank or two."""
    graph, k = draw(models()), draw(st.integers(1, 4))
    placement = (0, 1) * (k // 2) if k % 2 == 0 and draw(st.booleans()) else tuple(range(k))
    cap = draw(st.none() | st.integers(3, 12))
    return PartitionProblem(
        graph,
        k,
        objective=draw(st.sampled_from(["variance", "max-load"])),
        links=draw(st.sampled_from([FREE, Links(bandwidth_bytes_per_s=10**9, latency_ns=0)])),
        placement=placement,
        memory=None
        if cap is None
        else MemoryConstraint.simple(graph, (cap,) * (max(placement) + 1), (1,) * k, 1),
    )


def solved_at(problem: PartitionProblem, granularity: str) -> Partition | None:
    try:
        return solve(replace(problem, granularity=granularity), seconds=SECONDS)
    except InfeasibleError:
        return None


def in_modules(*paths: str, times: dict[str, int] | None = None) -> CostGraph:
    """A chain of operators in these modules; each takes 1 ns, or what `times` has for its path."""
    graph = chain([(times or {}).get(path, 1) for path in paths])
    nodes = tuple(
        msgspec.structs.replace(n, module=path) for n, path in zip(graph.nodes, paths, strict=True)
    )
    return msgspec.structs.replace(graph, nodes=nodes)
