"""Forwards of several microbatches in lockstep: each node runs for all of them before the next one.

    one after the other    a₀ b₀ c₀  a₁ b₁ c₁
    in lockstep            a₀ a₁  b₀ b₁  c₀ c₁

A pipeline that cuts between all nodes runs in this order too. What a₀ leaves for c₀ in a dict or on
a module, and not along an edge of the graph, a₁ has overwritten when c₀ runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.graph.autograd_context import leave_context
from pipecompile.graph.random_streams import seed_generators
from pipecompile.graph.storages import storage_key

__all__ = ["can_run_in_lockstep", "forwards_in_lockstep"]


def forwards_in_lockstep(
    module: fx.GraphModule, batches: Sequence[Sequence[Tensor]], seed: int
) -> Iterator[Any]:
    """Yield the outputs of the forwards, one for each of `batches`, seeded with `seed`, `seed + 1`
    and so on; all of them run before the first is yielded.
    """
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[index] for index in cuda_devices(module)]
    forwards = [fx.Interpreter(module) for _ in batches]
    states: list[list[Tensor]] = []
    for number, (forward, inputs) in enumerate(zip(forwards, batches, strict=True)):
        forward.args_iter = iter(inputs)
        seed_generators(seed + number)
        states.append([each.get_state() for each in generators])
    for node in module.graph.nodes:
        numbers = range(len(batches))
        # Contexts end in the opposite order, as nested `with` blocks do.
        for number in reversed(numbers) if node.target is leave_context else numbers:
            for generator, state in zip(generators, states[number], strict=True):
                generator.set_state(state)
            forward = forwards[number]
            forward.env[node] = forward.run_node(node)
            for last_used in forward.user_to_last_uses.get(node, ()):
                del forward.env[last_used]
            states[number] = [each.get_state() for each in generators]
    yield from [forward.env[module.graph.output_node()] for forward in forwards]


def can_run_in_lockstep(graph: fx.Graph) -> bool:
    """Return whether no node touches state that another node writes to.

    In a stage one may, since the nodes of a stage run in turn for each microbatch. Requires
    `meta["state"]` and `meta["mutates"]` (propagate).
    """
    readers = Counter(
        key for node in graph.nodes for key in set(map(storage_key, node.meta["state"]))
    )
    read = {storage_key(node.meta["val"]) for node in graph.find_nodes(op="get_attr")}
    written = {storage_key(each) for node in graph.nodes for each in node.meta["mutates"] or ()}
    return not any(key in read or readers[key] > 1 for key in written)
