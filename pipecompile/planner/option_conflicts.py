"""Options that no plan can have together. Needs no PyTorch, and no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipecompile.cost_models.device import devices_of
from pipecompile.errors import InputError
from pipecompile.ir.plan import Options
from pipecompile.schedule.named_orders import (
    ASYNCHRONOUS,
    MAY_SPLIT,
    NAMES,
    SPLIT,
    replicates_stages,
)
from pipecompile.schedule.selection import placements

__all__ = ["check_together"]


def check_together(options: Options) -> None:
    """Raise InputError if options are given together that no plan can have."""
    # All placements that the options allow have equally many ranks, so the first one will do.
    placement = placements(options)[0]
    # For its error: a list of caps must have one for each rank.
    options.caps(max(placement) + 1)
    if options.recompute in ("block", "sqrt") and options.schedule in SPLIT:
        raise InputError(
            f"recompute={options.recompute!r} is not possible under schedule {options.schedule!r}, "
            "whose backwards may be split: a stage then recomputes as a whole or not at all; "
            "choose auto or stage"
        )
    _check_stage_replicas(options)
    _check_devices(options, placement)
    _check_inference(options)
    _check_post_validation(options)
    if options.shard and options.replicas == 1:
        raise InputError(
            f"shard={options.shard!r} divides stages over replicas, but the plan is for one; give "
            "replicas=2 or more, by which the batch can be divided, or leave shard out"
        )
    if options.shard and options.optimizer in ("adafactor", "sm3"):
        raise InputError(
            f"optimizer={options.optimizer!r} is not possible with shard: it takes means or "
            "maxima over rows, so it cannot step parts of parameters; choose another"
        )
    if options.shard and options.optimizer_on_host:
        raise InputError(
            "optimizer_on_host is not possible with shard: FSDP2 moves its parts of parameters "
            "to the host by itself (CPUOffloadPolicy); leave one of the two out"
        )
    if options.encodings:
        _check_encodings(options, placement)


def _check_stage_replicas(options: Options) -> None:
    """Raise InputError if stages cannot have replicas of their own with the other options."""
    if options.stage_replicas is None:
        return
    replicas = ",".join(map(str, options.stage_replicas))
    if options.stage_replicas[-1] != 1:
        raise InputError(
            f"stage_replicas={replicas}: the last stage has one rank, since that has the losses of "
            "all microbatches; end with 1, or let whole pipelines have replicas"
        )
    names = [name for name in NAMES if replicates_stages(name) and name != "forward-only"]
    if options.schedule not in names:
        raise InputError(
            f"stage_replicas={replicas} is not possible under schedule {options.schedule!r}, whose "
            "order is not known for ranks that take microbatches in turns; choose one of "
            f"{', '.join(names)}"
        )
    if max(options.stage_replicas) > options.microbatches:
        raise InputError(
            f"stage_replicas={replicas}, but there are {options.microbatches} microbatches, so "
            f"that ranks would have none; use {max(options.stage_replicas)} or more"
        )
    for name, (default, reason) in UNREPLICATED.items():
        if getattr(options, name) != default:
            raise InputError(f"stage_replicas={replicas} and {name} do not go together: {reason}")
    if isinstance(options.memory_bytes, tuple):
        raise InputError(
            f"stage_replicas={replicas}: replicas of a stage hold alike, so give one memory for "
            "all ranks"
        )


def _check_devices(options: Options, placement: Sequence[int]) -> None:
    """Raise InputError if costs list devices for other ranks than there are, or ranks that have
    several stages.
    """
    kind, _, text = options.costs.partition(":")
    devices, ranks = devices_of(text) if kind == "roofline" else (), max(placement) + 1
    if len(devices) < 2:
        return
    if len(devices) != ranks:
        raise InputError(
            f"costs={options.costs!r} lists {len(devices)} devices, but there are {ranks} ranks; "
            "give one for each, or one for all: roofline:h100"
        )
    if len(set(devices)) > 1 and ranks != options.k:
        raise InputError(
            f"costs={options.costs!r} lists devices of several kinds, whose ranks have one stage "
            f"each, but k={options.k} on {ranks} ranks; choose a schedule with one stage a rank"
        )


def _check_inference(options: Options) -> None:
    """Raise InputError if a plan for inference has options of training, or the other way around."""
    if options.comm == "overlap" and options.objective == "latency":
        raise InputError(
            "comm='overlap' is of several microbatches, but latency is that of one alone, which "
            "waits for its messages; leave comm out, or choose throughput"
        )
    cache = [name for name in ("kv_tokens", "kv_token_bytes") if getattr(options, name) is not None]
    if cache and not options.is_inference:
        raise InputError(
            f"{cache[0]} is of inference, but schedule {options.schedule!r} trains; choose "
            "objective throughput or latency"
        )
    # Compared with what such a plan has anyway: who names a default has contradicted nothing.
    trained = [name for name, value in NO_TRAINING.items() if getattr(options, name) != value]
    if trained and options.is_inference:
        raise InputError(
            f"{trained[0]} is of training, and a forward-only plan trains nothing; leave it out"
        )


def _check_post_validation(options: Options) -> None:
    """Raise InputError if updates cannot be validated later with the other options."""
    if not options.post_validation:
        return
    if options.shard:
        raise InputError(
            "post_validation keeps copies of what a step overwrites, which is not done for sharded "
            "parameters; leave one of the two out"
        )
    if options.schedule in ASYNCHRONOUS:
        raise InputError(
            f"post_validation is for steps, but schedule {options.schedule!r} has none: its "
            "updates wait for no other rank; leave it out, or choose a synchronous schedule such "
            "as 'zb-h2'"
        )


NO_TRAINING: Mapping[str, Any] = {
    "recompute": "none",
    "encodings": (),
    "optimizer": None,
    "master_weights": False,
    "optimizer_on_host": False,
    "post_validation": False,
    "shard": None,
    "noise": None,
}
"""The options of training as they are in a plan for inference."""


UNREPLICATED: Mapping[str, tuple[Any, str]] = {
    "replicas": (1, "stages have replicas of their own, or whole pipelines have; leave one out"),
    "stages_per_rank": (None, "a stage has ranks of its own; leave stages_per_rank out"),
    "placement": (None, "the ranks of stages follow each other; leave placement out"),
    "shard": (None, "a stage is whole on each of its ranks; leave shard out"),
    "batch_norm": (
        "microbatch",
        "no rank of a stage sees the whole minibatch; leave batch_norm out",
    ),
    "post_validation": (
        False,
        "it rolls back what one pipeline has begun; leave post_validation out",
    ),
    "noise": (None, "the draws know one device a stage; leave noise out"),
}
"""Options that stages with replicas cannot have: the value that they must have, and why."""


def _check_encodings(options: Options, placement: Sequence[int]) -> None:
    """Raise InputError if `encodings` are not planned with the other options."""
    if len(placement) > max(placement) + 1:
        raise InputError(
            "encodings are chosen for ranks of one stage each; leave them out, or have one stage a "
            "rank"
        )
    if options.schedule in MAY_SPLIT:
        raise InputError(
            f"encodings are not planned under schedule {options.schedule!r}, whose backwards may "
            "be split; leave them out, or choose another schedule"
        )
    if options.recompute not in ("none", "auto"):
        raise InputError(
            f"encodings go with recompute none or auto, not with {options.recompute!r}; choose one "
            "of them"
        )
