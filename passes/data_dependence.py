"""Modules that ask data may do on other data what they did not on the sample: then it is an error, not a wrong step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from pipecompile.errors import InputError
from pipecompile.graph.storages import storage_key

__all__ = ["Held", "check_held", "versions"]


@dataclass(frozen=True)
class Held:
    """Requires `meta["answers"]` on nodes that ask data, `meta["val"]` and `meta["mutates"]`.

    Ensures that each is followed by a check: it neither wrote to its arguments nor gave them back, unless it did so on
    the sample. The cut knows only what was seen there.
    """

    def requires(self, graph: fx.Graph) -> None:
        """The checks are not there yet."""
        assert all(node.target is not check_held for node in graph.nodes)

    def __call__(self, graph: fx.Graph) -> None:
        """Inserts them."""
        for node in [
            node for node in graph.nodes if node.meta.get("answers") is not None and _is_pure(node)
        ]:
            arguments = list(node.all_input_nodes)
            with graph.inserting_before(node):
                before = graph.call_function(versions, (arguments,))
            with graph.inserting_after(node):
                after = graph.call_function(check_held, (str(node.target), before, node, arguments))
            for added in (before, after):
                added.meta.update(node.meta, answers=None, random=False, mutates=(), val=None)

    def ensures(self, graph: fx.Graph) -> None:
        """Each check has what it compares with."""
        for node in graph.nodes:
            assert node.target is not check_held or node.args[1].target is versions, (
                f"{node} has nothing to compare"
            )


def _is_pure(node: fx.Node) -> bool:
    given = {
        storage_key(value)
        for source in node.all_input_nodes
        for value in _tensors(source.meta["val"])
    }
    touched = {storage_key(value) for value in (*_tensors(node.meta["val"]), *node.meta["mutates"])}
    return not given & touched


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def versions(arguments: list[Any]) -> list[int]:
    """How often each tensor was written to."""
    return [value._version for value in _tensors(arguments)]


def check_held(path: str, before: list[int], result: Any, arguments: list[Any]) -> None:
    """InputError if the module at `path` wrote to its arguments, or gave one back."""
    given = {value.untyped_storage().data_ptr() for value in _tensors(arguments) if value.numel()}
    if versions(arguments) != before or any(
        v.untyped_storage().data_ptr() in given for v in _tensors(result)
    ):
        raise InputError(
            f"{path}, which branches on data, wrote to its argument or gave it back, as it did not on the sample "
            "by which the model was cut; let it work on a copy (clone), or compile with a sample on which it does so"
        )
