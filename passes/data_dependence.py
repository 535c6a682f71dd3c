"""Checks of data-dependent modules.

Such a module may do on other data what it did not do on the sample. Where this would make a step
wrong, it becomes an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, fx

from pipecompile.errors import InputError
from pipecompile.graph.attributes import PLAIN
from pipecompile.graph.pytrees import tensor_leaves
from pipecompile.graph.storages import storage_key

__all__ = ["GuardDataDependence", "check_still_alike", "check_still_pure", "tensor_versions"]

WITH_GRADIENT = " with a gradient"


@dataclass(frozen=True)
class GuardDataDependence:
    """Puts checks behind each data-dependent module: that its result is like that on the sample,
    and that it is pure if it was so there.

    Alike are results with the same numbers, and tensors of the same shape and type, none of which
    has a gradient that it had not on the sample: the nodes behind it, and the ranks that receive
    it, rely on that. Where `meta["asks_layout"]` says that a forward asks how tensors lie in
    memory, they lie alike too. Pure means that it neither wrote to its arguments nor returned one
    of them; the cut relies on that. Requires `meta["data_answers"]` on data-dependent nodes,
    `meta["val"]` and `meta["mutates"]`. Ensures that the checks follow each of these nodes:

        before = tensor_versions([x])
        y = self.router(x)
        check = check_still_pure("router", before, y, [x])
        check_1 = check_still_alike("router", y, ["a tensor (8, 6) of torch.float32"])
    """

    def requires(self, graph: fx.Graph) -> None:
        """The checks are not there yet."""
        assert all(node.target is not check_still_alike for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Insert the checks."""
        for node in list(graph.nodes):
            # What orders the result of such a module for a message has notes like its own.
            if node.op != "call_module" or node.meta.get("data_answers") is None:
                continue
            # Both go right behind the node, so the one that is inserted last runs
            # first: what the module wrote to is checked before its result is.
            _insert_check_of_result(graph, node)
            if _is_pure(node):
                _insert_check_of_purity(graph, node)

    def ensures(self, graph: fx.Graph) -> None:
        """Each check has what it compares with."""
        for node in graph.nodes:
            if node.target is check_still_pure:
                assert node.args[1].target is tensor_versions, f"{node} has nothing to compare"


def _insert_check_of_purity(graph: fx.Graph, node: fx.Node) -> None:
    arguments = list(node.all_input_nodes)
    with graph.inserting_before(node):
        before = graph.call_function(tensor_versions, (arguments,))
    with graph.inserting_after(node):
        check = graph.call_function(check_still_pure, (str(node.target), before, node, arguments))
    for call in (before, check):
        _mark_as_check(call, node)


def _insert_check_of_result(graph: fx.Graph, node: fx.Node) -> None:
    has_layout = node.meta.get("asks_layout", False)
    wanted = _described(node.meta["val"], has_layout)
    arguments = (str(node.target), node, wanted, *[has_layout] * has_layout)
    with graph.inserting_after(node):
        _mark_as_check(graph.call_function(check_still_alike, arguments), node)


def _mark_as_check(call: fx.Node, node: fx.Node) -> None:
    """Let a check run where `node` runs, and under its context; only the node itself draws."""
    call.meta.update(node.meta, data_answers=None, random=False, mutates=(), val=None)


def _described(result: Any, has_layout: bool) -> list[str]:
    """Return each leaf of a result in words: what a tensor is except for its values, with its
    strides if it `has_layout`, or a number.
    """
    return [_leaf_text(leaf, has_layout) for leaf in pytree.tree_leaves(result)]


def _leaf_text(leaf: Any, has_layout: bool) -> str:
    if isinstance(leaf, Tensor):
        # The stride of a dimension of size 1 is never used.
        pairs = zip(leaf.shape, leaf.stride(), strict=True)
        strides = tuple(stride if size > 1 else 1 for size, stride in pairs)
        layout = f" with strides {strides}" * has_layout
        gradient = WITH_GRADIENT if leaf.requires_grad else ""
        return f"a tensor {tuple(leaf.shape)} of {leaf.dtype}{layout}{gradient}"
    return repr(leaf) if isinstance(leaf, PLAIN) else f"a {type(leaf).__name__}"


def check_still_alike(
    path: str, result: Any, expected: Sequence[str], has_layout: bool = False
) -> None:
    """Raise InputError unless what the module at `path` returned is as `expected`, in words."""
    for own, wanted in zip_longest(_described(result, has_layout), expected, fillvalue="nothing"):
        # A branch may do without a gradient: then none is sent back.
        if own not in (wanted, wanted.removesuffix(WITH_GRADIENT)):
            raise InputError(
                f"{path} branches on data: on this input it returned {own}, and on the sample that "
                f"the model was cut by {wanted}; let all its branches return the same numbers, and "
                "tensors alike, or compile with a sample that is like this input"
            )


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
        # Without elements: these are all at address 0.
        value.untyped_storage().data_ptr()
        for value in tensor_leaves(arguments)
        if value.numel()
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
