"""What is asked of a plan: checked before anything is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

import torch
from torch import Tensor

from pipecompile.api.costs import cost_model
from pipecompile.api.target import Target
from pipecompile.errors import InputError
from pipecompile.frontend.captured_graph import batch_size
from pipecompile.ir.encodings import POLICIES, Policy
from pipecompile.ir.plan import GRANULARITIES, RECOMPUTES, Granularity, Options, Recompute
from pipecompile.ir.size import parse_budget
from pipecompile.memory_model.optimizer import OPTIMIZERS
from pipecompile.profiling.kernel_scratch import own_instructions
from pipecompile.schedule.named import MAY_SPLIT
from pipecompile.schedule.placement import SHAPES
from pipecompile.schedule.selection import placements

__all__ = ["Choices", "options_for"]


class Choices(TypedDict, total=False):
    """What `pipecompile()` may be asked for besides stages and costs.

    microbatches            what the minibatch is cut into (default: as many as stages)
    schedule                a named one (docs/schedules.md), or "search" (default: "1f1b")
    stages_per_rank         how many stages share a rank (default: what the schedule needs)
    placement               "linear", "loop" or "v" (default: what the schedule needs; a search tries all)
    objective               "variance", "max-load" or "step-time" (default: "variance")
    memory                  the cap of each rank, "16GiB" or bytes, or a list of one for each (default: none)
    optimizer               whose state counts: sgd, momentum, rmsprop, adam, adamw or adafactor (default: none)
    master_weights          count float32 copies of parameters of fewer bits (default: no)
    recompute               what is computed again instead of kept: "none" (the default), "stage" (each stage but the
                            last, as a whole), "except-last" (so for all microbatches but a step's last), "block" or
                            "sqrt" (each block of these stages, or about √n of n together), "auto" (what lets each rank
                            fit `memory` at the least extra time)
    saving                  forms in which stages that do not fit `memory` may besides keep what backwards need, of
                            "mask", "relu", "pool", "offload" and "half" (docs/recompute.md); gradients stay the
                            same bit for bit but with "half" (default: none)
    pin                     the stage of nodes, negative ones from the last (default: {})
    groups                  nodes or modules that stay together (default: ())
    parameters_everywhere   whether each stage has a node with parameters (default: no)
    granularity             what the model is cut between: "operators", "modules", "blocks", or "auto", blocks
                            that are opened where balance or memory needs it (default: "operators")
    leaf                    modules, by path or class, that are one node each (default: ())
    """

    microbatches: int | None
    schedule: str
    stages_per_rank: int | None
    placement: str | None
    objective: str
    memory: int | str | Sequence[int | str] | None
    optimizer: str | None
    master_weights: bool
    recompute: str
    saving: Iterable[str]
    pin: Mapping[str, int] | None
    groups: Iterable[Iterable[str]]
    parameters_everywhere: bool
    granularity: str
    leaf: Iterable[str]


def options_for(
    target: Target,
    *,
    k: int,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    placement: str | None = None,
    objective: str = "variance",
    memory: int | str | Sequence[int | str] | None = None,
    optimizer: str | None = None,
    master_weights: bool = False,
    costs: str = "measured",
    recompute: str = "none",
    saving: Iterable[str] = (),
    pin: Mapping[str, int] | None = None,
    groups: Iterable[Iterable[str]] = (),
    parameters_everywhere: bool = False,
    granularity: str = "operators",
    leaf: Iterable[str] = (),
) -> Options:
    """The options of a plan, checked: InputError names what was given and what there is."""
    _check_kinds(k=k, microbatches=microbatches, stages_per_rank=stages_per_rank)
    if k < 1:
        raise InputError(f"k={k}, but a pipeline has at least one stage")
    model = cost_model(costs, target.costs)
    _one_of("recompute", recompute, RECOMPUTES)
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
        raise InputError(
            f"master weights are kept for an optimizer; name one of {', '.join(OPTIMIZERS)}"
        )
    options = Options(
        k=k,
        microbatches=_microbatches(target, k if microbatches is None else microbatches),
        schedule=schedule,
        objective=objective,
        recompute=cast(Recompute, recompute),
        saving=_policies(saving),
        memory_bytes=None if memory is None else parse_budget(memory),
        optimizer=optimizer,
        master_weights=master_weights,
        costs=costs,
        pin=dict(pin or {}),
        groups=tuple(_names("groups", names) for names in groups),
        parameters_everywhere=parameters_everywhere,
        granularity=cast(Granularity, granularity),
        leaf=_names("leaf", leaf),
        stages_per_rank=stages_per_rank,
        placement=cast(Literal["linear", "loop", "v"] | None, placement),
        instructions=own_instructions() if model.memory == "cpu" else None,
    )
    _check_together(options, placements(options)[0])
    return options


def _check_together(options: Options, placement: Sequence[int]) -> None:
    """What does not go together is refused before any capture."""
    options.caps(max(placement) + 1)
    if options.recompute in ("block", "sqrt") and options.schedule in MAY_SPLIT:
        raise InputError(
            f"recompute={options.recompute!r} is not possible under schedule {options.schedule!r}, whose backwards may "
            "be split: a stage then recomputes as a whole or not at all; choose auto or stage"
        )
    if options.recompute == "except-last" and options.schedule == "search":
        raise InputError(
            "recompute='except-last' is not possible under schedule 'search', which treats all microbatches alike; "
            "choose stage, or a named schedule"
        )
    if options.saving and len(placement) > max(placement) + 1:
        raise InputError(
            "saving chooses for ranks of one stage each; leave it out, or have one stage a rank"
        )
    if options.saving and options.schedule in MAY_SPLIT:
        raise InputError(
            f"saving is not planned under schedule {options.schedule!r}, whose backwards may be split; leave it "
            "out, or choose another schedule"
        )
    if options.saving and options.recompute not in ("none", "auto"):
        raise InputError(
            f"saving goes with recompute none or auto, not with {options.recompute!r}; choose one of them"
        )


def _check_kinds(**given: Any) -> None:
    for name, value in given.items():
        if value is not None and type(value) is not int:
            raise InputError(f"{name}={value!r} must be a whole number")


def _names(what: str, given: Iterable[str]) -> tuple[str, ...]:
    names = () if isinstance(given, str) else tuple(given)
    if isinstance(given, str) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{what}={given!r} is not a list of names")
    return names


def _policies(given: Iterable[str]) -> tuple[Policy, ...]:
    """In the order in which they are tried."""
    names = _names("saving", given)
    for name in names:
        _one_of("saving", name, POLICIES)
    return tuple(policy for policy in POLICIES if policy in names)


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
