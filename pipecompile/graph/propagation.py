"""Fake runs: what every node of a graph yields, without touching a single real parameter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

from pipecompile.graph.attributes import unchanged
from pipecompile.graph.autograd_context import observed
from pipecompile.graph.data_answers import conditions
from pipecompile.graph.side_effects import Watch

__all__ = [
    "distinct",
    "faked_state",
    "has_values",
    "named_state",
    "propagate",
    "swapped",
    "without_values",
]


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every name of every parameter and buffer, tied names included, parameters first."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def has_values(tensor: Tensor) -> bool:
    """Whether `tensor` lies in memory: not one of the meta device, and not a fake one."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def without_values(tensor: Tensor, device: torch.device | str = "meta") -> Tensor:
    """One of the same shape, strides and type whose values nobody has set, a parameter for a parameter."""
    empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def swapped(module: nn.Module, replacement: dict[int, Tensor]) -> Iterator[list[str]]:
    """Puts `replacement[id(tensor)]` in the place of parameters and buffers, and the real ones back afterwards.

    Per unique module, since shared modules hold one dictionary under several names. Yields a list that holds, after
    the block, the names of the tensors that the block replaced by others (an update that would be lost).
    """
    slots = [
        (path, table, key, tensor)
        for path, owner in module.named_modules()
        for table in (owner._parameters, owner._buffers)
        for key, tensor in table.items()
        if id(tensor) in replacement
    ]
    lost: list[str] = []
    try:
        for _, table, key, tensor in slots:
            table[key] = replacement[id(tensor)]
        yield lost
    finally:
        for path, table, key, tensor in slots:
            if table.get(key) is not replacement[id(tensor)]:
                lost.append(f"{path}.{key}".lstrip("."))
            table[key] = tensor


def faked_state(module: nn.Module, mode: FakeTensorMode) -> dict[int, Tensor]:
    """A fake of static shape for every parameter and buffer, by the identity of the real one."""
    unique = {id(tensor): tensor for _, tensor in named_state(module)}
    # A fake of somebody else's mode is strange to ours.
    plain = {
        key: without_values(t) if isinstance(t, FakeTensor) else t for key, t in unique.items()
    }
    return {key: mode.from_tensor(tensor, static_shapes=True) for key, tensor in plain.items()}


def distinct(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors; one that comes again as a copy, since a mode has one fake for each tensor."""
    seen: set[int] = set()
    for tensor in tensors:
        again = id(tensor) in seen
        yield tensor.detach().clone().requires_grad_(tensor.requires_grad) if again else tensor
        seen.add(id(tensor))


class _Propagator(fx.Interpreter):
    """Notes on each node its value, the state of its module, what it wrote to (arguments, or that), and if it draws.

    Under autocast also which trainable parameters it casts.
    """

    def run_node(self, n: fx.Node) -> Any:
        n.meta["state"] = tuple(self._state(n))
        versions = [(tensor, tensor._version) for tensor in self._touched(n)]
        with conditions(n, self.fetch_args_kwargs_from_env(n)), Watch() as watch:
            torch.clear_autocast_cache()  # under an autocast around all, what another node cast is cast again
            n.meta["val"] = super().run_node(n)
            n.meta["casts"] = tuple(watch.casts) if observed().casts else ()
        written = [tensor for tensor, version in versions if tensor._version != version]
        asks = n.meta.get("answers") is not None
        # What a module that asks data does on other data is not known: it may draw, and write to its buffers.
        kept = self.fetch_attr(str(n.target)).buffers() if asks else ()
        n.meta["mutates"] = (*written, *watch.averages, *kept)
        n.meta["random"] = n.meta.get("random", False) or watch.random or asks
        return n.meta["val"]

    def _touched(self, n: fx.Node) -> Iterator[Tensor]:
        for source in n.all_input_nodes:
            yield from (leaf for leaf in tree_leaves(self.env[source]) if isinstance(leaf, Tensor))
        yield from n.meta["state"]

    def _state(self, n: fx.Node) -> Iterator[Tensor]:
        if n.op == "call_module":
            leaf_module = self.fetch_attr(str(n.target))
            yield from (*leaf_module.parameters(), *leaf_module.buffers())


@torch.enable_grad()
def propagate(
    module: fx.GraphModule, inputs: Sequence[Tensor], mode: FakeTensorMode | None = None
) -> None:
    """Runs the graph on fakes of `inputs` (one tensor a placeholder) and notes on every node what it yields.

    Sets `meta["val"]`, its fake value, `meta["state"]`, the fake parameters and buffers of the module that it calls,
    `meta["mutates"]`, the fake tensors that it wrote to in place, `meta["casts"]`, the fake parameters that autocast
    casts for it, and `meta["random"]` where it drew random numbers.
    """
    mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
    state = faked_state(module, mode)
    fakes = [mode.from_tensor(tensor, static_shapes=True) for tensor in distinct(inputs)]
    rng = torch.get_rng_state()
    try:
        with mode, unchanged(module), swapped(module, state):
            _Propagator(module, garbage_collect_values=False).run(*fakes)
    finally:
        torch.set_rng_state(rng)
