"""What is asked of a plan: checked before anything is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, TypedDict, cast

import torch
from torch import Tensor

from pipecompile.api.costing import cost_model
from pipecompile.api.ordering import placements
from pipecompile.api.target import Target
from pipecompile.errors import InputError
from pipecompile.frontend.captured import batch_size
from pipecompile.ir.optimizer import OPTIMIZERS
from pipecompile.ir.plan import GRANULARITIES, Granularity, Options
from pipecompile.ir.size import parse_bytes
from pipecompile.schedule.placement import SHAPES

__all__ = ["Choices", "options_for"]


class Choices(TypedDict, total=False):
    """What `pipecompile()` may be asked for besides stages and costs; defaults are those of `options_for`."""

    microbatches: int | None  # what the minibatch is cut into; as many as stages unless given
    schedule: str  # a named one (docs/schedules.md) or "search"
    stages_per_rank: int | None  # what the schedule needs unless given
    placement: str | None  # linear, loop or v; what the schedule needs unless given, and a search tries all
    objective: str  # what the cut minimises (docs/partition.md)
    memory: int | str | None  # the cap of each rank: "16GiB", or bytes
    optimizer: str | None  # sgd, momentum, rmsprop, adam, adamw or adafactor, whose state counts
    master_weights: bool  # count float32 copies of parameters of fewer bits
    recompute: str  # "stage" runs a stage's forward again before its backward instead of keeping activations; "none"
    pin: Mapping[str, int] | None  # the stage of nodes; negative ones count from the last
    groups: Iterable[Iterable[str]]  # nodes or modules that stay together
    parameters_everywhere: bool  # each stage has a node with parameters
    granularity: str  # cut between operators, modules or blocks; auto: blocks, opened where balance or memory needs it
    leaf: Iterable[str]  # modules, by path or class, that are one node each


def options_for(
    target: Target,
    *,
    k: int,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    placement: str | None = None,
    objective: str = "variance",
    memory: int | str | None = None,
    optimizer: str | None = None,
    master_weights: bool = False,
    costs: str = "measured",
    recompute: str = "none",
    pin: Mapping[str, int] | None = None,
    groups: Iterable[Iterable[str]] = (),
    parameters_everywhere: bool = False,
    granularity: str = "operators",
    leaf: Iterable[str] = (),
) -> Options:
    """The options of a plan, checked: InputError names what was given and what there is."""
    if k < 1:
        raise InputError(f"k={k}, but a pipeline has at least one stage")
    cost_model(costs, target.costs)
    _one_of("recompute", recompute, ("none", "stage"))
    _one_of("granularity", granularity, GRANULARITIES)
    if stages_per_rank is not None and stages_per_rank < 1:
        raise InputError(f"stages_per_rank={stages_per_rank}, but a rank has at least one stage")
    if placement is not None:
        _one_of("placement", placement, SHAPES)
    owner = "optimizer" if optimizer else "the target's optimizer"
    optimizer = optimizer or target.optimizer
    if optimizer is not None:
        _one_of(owner, optimizer, OPTIMIZERS)
    elif master_weights:
        raise InputError(f"master weights are kept for an optimizer; name one of {', '.join(OPTIMIZERS)}")
    options = Options(
        k=k,
        microbatches=_microbatches(target, k if microbatches is None else microbatches),
        schedule=schedule,
        objective=objective,
        recompute="stage" if recompute == "stage" else "none",
        memory_bytes=None if memory is None else parse_bytes(memory),
        optimizer=optimizer,
        master_weights=master_weights,
        costs=costs,
        pin=dict(pin or {}),
        groups=tuple(tuple(names) for names in groups),
        parameters_everywhere=parameters_everywhere,
        granularity=cast(Granularity, granularity),
        leaf=tuple(leaf),
        stages_per_rank=stages_per_rank,
        placement=cast(Literal["linear", "loop", "v"] | None, placement),
    )
    placements(options)  # refuses what does not go together before anything is captured
    return options


def _one_of(what: str, given: str, known: Iterable[str]) -> None:
    if given not in known:
        raise InputError(f"{what}={given!r} is not known; choose one of {', '.join(known)}")


def _microbatches(target: Target, microbatches: int) -> int:
    leaves = torch.utils._pytree.tree_leaves((target.call.args, target.call.kwargs))
    batch = batch_size([leaf for leaf in leaves if isinstance(leaf, Tensor)])
    if microbatches < 1 or batch % microbatches:
        fitting = [str(number) for number in range(1, batch + 1) if batch % number == 0]
        raise InputError(
            f"a batch of {batch} cannot be cut into {microbatches} microbatches of one size; "
            f"choose microbatches from {', '.join(fitting)}, or another batch (microbatches is k unless given)"
        )
    return microbatches
