"""Which nodes of a stage may be computed again in its backward, and how a region of them becomes one node.

So do runs of nodes whose saved tensors lie in another form; what limits regions limits them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pipecompile.errors import InputError
from pipecompile.graph.autograd_context import EnteredContext
from pipecompile.graph.encoded_run import EncodedRun
from pipecompile.graph.recomputability import (
    RecomputeLimits,
    is_module_read,
    is_written_buffer_read,
    recompute_limits,
    writing_modules,
    written_storages,
)
from pipecompile.graph.recomputed_region import RecomputedRegion, enter_context
from pipecompile.graph.saved_tensors import EncodedStorages
from pipecompile.graph.stages import origin_of
from pipecompile.graph.storages import storage_key
from pipecompile.ir.encodings import Policy
from pipecompile.passes.autograd_context import EnterContexts
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.data_dependence import GuardDataDependence
from pipecompile.passes.seed import Seed

__all__ = ["Regions", "EncodedRuns", "check_regions", "enclose", "fault_of", "stage_order"]

Regions = Mapping[int, Sequence[Sequence[str]]]
"""Stage → its regions, each the names of its nodes, in order. A region may lie within another."""
EncodedRuns = Mapping[int, Sequence[tuple[Sequence[str], tuple[Policy, ...]]]]
"""Stage → its runs of nodes that save by policies; they lie apart, and apart from regions."""


def stage_order(graph: fx.Graph, assignment: Mapping[str, int], stage: int) -> list[str]:
    """The nodes of a stage in its order, reads of parameters aside."""
    return [
        node.name
        for node in graph.nodes
        if node.op != "get_attr" and assignment[node.name] == stage
    ]


def check_regions(
    module: fx.GraphModule, assignment: Mapping[str, int], regions: Regions, savings: EncodedRuns
) -> None:
    """InputError names the nodes of the first region or run that is not possible under `assignment`."""
    limits = recompute_limits(module)
    for stage, runs in savings.items():
        order = stage_order(module.graph, assignment, stage)
        for names, _ in runs:
            if fault := fault_of(limits, order, names):
                raise InputError(
                    f"the run {_listed(names)} of stage {stage}, which saves by policies, {fault}"
                )
        every = Counter(
            name
            for names in (*(names for names, _ in runs), *regions.get(stage, ()))
            for name in set(names)
        )
        taken = {name for names, _ in runs for name in names}
        if shared := [name for name, count in every.items() if count > 1 and name in taken]:
            raise InputError(
                f"{shared[0]} of stage {stage} saves by policies twice, or in a region too; runs lie apart, and apart "
                "from regions"
            )
    for stage, chosen in regions.items():
        order = stage_order(module.graph, assignment, stage)
        for region in chosen:
            if fault := fault_of(limits, order, region):
                raise InputError(f"region {_listed(region)} of stage {stage} {fault}")
        for one, other in combinations(map(frozenset, chosen), 2):
            if one == other or (one & other and not one < other and not other < one):
                raise InputError(
                    f"two regions of stage {stage} share {_listed(sorted(one & other))}; regions lie apart, or one "
                    "within the other"
                )


def fault_of(limits: RecomputeLimits, order: Sequence[str], region: Sequence[str]) -> str | None:
    """What is wrong with a region of the stage whose nodes are those of `order`, and what to do."""
    inside, known = frozenset(region), frozenset(order)
    if not region:
        return "is empty; leave it out"
    if hindered := [name for name in region if name in limits.never]:
        return f"may not hold {hindered[0]}: {limits.never[hindered[0]]}; leave it out"
    if strange := [name for name in region if name not in known]:
        return f"names {strange[0]}, which is no node of the stage"
    first = order.index(region[0])
    if list(region) != list(order[first : first + len(region)]):
        return "is no run of the stage's nodes; name nodes that follow each other, in their order"
    for members in limits.together:
        here = [name for name in members if name in known]  # the cut parts them from others
        missing = [name for name in here if name not in inside]
        if 0 < len(missing) < len(here):
            held = next(name for name in here if name in inside)
            return f"parts {held} from {_listed(missing)}; a region holds all of them or none"
    return None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 5 else f"{names[0]}, …, {names[-1]}"


def enclose(
    graph: fx.Graph,
    regions: Iterable[Sequence[fx.Node]],
    savings: Iterable[tuple[Sequence[fx.Node], tuple[Policy, ...]]] = (),
) -> None:
    """Makes each of `regions`, nodes of `graph`, one node that calls a `Recomputed`, of `savings` one for a `Saved`.

    Requires a stage before `Held`, `Seed` and `EnterRegions`: these are applied to the bodies here.
    """
    storages, staying = EncodedStorages(), _staying(graph)
    for number, (nodes, policies) in enumerate(savings):
        _EncodedRunReplacement(nodes, policies, storages, staying).replace(graph, f"saving_{number}")
    left = [_RegionReplacement(nodes) for nodes in sorted(regions, key=len)]  # a region before what it lies in
    for number, region in enumerate(left):
        made = region.replace(graph, f"region_{number}")
        for outer in left[number + 1 :]:
            outer.adopt(region, made)


def _staying(graph: fx.Graph) -> set[int]:
    """The storages that are there all the time: of the stage's inputs, parameters and buffers."""
    return {
        key
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for key in _storages(node)
    }


def _storages(node: fx.Node) -> set[int]:
    return {storage_key(leaf) for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor)}


class _RegionReplacement:
    """A region on its way to be one node. What it does is known before those within it are replaced."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = list(nodes)
        self._written = written_storages(nodes)
        self._writers = writing_modules(nodes, self._written)
        self._random = any(node.meta["random"] for node in nodes)
        contexts = {node.meta["autograd_context"] for node in nodes}
        # Within an autocast region it stays entered, so that weights that were cast before are not cast again.
        self._autograd_context = contexts.pop() if len(contexts) == 1 else None

    def adopt(self, inner: _RegionReplacement, made: Sequence[fx.Node]) -> None:
        """Puts the nodes that stand for `inner` in the place of its nodes, if they lie in this region."""
        if inner.nodes[0] in self.nodes:
            first = self.nodes.index(inner.nodes[0])
            self.nodes[first : first + len(inner.nodes)] = made

    def replace(self, graph: fx.Graph, name: str) -> list[fx.Node]:
        """The nodes that stand in the place of the region's now: the call, and what takes its result apart."""
        inside = frozenset(self.nodes)
        sources = dict.fromkeys(
            s for node in self.nodes for s in node.all_input_nodes if s not in inside
        )
        reads = sorted((*self._modules(graph), *sources), key=self._rank)  # a stable sort
        results = [node for node in self.nodes if not inside.issuperset(node.users)]
        body = fx.GraphModule({}, _body(self.nodes, reads, results), class_name=name)
        with graph.inserting_after(self.nodes[-1]):
            call = graph.call_function(self._target(name, body, reads), tuple(reads))
        call.meta.update(self._notes(), val=tuple(node.meta["val"] for node in results))
        made = [call]
        for index, node in enumerate(results):  # the values that are read outside
            with graph.inserting_after(made[-1]):
                made.append(graph.call_function(operator.getitem, (call, index)))
            made[-1].meta.update(node.meta, **self._notes())
            node.replace_all_uses_with(made[-1], delete_user_cb=lambda user: user not in inside)
        for node in reversed(self.nodes):
            graph.erase_node(node)
        return made

    def _target(
        self, name: str, body: fx.GraphModule, reads: Sequence[fx.Node]
    ) -> Callable[..., Any]:
        """What is called, on the values of `reads`."""
        ranks = list(map(self._rank, reads))
        return RecomputedRegion(
            name, body, buffers=ranks.count(0), writers=ranks.count(1), random=self._random
        )

    def _modules(self, graph: fx.Graph) -> list[fx.Node]:
        """Reads of the leaf modules that the region calls, where it calls them first: parameters keep their order."""
        calls = [node for node in self.nodes if node.op == "call_module"]
        found: dict[Any, fx.Node] = {}
        for node in calls:
            if node.target not in found:
                with graph.inserting_before(node):
                    found[node.target] = graph.get_attr(str(node.target))
                found[node.target].meta.update(
                    val=None, random=False, mutates=(), autograd_context=None
                )
        return list(found.values())

    def _rank(self, source: fx.Node) -> int:
        """First come buffers that the region writes to, then modules with such buffers, then the rest."""
        if is_module_read(source):
            return 1 if source.target in self._writers else 2
        return 0 if is_written_buffer_read(source, self._written) else 2

    def _notes(self) -> dict[str, Any]:
        return {
            "random": False,
            "mutates": (),
            "autograd_context": self._autograd_context,
            "data_answers": None,
        }


class _EncodedRunReplacement(_RegionReplacement):
    """Nodes that save by policies, on their way to be one node; `staying` are storages that are there anyway."""

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        policies: tuple[Policy, ...],
        storages: EncodedStorages,
        staying: Collection[int],
    ) -> None:
        super().__init__(nodes)
        self._policies, self._storages, self._staying = policies, storages, staying

    def _target(
        self, name: str, body: fx.GraphModule, reads: Sequence[fx.Node]
    ) -> Callable[..., Any]:
        exempt = [
            place
            for place, read in enumerate(reads)
            if not _storages(read).isdisjoint(self._staying)
        ]
        return EncodedRun(
            name, body, policies=self._policies, storages=self._storages, exempt=exempt
        )


def _body(
    nodes: Sequence[fx.Node], reads: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.Graph:
    """The graph from `reads` to `results`, whose first argument leaves the regions of the model that it enters."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    entered = graph.placeholder("entered")
    entered.meta["val"] = None
    for node in reads:
        copies[node] = graph.placeholder(origin_of(node))
        copies[node].meta["val"] = node.meta["val"]
    for placeholder in graph.nodes:
        placeholder.meta.update(random=False, mutates=(), autograd_context=None)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in results))
    output.meta.update(random=False, mutates=(), autograd_context=None, val=None)
    apply_passes(graph, [GuardDataDependence(), Seed(), EnterContexts()])
    for node in graph.find_nodes(op="call_function", target=EnteredContext):
        node.target, node.args = enter_context, (entered, *node.args)
    modules = {read.target: copies[read] for read in reads if is_module_read(read)}
    for node in graph.find_nodes(op="call_module"):
        with graph.inserting_before(node):
            call = graph.call_function(
                operator.call, (modules[node.target], *node.args), node.kwargs
            )
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    return graph
