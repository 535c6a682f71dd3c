"""Which nodes of a stage may be computed again in its backward, and how a region of them becomes one node.

So do runs of nodes whose saved tensors lie in another form; what limits regions limits them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from pipecompile.cost_models.protocol import size_bytes
from pipecompile.errors import InputError
from pipecompile.ir.saving import Policy
from pipecompile.passes.ambient import EnterRegions
from pipecompile.passes.ambient import Region as Entered
from pipecompile.passes.asked import Held
from pipecompile.passes.contract import apply
from pipecompile.passes.group import storage_key
from pipecompile.passes.recompute import Recomputed, enter
from pipecompile.passes.relay import origin_of
from pipecompile.passes.saved import Saved
from pipecompile.passes.saving import Shelf
from pipecompile.passes.seed import Seed

__all__ = [
    "Limits",
    "Regions",
    "Savings",
    "check_regions",
    "copied_bytes",
    "enclose",
    "fault_of",
    "stage_order",
    "uncheckable",
]

Regions = Mapping[int, Sequence[Sequence[str]]]
"""Stage → its regions, each the names of its nodes, in order. A region may lie within another."""
Savings = Mapping[int, Sequence[tuple[Sequence[str], tuple[Policy, ...]]]]
"""Stage → its runs of nodes that save by policies; they lie apart, and apart from regions."""


@dataclass(frozen=True)
class Limits:
    """What no region may do.

    `never` tells, by name, why a node may lie in none. Of each of `together` a region has all nodes or no node.
    """

    never: Mapping[str, str]
    together: tuple[tuple[str, ...], ...]


def uncheckable(module: fx.GraphModule) -> Limits:
    """The limits of regions in an instantiated capture, wherever it is cut. Requires `meta["group"]` (Group)."""
    nodes = _operations(module.graph)
    parameters = _storages_of_parameters(module.graph)
    never = {node.name: why for node in module.graph.nodes if (why := _hindrance(node, parameters))}
    bound = tuple(tuple(node.name for node in members) for members in _groups(nodes) if len(members) > 1)
    return Limits(_spread(never, bound), bound)


def copied_bytes(module: fx.GraphModule) -> dict[str, tuple[int, ...]]:
    """By node of an instantiated capture the sizes of the buffers that regions with it copy, since they write to them.

    All who touch such a buffer are in one group, so each group has its own: they are with the first node of it that
    writes. Requires `meta["group"]` (Group).
    """
    nodes = _operations(module.graph)
    found: dict[str, tuple[int, ...]] = {}
    for members in (*_groups(nodes), *([node] for node in nodes if node.meta["group"] is None)):
        written = _written(members)
        read = dict.fromkeys(source for node in members for source in node.all_input_nodes)
        copied = [operator.attrgetter(str(source.target))(module) for source in read if _is_written(source, written)]
        for target in _writers(members, written):
            copied += module.get_submodule(target).buffers()
        if copied:
            first = next(node.name for node in members if node.meta["mutates"])
            found[first] = tuple(size_bytes([buffer]) for buffer in {id(each): each for each in copied}.values())
    return found


def _operations(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def _storages_of_parameters(graph: fx.Graph) -> set[int]:
    values = [node.meta["val"] for node in graph.nodes if node.op == "get_attr"]
    return {storage_key(value) for value in values if isinstance(value, nn.Parameter)}


def _hindrance(node: fx.Node, parameters: Collection[int]) -> str | None:
    """Why `node` may not run twice; `parameters` are the storages of those that the graph reads."""
    if node.op in ("placeholder", "get_attr", "output"):
        return "it computes nothing"
    if node.target is torch.autograd.grad:
        return "it goes back through the nodes before it while the forward runs"
    if node.meta.get("hook") and node.all_input_nodes[0].op in ("placeholder", "get_attr"):
        return f"it acts on {node.all_input_nodes[0].name} itself, which no region makes anew"
    if any(isinstance(value, nn.Parameter) or storage_key(value) in parameters for value in node.meta["mutates"]):
        return "it writes to a parameter"
    return None


def _spread(never: Mapping[str, str], together: Sequence[Sequence[str]]) -> dict[str, str]:
    """`never`, and all that is bound to one of its nodes."""
    found = dict(never)
    growing = True
    while growing:
        growing = False
        for members in together:
            cause = next((name for name in members if name in found), None)
            missing = [name for name in members if name not in found] if cause else []
            found.update((name, f"it goes with {cause}, of which {found[str(cause)]}") for name in missing)
            growing = growing or bool(missing)
    return found


def _groups(nodes: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Groups without inputs and output: they only keep a first and a last operation on a stage with these."""
    found: dict[str, list[fx.Node]] = {}
    for node in nodes:
        if node.meta["group"] is not None:
            found.setdefault(node.meta["group"], []).append(node)
    return iter(found.values())


def stage_order(graph: fx.Graph, assignment: Mapping[str, int], stage: int) -> list[str]:
    """The nodes of a stage in its order, reads of parameters aside."""
    return [node.name for node in graph.nodes if node.op != "get_attr" and assignment[node.name] == stage]


def check_regions(module: fx.GraphModule, assignment: Mapping[str, int], regions: Regions, savings: Savings) -> None:
    """InputError names the nodes of the first region or run that is not possible under `assignment`."""
    limits = uncheckable(module)
    for stage, runs in savings.items():
        order = stage_order(module.graph, assignment, stage)
        for names, _ in runs:
            if fault := fault_of(limits, order, names):
                raise InputError(f"the run {_listed(names)} of stage {stage}, which saves by policies, {fault}")
        every = Counter(
            name for names in (*(names for names, _ in runs), *regions.get(stage, ())) for name in set(names)
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


def fault_of(limits: Limits, order: Sequence[str], region: Sequence[str]) -> str | None:
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
    shelf, staying = Shelf(), _staying(graph)
    for number, (nodes, policies) in enumerate(savings):
        _Run(nodes, policies, shelf, staying).replace(graph, f"saving_{number}")
    left = [_Region(nodes) for nodes in sorted(regions, key=len)]  # a region before what it lies in
    for number, region in enumerate(left):
        made = region.replace(graph, f"region_{number}")
        for outer in left[number + 1 :]:
            outer.adopt(region, made)


def _staying(graph: fx.Graph) -> set[int]:
    """The storages that are there all the time: of the stage's inputs, parameters and buffers."""
    return {key for node in graph.nodes if node.op in ("placeholder", "get_attr") for key in _storages(node)}


def _storages(node: fx.Node) -> set[int]:
    return {storage_key(leaf) for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor)}


def _written(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages that they write to."""
    return {storage_key(value) for node in nodes for value in node.meta["mutates"]}


def _writers(nodes: Iterable[fx.Node], written: Collection[int]) -> dict[str, None]:
    """Modules that they call and that have such storages, also those whose buffers others write to."""
    return {str(node.target): None for node in nodes if any(storage_key(value) in written for value in _state(node))}


def _is_written(source: fx.Node, written: Collection[int]) -> bool:
    """Whether it reads a buffer that lies in one of these storages."""
    return source.op == "get_attr" and not _is_module(source) and storage_key(source.meta["val"]) in written


class _Region:
    """A region on its way to be one node. What it does is known before those within it are replaced."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = list(nodes)
        self._written = _written(nodes)
        self._writers = _writers(nodes, self._written)
        self._random = any(node.meta["random"] for node in nodes)
        ambients = {node.meta["ambient"] for node in nodes}
        # Within an autocast region it stays entered, so that weights that were cast before are not cast again.
        self._ambient = ambients.pop() if len(ambients) == 1 else None

    def adopt(self, inner: _Region, made: Sequence[fx.Node]) -> None:
        """Puts the nodes that stand for `inner` in the place of its nodes, if they lie in this region."""
        if inner.nodes[0] in self.nodes:
            first = self.nodes.index(inner.nodes[0])
            self.nodes[first : first + len(inner.nodes)] = made

    def replace(self, graph: fx.Graph, name: str) -> list[fx.Node]:
        """The nodes that stand in the place of the region's now: the call, and what takes its result apart."""
        inside = frozenset(self.nodes)
        sources = dict.fromkeys(s for node in self.nodes for s in node.all_input_nodes if s not in inside)
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

    def _target(self, name: str, body: fx.GraphModule, reads: Sequence[fx.Node]) -> Callable[..., Any]:
        """What is called, on the values of `reads`."""
        ranks = list(map(self._rank, reads))
        return Recomputed(name, body, buffers=ranks.count(0), writers=ranks.count(1), random=self._random)

    def _modules(self, graph: fx.Graph) -> list[fx.Node]:
        """Reads of the leaf modules that the region calls, where it calls them first: parameters keep their order."""
        calls = [node for node in self.nodes if node.op == "call_module"]
        found: dict[Any, fx.Node] = {}
        for node in calls:
            if node.target not in found:
                with graph.inserting_before(node):
                    found[node.target] = graph.get_attr(str(node.target))
                found[node.target].meta.update(val=None, random=False, mutates=(), ambient=None)
        return list(found.values())

    def _rank(self, source: fx.Node) -> int:
        """First come buffers that the region writes to, then modules with such buffers, then the rest."""
        if _is_module(source):
            return 1 if source.target in self._writers else 2
        return 0 if _is_written(source, self._written) else 2

    def _notes(self) -> dict[str, Any]:
        return {"random": False, "mutates": (), "ambient": self._ambient, "answers": None}


class _Run(_Region):
    """Nodes that save by policies, on their way to be one node; `staying` are storages that are there anyway."""

    def __init__(
        self, nodes: Sequence[fx.Node], policies: tuple[Policy, ...], shelf: Shelf, staying: Collection[int]
    ) -> None:
        super().__init__(nodes)
        self._policies, self._shelf, self._staying = policies, shelf, staying

    def _target(self, name: str, body: fx.GraphModule, reads: Sequence[fx.Node]) -> Callable[..., Any]:
        spared = [place for place, read in enumerate(reads) if not _storages(read).isdisjoint(self._staying)]
        return Saved(name, body, policies=self._policies, shelf=self._shelf, spared=spared)


def _state(node: fx.Node) -> tuple[Tensor, ...]:
    """Of the module that a node calls."""
    state: tuple[Tensor, ...] = node.meta["state"] if node.op == "call_module" else ()
    return state


def _is_module(read: fx.Node) -> bool:
    return read.op == "get_attr" and read.meta["val"] is None


def _body(nodes: Sequence[fx.Node], reads: Sequence[fx.Node], results: Sequence[fx.Node]) -> fx.Graph:
    """The graph from `reads` to `results`, whose first argument leaves the regions of the model that it enters."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    entered = graph.placeholder("entered")
    entered.meta["val"] = None
    for node in reads:
        copies[node] = graph.placeholder(origin_of(node))
        copies[node].meta["val"] = node.meta["val"]
    for placeholder in graph.nodes:
        placeholder.meta.update(random=False, mutates=(), ambient=None)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in results))
    output.meta.update(random=False, mutates=(), ambient=None, val=None)
    apply(graph, [Held(), Seed(), EnterRegions()])
    for node in graph.find_nodes(op="call_function", target=Entered):
        node.target, node.args = enter, (entered, *node.args)
    modules = {read.target: copies[read] for read in reads if _is_module(read)}
    for node in graph.find_nodes(op="call_module"):
        with graph.inserting_before(node):
            call = graph.call_function(operator.call, (modules[node.target], *node.args), node.kwargs)
        node.replace_all_uses_with(call)
        graph.erase_node(node)
    return graph
