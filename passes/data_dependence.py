"""Checks of data-dependent modules.

Such a module may do on other data what it did not do on the sample. Where this would make a step
wrong, it becomes an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from pipecompile.errors import InputError
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import storage_key

__all__ = ["GuardDataDependence", "check_still_pure", "tensor_versions"]


@dataclass(frozen=True)
class GuardDataDependence:
    """Puts a check around each data-dependent module that was pure on the sample.

    Pure means that it neither wrote to its arguments nor returned one of them; the cut relies on
    that. Requires `meta["data_answers"]` on data-dependent nodes, `meta["val"]` and
    `meta["mutates"]`. Ensures that a check follows each of these nodes:

        before = tensor_versions([x])
        y = self.router(x)
        check = check_still_pure("router", before, y, [x])
    """

    def requires(self, graph: fx.Graph) -> None:
        """The checks are not there yet."""
        assert all(node.target is not check_still_pure for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Insert the checks."""
        for node in list(graph.nodes):
            if node.meta.get("data_answers") is not None and _is_pure(node):
                _insert_check(graph, node)

    def ensures(self, graph: fx.Graph) -> None:
        """Each check has the versions that it compares with."""
        for node in graph.nodes:
            if node.target is check_still_pure:
                assert node.args[1].target is tensor_versions, f"{node} has nothing to compare"


def _insert_check(graph: fx.Graph, node: fx.Node) -> None:
    arguments = list(node.all_input_nodes)
    with graph.inserting_before(node):
        before = graph.call_function(tensor_versions, (arguments,))
    with graph.inserting_after(node):
        check = graph.call_function(check_still_pure, (str(node.target), before, node, arguments))
    # Both run where the node runs, and under its context; only the node itself draws.
    for call in (before, check):
        call.meta.update(node.meta, data_answers=None, random=False, mutates=(), val=None)


def _is_pure(node: fx.Node) -> bool:
    """Return whether `node` neither wrote to its arguments nor returned one, on the sample."""
    arguments = [value for s in node.all_input_nodes for value in tensor_leaves(s.meta["val"])]
    touched = [*tensor_leaves(node.meta["val"]), *node.meta["mutates"]]
    return {storage_key(value) for value in arguments}.isdisjoint(map(storage_key, touched))


def tensor_versions(arguments: list[Any]) -> list[int]:
    """Return how often each tensor among `arguments` was written to."""
    return [value._version for value in tensor_leaves(arguments)]


def check_still_pure(path: str, before: list[int], result: Any, arguments: list[Any]) -> None:
    """Raise InputError if the module at `path` wrote to its arguments or returned one of them.

    `before` are the versions of the arguments before the module ran.
    """
    storages = {
        value.untyped_storage().data_ptr() for value in tensor_leaves(arguments) if value.numel()
    }
    # By address, since what the module returns may be a view of its argument.
    is_returned = any(
        value.untyped_storage().data_ptr() in storages for value in tensor_leaves(result)
    )
    if is_returned or tensor_versions(arguments) != before:
        raise InputError(
            f"{path} branches on data: on this input it wrote to its argument or returned it, and "
            "on the sample that the model was cut by it did neither; let it work on a copy of its "
            "argument (clone), or compile with a sample on which it writes or returns it too"
        )
