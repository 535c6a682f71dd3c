"""The replacement of a region or an encoded run, in the graph of a stage, by one node.

The node calls a `RecomputedRegion` or an `EncodedRun`, whose body is a graph of its own:

    before   x ── linear ── relu ── add ── y        region: linear, relu
                                     │
                   x ────────────────┘

    after    linear's module, x ── region_0 ── getitem 0 ── add ── y
                                   body: (entered, module, x) → (relu,)

Called by `emit`, after `check_regions` has accepted the regions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pipecompile.codegen.stage_passes import STAGE_PASSES
from pipecompile.graph.autograd_context import EnteredContext
from pipecompile.graph.encoded_run import EncodedRun
from pipecompile.graph.recomputability import (
    is_module_read,
    is_written_buffer_read,
    writing_modules,
    written_storages,
)
from pipecompile.graph.recomputed_region import RecomputedRegion, enter_context
from pipecompile.graph.saved_tensors import EncodedStorages
from pipecompile.graph.stages import origin_of
from pipecompile.graph.storages import storage_key
from pipecompile.ir.encodings import Encoding
from pipecompile.passes.contract import apply_passes

__all__ = ["replace_regions"]

# The passes expect this in the meta of a node that draws, writes and enters nothing.
_NO_EFFECTS = {"random": False, "mutates": (), "autograd_context": None}


def replace_regions(
    graph: fx.Graph,
    regions: Iterable[Sequence[fx.Node]],
    encoded_runs: Iterable[tuple[Sequence[fx.Node], tuple[Encoding, ...]]],
) -> None:
    """Replace each region by a call of a `RecomputedRegion`, each run by one of an `EncodedRun`.

    Requires the graph of a stage without `STAGE_PASSES`, which are applied to the bodies here.
    """
    storages, resident = EncodedStorages(), _resident_storages(graph)
    for number, (nodes, encodings) in enumerate(encoded_runs):
        run = _EncodedRunReplacement(nodes, encodings, storages, resident)
        run.replace(graph, f"saving_{number}")
    # The shortest regions come first, so that an inner region is replaced before its outer one.
    replacements = [_RegionReplacement(nodes) for nodes in sorted(regions, key=len)]
    for number, inner in enumerate(replacements):
        new_nodes = inner.replace(graph, f"region_{number}")
        for outer in replacements[number + 1 :]:
            outer.adopt(inner, new_nodes)


def _resident_storages(graph: fx.Graph) -> set[int]:
    """Return the storages of the stage's inputs, parameters and buffers, which stay in memory."""
    return {
        key
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for key in _storages(node)
    }


def _storages(node: fx.Node) -> set[int]:
    return {storage_key(leaf) for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, Tensor)}


class _RegionReplacement:
    """A region that will be replaced by one node.

    What its nodes write, draw and enter is read when it is created: inner regions are replaced
    before it, and the node that replaces them says nothing of that.
    """

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self.nodes = list(nodes)
        self._written = written_storages(nodes)
        self._writers = writing_modules(nodes, self._written)
        self._random = any(node.meta["random"] for node in nodes)
        contexts = {node.meta["autograd_context"] for node in nodes}
        # Inside an autocast region of the model the replacement stays inside it: a weight that was
        # cast before the region is then not cast a second time.
        self._autograd_context = contexts.pop() if len(contexts) == 1 else None

    def adopt(self, inner: _RegionReplacement, new_nodes: Sequence[fx.Node]) -> None:
        """Put the nodes that replaced `inner` in its place, if this region contains it."""
        if inner.nodes[0] in self.nodes:
            first = self.nodes.index(inner.nodes[0])
            self.nodes[first : first + len(inner.nodes)] = new_nodes

    def replace(self, graph: fx.Graph, name: str) -> list[fx.Node]:
        """Replace the region's nodes and return the new ones.

        The first is the call, which returns a tuple. The others are `getitem` nodes, one for each
        value that nodes outside the region read.
        """
        inside = frozenset(self.nodes)
        sources = dict.fromkeys(
            source for node in self.nodes for source in node.all_input_nodes if source not in inside
        )
        # The sort is stable: within one rank the order of first use stays.
        arguments = sorted((*self._module_reads(graph), *sources), key=self._argument_rank)
        # In the drawing above: the arguments are linear's module and x, and relu is the only
        # result.
        results = [node for node in self.nodes if not inside.issuperset(node.users)]
        body = fx.GraphModule({}, _body_graph(self.nodes, arguments, results), class_name=name)
        # Behind its last node: all that the region reads stands before it, since its nodes follow
        # each other, and all that read its results stand behind.
        with graph.inserting_after(self.nodes[-1]):
            call = graph.call_function(self._callable(name, body, arguments), tuple(arguments))
        call.meta.update(self._meta(), val=tuple(node.meta["val"] for node in results))
        new_nodes = [call]
        for index, node in enumerate(results):
            with graph.inserting_after(new_nodes[-1]):
                item = graph.call_function(operator.getitem, (call, index))
            item.meta.update(node.meta, **self._meta())
            # The region's own nodes are erased below and keep reading each other until then.
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
            new_nodes.append(item)
        # From the last one, since fx erases only what nobody reads.
        for node in reversed(self.nodes):
            graph.erase_node(node)
        return new_nodes

    def _callable(
        self, name: str, body: fx.GraphModule, arguments: Sequence[fx.Node]
    ) -> Callable[..., Any]:
        """Return the function that the new node calls with the values of `arguments`."""
        ranks = list(map(self._argument_rank, arguments))
        return RecomputedRegion(
            name, body, buffers=ranks.count(0), writers=ranks.count(1), random=self._random
        )

    def _module_reads(self, graph: fx.Graph) -> list[fx.Node]:
        """Insert and return a read of each leaf module that the region calls.

        It stands before the first call of the module, so that parameters keep their order.
        """
        reads: dict[Any, fx.Node] = {}
        for node in self.nodes:
            if node.op == "call_module" and node.target not in reads:
                with graph.inserting_before(node):
                    read = graph.get_attr(str(node.target))
                read.meta.update(_NO_EFFECTS, val=None)
                reads[node.target] = read
        return list(reads.values())

    def _argument_rank(self, source: fx.Node) -> int:
        """Return 0 for a buffer that the region writes, 1 for a module that writes, else 2.

        Arguments are sorted by it: `RecomputedRegion` expects them in this order.
        """
        if is_module_read(source):
            return 1 if source.target in self._writers else 2
        return 0 if is_written_buffer_read(source, self._written) else 2

    def _meta(self) -> dict[str, Any]:
        """Return the meta of a node that replaces the region: the body has all of its effects."""
        return {
            **_NO_EFFECTS,
            "autograd_context": self._autograd_context,
            "data_answers": None,
        }


class _EncodedRunReplacement(_RegionReplacement):
    """A run of nodes with encoded saved tensors that will be replaced by one node.

    `resident` are the storages that stay in memory anyway. Encoding them would free nothing.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        encodings: tuple[Encoding, ...],
        storages: EncodedStorages,
        resident: Collection[int],
    ) -> None:
        super().__init__(nodes)
        self._encodings, self._storages, self._resident = encodings, storages, resident

    def _callable(
        self, name: str, body: fx.GraphModule, arguments: Sequence[fx.Node]
    ) -> Callable[..., Any]:
        exempt = [
            position
            for position, argument in enumerate(arguments)
            if not _storages(argument).isdisjoint(self._resident)
        ]
        return EncodedRun(
            name, body, encodings=self._encodings, storages=self._storages, exempt=exempt
        )


def _body_graph(
    nodes: Sequence[fx.Node], arguments: Sequence[fx.Node], results: Sequence[fx.Node]
) -> fx.Graph:
    """Return the graph of a body, from the values of `arguments` to a tuple of `results`.

    It has one more argument before these, `entered`: an ExitStack on which the body pushes each
    autograd context that it enters, so that its caller can leave them.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    entered = graph.placeholder("entered")
    entered.meta["val"] = None
    for node in arguments:
        copies[node] = graph.placeholder(origin_of(node))
        copies[node].meta["val"] = node.meta["val"]
    # The passes below read the meta of every node.
    for placeholder in graph.nodes:
        placeholder.meta.update(_NO_EFFECTS)
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    output = graph.output(tuple(copies[node] for node in results))
    output.meta.update(_NO_EFFECTS, val=None)
    apply_passes(graph, STAGE_PASSES)
    for node in graph.find_nodes(op="call_function", target=EnteredContext):
        node.target, node.args = enter_context, (entered, *node.args)
    _call_module_arguments(
        graph, {read.target: copies[read] for read in arguments if is_module_read(read)}
    )
    return graph


def _call_module_arguments(graph: fx.Graph, modules: dict[Any, fx.Node]) -> None:
    """Turn each `call_module` of a body into a call of the argument that holds the module.

    A read of a module, the argument of a deferred batch norm, becomes that argument too.
    """
    for read in graph.find_nodes(op="get_attr"):
        read.replace_all_uses_with(modules[read.target])
        graph.erase_node(read)
    for node in graph.find_nodes(op="call_module"):
        with graph.inserting_before(node):
            call = graph.call_function(
                operator.call, (modules[node.target], *node.args), node.kwargs
            )
        node.replace_all_uses_with(call)
        graph.erase_node(node)
