"""Hypothesis strategies: any small cost graph, and any cut of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
from hypothesis import strategies as st

from pipecompile.ir.encodings import ENCODINGS, Encoding
from pipecompile.ir.graph import Content, CostGraph, GradientStorage, Node, Parameter, Tensor

__all__ = ["cost_graphs", "encoded_runs_of", "regions_of", "stages_of"]

SIZES = st.sampled_from([0, 1, 8, 60, 64, 100, 513, 3000])
USES = st.sampled_from(["relu", "pool input", "pool indices", "other"])
CONTENTS = st.none() | st.builds(
    Content,
    dtype=st.sampled_from(["bool", "float16", "float32", "int64"]),
    is_mask=st.booleans(),
    bound=st.sampled_from([None, 256, 257, 2**31, 2**40]),
)


@st.composite
def cost_graphs(draw: st.DrawFn, most: int = 7, *, least: int = 1, wild: bool = False) -> CostGraph:
    """From `least` to `most` nodes: views, tied parameters, skips, values that nobody reads.

    Nodes save what they read, what they make (which is part of their peak), and storages of their
    own; they write to buffers. In a `wild` graph any value may lie in any storage, any node may
    save it, and nodes may have parameters without names.
    """
    names = [f"n{index}" for index in range(draw(st.integers(least, most)))]
    parameters = [
        Parameter(name=f"p{i}", bytes=4 * draw(SIZES), trainable=draw(st.booleans()))
        for i in range(draw(st.integers(0, 3)))
    ]
    nodes, tensors, storages = (
        list[Node](),
        list[Tensor](),
        list[int](draw(st.lists(SIZES, min_size=1, max_size=4))),
    )
    for index, name in enumerate(names):
        known = {t.storage for t in tensors if name in t.consumers and t.storage is not None}
        before = set(known)
        if index < len(names) - 1 and draw(st.booleans()):
            tensors.append(_tensor(draw, names, index, _storage(draw, known, storages, wild)))
            known |= {tensors[-1].storage} - {None}
        if not wild and draw(st.booleans()):
            known.add(_new(draw, storages))
        own = draw(SIZES) if wild else 0
        saveable = range(len(storages)) if wild else sorted(known)
        node = _node(draw, name, index, parameters, saveable, known - before, own)
        made = 0 if wild else sum(storages[storage] for storage in known - before)
        nodes.append(
            msgspec.structs.replace(node, forward_peak_bytes=max(made, node.forward_peak_bytes))
        )
    return CostGraph(
        allocator=draw(st.sampled_from(["cpu", "cuda"])),
        nodes=tuple(nodes),
        tensors=tuple(tensors),
        storages=tuple(storages),
        contents=tuple(draw(CONTENTS) for _ in storages),
        parameters=tuple(parameters),
        gradients=_gradients(draw, names, most=4),
    )


def _new(draw: st.DrawFn, storages: list[int]) -> int:
    storages.append(draw(SIZES))
    return len(storages) - 1


def _storage(draw: st.DrawFn, read: set[int], storages: list[int], wild: bool) -> int | None:
    """Of a value: none of its own, any, that of what it is a view of, or a new one."""
    if not draw(st.integers(0, 5)):
        return None
    found = draw(st.sampled_from([-1, *(range(len(storages)) if wild else sorted(read))]))
    return _new(draw, storages) if found < 0 else found


def _node(
    draw: st.DrawFn,
    name: str,
    index: int,
    parameters: Sequence[Parameter],
    known: Sequence[int],
    new: Iterable[int],
    own: int,
) -> Node:
    read = (
        draw(st.sets(st.sampled_from([p.name for p in parameters]), max_size=2))
        if parameters
        else set()
    )
    placeholder = not read and index < 2 and draw(st.booleans())
    saved = tuple(sorted(draw(st.sets(st.sampled_from(known), max_size=2)))) if known else ()
    packs = ["never"] * (not saved) + ["before"] * (not set(saved) & set(new)) + ["after"]
    return Node(
        name=name,
        forward_ns=draw(st.integers(0, 9)),
        backward_ns=1,
        parameter_bytes=own,
        saved_bytes=0,
        group=None,
        forward_peak_bytes=draw(SIZES),
        backward_peak_bytes=draw(SIZES),
        workspace_bytes=draw(SIZES),
        input_bytes=draw(SIZES) if placeholder else 0,
        saves_at=draw(st.sampled_from(packs)),
        saved=saved,
        uses=tuple(tuple(draw(st.lists(USES, min_size=1, max_size=2))) for _ in saved),
        buffer_copies=tuple(draw(st.lists(SIZES, max_size=2))),
        parameters=tuple(sorted(read)),
        view_gradients=tuple(sorted(name for name in read if draw(st.booleans()))),
        gradients_by_input_backward=tuple(
            sorted(name for name in read if not draw(st.integers(0, 3)))
        ),
        operator="placeholder"
        if placeholder
        else draw(st.sampled_from(["", "Tensor.view", "torch.nn.Linear"])),
    )


def _tensor(draw: st.DrawFn, names: Sequence[str], index: int, storage: int | None) -> Tensor:
    consumers = sorted(draw(st.sets(st.integers(index + 1, len(names) - 1), max_size=3)))
    dense = draw(st.sampled_from([True, True, False]))
    return Tensor(
        producer=names[index],
        consumers=tuple(names[place] for place in consumers),
        bytes=draw(SIZES),
        gradient_bytes=draw(SIZES),
        storage=storage,
        is_permuted=draw(st.booleans()),
        is_dense=dense,
        strided_copy_bytes=0 if dense else draw(SIZES),
        consumers_without_gradient=tuple(
            names[place] for place in consumers if not draw(st.integers(0, 3))
        ),
    )


def _gradients(draw: st.DrawFn, names: Sequence[str], most: int) -> tuple[GradientStorage, ...]:
    """Some of them sums, in the memory of one before."""
    made: list[GradientStorage] = []
    for _ in range(draw(st.integers(0, most))):
        last, producer = sorted(draw(st.tuples(*[st.integers(0, len(names) - 1)] * 2)))
        continues = draw(st.sampled_from([None, *range(len(made))]))
        if continues is not None:
            producer = names.index(made[continues].last)
            last = draw(st.integers(0, producer))
        is_sum = continues is not None or draw(st.booleans())
        places = names[producer], names[last]
        between, captured = (
            draw(st.lists(st.sampled_from(names[last : producer + 1]), max_size=2, unique=True))
            for _ in range(2)
        )
        given = draw(st.lists(st.tuples(*[st.sampled_from(names)] * 2), max_size=3, unique=True))
        made.append(
            GradientStorage(
                producer=places[0],
                last=places[1],
                bytes=draw(SIZES),
                readers=tuple(between),
                captured_at=tuple(captured),
                edges=tuple(given),
                is_sum=is_sum,
                is_copy=draw(st.booleans()),
                continues=continues,
            )
        )
    return tuple(made)


@st.composite
def stages_of(
    draw: st.DrawFn, graph: CostGraph, most: int = 4, least: int = 1
) -> list[tuple[str, ...]]:
    """Non-empty stages of any cut: stages never decrease along a tensor, in any order of nodes.

    Where there would be less than the `least`, large ones are halved.
    """
    before: dict[str, set[str]] = {node.name: set() for node in graph.nodes}
    for tensor in graph.tensors:
        for name in tensor.consumers:
            before[name].add(tensor.producer)
    stage: dict[str, int] = {}
    for node in graph.nodes:
        stage[node.name] = draw(
            st.integers(max((stage[name] for name in before[node.name]), default=0), most - 1)
        )
    members = [tuple(name for name in stage if stage[name] == index) for index in range(most)]
    found = [names for names in members if names]
    while len(found) < least:
        index = max(range(len(found)), key=lambda index: len(found[index]))
        half = len(found[index]) // 2
        found[index : index + 1] = [found[index][:half], found[index][half:]]
    return found


@st.composite
def regions_of(draw: st.DrawFn, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Some runs of the nodes of a stage, each recomputed, and some within others."""
    ends = sorted(draw(st.lists(st.integers(0, len(names)), max_size=6, unique=True)))
    found = _apart(names, ends)
    inner = [
        part
        for region in found
        if len(region) > 1
        for part in draw(regions_of(region))
        if part != region
    ]
    return draw(st.permutations([*found, *inner]))


@st.composite
def encoded_runs_of(
    draw: st.DrawFn, names: Sequence[str], regions: Iterable[Sequence[str]]
) -> list[tuple[tuple[str, ...], tuple[Encoding, ...]]]:
    """Some runs of the nodes outside regions, each with encodings in some order."""
    aside = {name for region in regions for name in region}
    runs = [
        tuple(run) for outside, run in groupby(names, key=lambda name: name not in aside) if outside
    ]
    ends = [
        sorted(draw(st.lists(st.integers(0, len(run)), max_size=6, unique=True))) for run in runs
    ]
    parts = [part for run, places in zip(runs, ends, strict=True) for part in _apart(run, places)]
    encodings = st.lists(st.sampled_from(ENCODINGS), min_size=1, max_size=3, unique=True).map(tuple)
    return [(part, draw(encodings)) for part in parts]


def _apart(names: Sequence[str], ends: Sequence[int]) -> list[tuple[str, ...]]:
    return [tuple(names[a:b]) for a, b in zip(ends[::2], ends[1::2], strict=False)]
