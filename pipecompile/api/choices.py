"""The choices for a plan, checked before PyTorch is imported and before a model is captured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from pipecompile.cost_models.device import devices_of, load_device
from pipecompile.errors import InputError, unknown
from pipecompile.ir.encodings import ENCODINGS, Encoding
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.option import Option
from pipecompile.ir.option_help import python_help
from pipecompile.ir.option_names import (
    INFERENCE_OBJECTIVES,
    implied_objective,
    implied_schedule,
    known_name,
)
from pipecompile.ir.options import (
    DEFAULT_COSTS,
    DEFAULT_STAGES,
    JOINT_SEARCH,
    OPTIONS,
    ChoiceTypes,
)
from pipecompile.ir.plan import Options
from pipecompile.ir.serialization import read
from pipecompile.ir.share import parse_share
from pipecompile.ir.size import parse_caps
from pipecompile.ir.stage_ranks import placement_of
from pipecompile.layouts.layout import Layout
from pipecompile.layouts.layout_text import layout_text, read_layout
from pipecompile.planner.option_conflicts import check_together
from pipecompile.schedule.named_orders import lasting_microbatches, required_placement

__all__ = [
    "Choices",
    "check_names",
    "open_options",
    "plan_options",
    "requested_options",
    "unknown_costs",
]

COSTS = ("flops", "measured", "measured:DEVICE", "roofline:DEVICE", "table:FILE")


# The help of a TypedDict lists the methods of dict. So type checkers read the TypedDict, and Python
# has a class whose help is the table; a call of either returns a dict.
if TYPE_CHECKING:
    Choices: TypeAlias = ChoiceTypes
else:

    class Choices:  # noqa: D101 (its docstring is the table)
        __slots__ = ()
        __doc__ = f"The keywords that `pipecompile()` takes to choose a plan.\n\n{python_help()}"

        def __new__(cls, **choices):
            """Return the keywords as a dict; InputError if one is unknown."""
            check_names(choices)
            return choices


def check_names(choices: Iterable[str]) -> None:
    """Raise InputError if one of the keywords is no choice; it suggests the nearest one."""
    known = [option.name for option in OPTIONS if option.is_choice]
    for name in choices:
        if name not in known:
            # `cost` is near to what `pipecompile()` takes beside them.
            raise unknown("option", name, [*known, "k", "costs", "links", "loss_fn"])


def requested_options(**choices: Any) -> Options:
    """Return the options of a plan as far as they are known without the model.

    `choices` are the keywords of `pipecompile.Choices`, k and costs. Microbatches are k if they are
    not given; an optimizer that the target brings is left to `options_for`. InputError names what
    was given and what there is.
    """
    given = open_options(**choices)
    for name in JOINT_SEARCH:
        if given[name] is not None:
            raise InputError(
                f"{name}={given[name]!r} is of a joint search, which plan and pipecompile() make "
                "for devices; give devices too, or leave it out"
            )
    options = plan_options(given)
    check_together(options)
    return options


def open_options(**choices: Any) -> dict[str, Any]:
    """Return all options by keyword, each checked by itself; None where it is open."""
    given = {option.name: choices.pop(option.name, option.default) for option in OPTIONS}
    check_names(choices)
    for option in OPTIONS:
        given[option.name] = _checked(option, given[option.name])
    if given["stages_per_rank"] is None:
        given["stages_per_rank"] = _implied_stages_per_rank(given)
    return given


def _implied_stages_per_rank(given: Mapping[str, Any]) -> int | None:
    """Return how many stages k and ranks put on each rank, where any schedule may be chosen, or the
    one that is given takes any number; None if they do not say.
    """
    k, ranks, schedule = given["k"], given["ranks"], given["schedule"]
    if None in (k, ranks) or k == ranks or k % ranks:
        return None
    is_free = schedule in (None, "search") or required_placement(schedule) == ("loop", None)
    return int(k // ranks) if is_free else None


def plan_options(given: dict[str, Any]) -> Options:
    """Return the options of a plan, with what is open chosen; whether they go together is not
    checked.
    """
    # What is open is chosen in the order in which the choices need each other:
    #     costs → schedule → objective → memory → layout → k → microbatches
    # The costs may name the device of inference, whose memory is then the cap; k of `ranks` needs
    # the stages that the schedule puts on each; and microbatches are one for each of k.
    given["costs"] = given["costs"] or DEFAULT_COSTS
    given["recompute"] = given["recompute"] or "none"
    _check_costs(given["costs"])
    _choose_for_inference(given)
    layout = _layout(given)
    # The two that others decide: k may come from ranks, and microbatches are k.
    given["k"] = _stages(given) if layout is None else _stages_of_layout(given, layout)
    if given["microbatches"] is None:
        given["microbatches"] = _default_microbatches(given)
    given["replicas"] = given["replicas"] or 1
    return Options(
        **{option.field: given[option.name] for option in OPTIONS if option.field is not None}
    )


def _default_microbatches(given: Mapping[str, Any]) -> int:
    """Return one microbatch for each rank, or so many more that those of a stage may have equally
    many where the schedule asks for that: a replica of a stage has only a part of them.
    """
    replicas = given["stage_replicas"]
    if replicas is None:
        return int(given["k"])
    # With stages on 7 and 1 ranks there are 8 microbatches under 1f1b, and under pipedream 14: a
    # multiple of 7 that has as many in flight as ranks follow.
    return lasting_microbatches(given["schedule"], placement_of(replicas), sum(replicas))


def _choose_for_inference(given: dict[str, Any]) -> None:
    """Choose schedule and objective where they are open, and the memory of a plan for inference.

    InputError if an objective of inference is asked for under a schedule that trains.
    """
    objective = given["objective"]
    if given["schedule"] is None:
        given["schedule"] = implied_schedule(objective)
    is_inference = given["schedule"] == "forward-only"
    if objective is None:
        given["objective"] = implied_objective(given["schedule"])
    elif objective in INFERENCE_OBJECTIVES and not is_inference:
        raise InputError(
            f"objective={objective!r} is of inference, but schedule {given['schedule']!r} trains; "
            "leave the schedule out, or choose another objective"
        )
    kind, _, device = given["costs"].partition(":")
    if is_inference and given["memory"] is None and kind == "roofline":
        # What is left of it is the KV cache, which is what a device for inference is filled with.
        sizes = [load_device(name).memory_bytes for name in devices_of(device)]
        given["memory"] = sizes[0] if len(sizes) == 1 else tuple(sizes)


def _checked(option: Option, value: Any) -> Any:
    """Return `value` as a plan has it.

    Raise InputError unless it is of the type that `option` asks for.
    """
    match option.form:
        case "list":
            return _encodings(value)
        case "pins":
            return _pins(value)
        case "groups":
            return _groups(option.name, value)
        case "repeated":
            return _names(option.name, value)
        case "switch":
            return value
    return _checked_value(option, value)


def _pins(value: Any) -> dict[str, int]:
    pins = value or {}
    if not isinstance(pins, Mapping) or not all(
        isinstance(name, str) and type(stage) is int for name, stage in pins.items()
    ):
        raise InputError(
            f"pin={value!r} must map names of nodes or modules to stages, as {{'head': 1}}"
        )
    return dict(pins)


def _checked_value(option: Option, value: Any) -> Any:
    """Return the one value of `option`, checked if it is a whole number, a name or a cap.

    Other values are checked elsewhere.
    """
    if value is None and option.default is None:
        return None
    if option.name == "memory":
        return parse_caps(value)
    if option.name == "stage_replicas":
        return _stage_replicas(value)
    if option.name == "noise":
        return _noise(value)
    if option.name == "layout":
        return layout_text(_file_or_value(value))
    if option.type == int | None:
        # Not isinstance: True is an int too, but no number of stages.
        if type(value) is not int:
            raise InputError(f"{option.name}={value!r} must be a whole number")
        if value < 1:
            raise InputError(f"{option.name}={value}, but {LEAST[option.name]}")
    if option.choices:
        return known_name(option.name, value, option.choices)
    return value


def _stage_replicas(value: object) -> tuple[int, ...]:
    """Return the ranks of each stage; InputError shows how to write them."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        # One path for "7,1" and for [7, 1]: what is neither, such as None or 7, fails here too.
        counts = tuple(int(part) for part in parts)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        counts = ()
    if not counts or min(counts) < 1:
        raise InputError(f"stage_replicas={value!r} is not the ranks of each stage; write 7,1")
    return counts


def _noise(value: object) -> float:
    """Return a noise as a share; InputError shows how to write it."""
    share = parse_share(value) if isinstance(value, str) else value
    # bool first, since True is an int and would be a noise of 100 %.
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise InputError(f"noise={value!r} is not a share from 0 to 1; write 5% or 0.05")
    return float(share)


def _file_or_value(layout: object) -> object:
    """Return the text in the file that `layout` names; itself if there is no such file."""
    if isinstance(layout, str | Path):
        # A text of many stages is longer than the name of a file may be.
        with suppress(OSError):
            if Path(layout).is_file():
                return Path(layout).read_text()
    return layout


def _layout(given: dict[str, Any]) -> Layout | None:
    """Return the layout that is given, if any, and note its format.

    Raise InputError if other options contradict it, or need one.
    """
    if given["layout"] is None:
        for name in ("layout_format", "layers"):
            if given[name] is not None:
                raise InputError(f"{name}={given[name]!r} is of a layout; give layout= too")
        return None
    if given["pin"]:
        raise InputError("a layout fixes the stage of every node; leave out pin, or the layout")
    if given["granularity"] != "operators":
        raise InputError(
            f"granularity={given['granularity']!r} is for cuts that are searched, but the layout "
            "is the cut; leave one of them out"
        )
    layout = read_layout(given["layout"], given["layout_format"])
    given["layout_format"] = layout.format
    return layout


def _stages_of_layout(given: Mapping[str, Any], layout: Layout) -> int:
    """Return the number of stages of a layout; InputError if k or ranks say another one."""
    # DEFAULT_STAGES must not contradict a layout: only a number that the user wrote may.
    requested = None if given["k"] is None and given["ranks"] is None else _stages(given)
    if requested not in (None, layout.k):
        what = "k" if given["k"] is not None else f"ranks={given['ranks']}, which is k"
        raise InputError(
            f"the layout has {layout.k} stages, but {what}={requested}; leave that out, or write a "
            f"layout for {requested} stages"
        )
    return layout.k


LEAST = {
    "k": "a pipeline has at least one stage",
    "ranks": "a pipeline has at least one rank",
    "microbatches": "a step has at least one microbatch",
    "stages_per_rank": "a rank has at least one stage",
    "replicas": "there is at least one replica",
    "effort": "a search makes at least one plan",
    "top": "at least one setting is listed",
    "kv_tokens": "a KV cache has at least one token",
    "kv_token_bytes": "a token takes at least one byte",
}


def _stages(given: Mapping[str, Any]) -> int:
    """Return the number of stages by `k` or by `ranks`.

    Raise InputError if both are given and disagree.
    """
    k, ranks = given["k"], given["ranks"]
    if given["stage_replicas"] is not None:
        return _replicated_stages(given)
    if ranks is None:
        return DEFAULT_STAGES if k is None else int(k)
    # ranks=4 is k=4 under 1f1b, and k=8 under zb-v or interleaved-1f1b, which put two on a rank.
    each = _stages_per_rank(given["schedule"], given["stages_per_rank"])
    if k is not None and k != ranks * each:
        reason = (
            f"schedule {given['schedule']!r} has {each} on each rank, which is k={ranks * each}"
        )
        if k % ranks:
            reason = "each rank has equally many stages, so k is a multiple of ranks"
        raise InputError(
            f"k={k} and ranks={ranks} disagree: {reason}; give only one of k and ranks"
        )
    return int(ranks) * each


def _replicated_stages(given: Mapping[str, Any]) -> int:
    """Return the number of stages whose ranks are given one by one; InputError if k or ranks
    disagree.
    """
    replicas = given["stage_replicas"]
    for name, count in (("k", len(replicas)), ("ranks", sum(replicas))):
        if given[name] not in (None, count):
            raise InputError(
                f"{name}={given[name]}, but stage_replicas={','.join(map(str, replicas))} is "
                f"{name}={count}; leave one of them out"
            )
    return len(replicas)


def _stages_per_rank(schedule: str, requested: int | None) -> int:
    """Return how many stages lie on each rank if `requested` are asked for.

    The number is that of `placements`.
    """
    shape, needed = ("any", None) if schedule == "search" else required_placement(schedule)
    # Around and around with one stage a rank is linear: a loop begins at two.
    return requested or needed or (2 if shape == "loop" else 1)


def _check_costs(costs: Any) -> None:
    """Raise InputError or FormatError unless `costs` names a cost model that is there.

    Its device or its file must be there too.
    """
    kind, _, place = str(costs).partition(":")
    if kind == "roofline" and place:
        devices_of(place)
    elif kind == "table" and place:
        # Read only for its errors, before PyTorch is imported; `cost_model` reads it to use it.
        read(place, CostGraph)
    elif costs not in ("flops", "measured", "function") and not (kind == "measured" and place):
        raise unknown_costs(costs)


def unknown_costs(costs: object) -> InputError:
    """Return the error for costs that are none of `COSTS`."""
    error = unknown("costs", costs, COSTS)
    return InputError(f"{error}, or in Python give a function")


def _listed(what: str, given: Any) -> tuple[Any, ...]:
    """Return the items of an option that takes a list; None stands for none."""
    if given is not None and not isinstance(given, Iterable):
        raise InputError(f"{what}={given!r} is not a list; write {what}=[…]")
    return () if given is None else tuple(given)


def _names(what: str, given: Iterable[str] | None) -> tuple[str, ...]:
    # A text is iterable too: leaf="Block" would become B, l, o, c and k.
    if isinstance(given, str):
        raise InputError(f"{what}={given!r} is not a list of names; write {what}=[{given!r}]")
    names = _listed(what, given)
    if not all(isinstance(name, str) for name in names):
        raise InputError(f"{what}={given!r} is not a list of names; give texts")
    return names


def _groups(what: str, given: Iterable[Iterable[str]] | None) -> tuple[tuple[str, ...], ...]:
    groups = [given] if isinstance(given, str) else _listed(what, given)
    if any(isinstance(group, str) for group in groups):
        raise InputError(
            f"{what}={given!r} is not a list of lists; write {what}=[{[*groups]!r}] for names that "
            "stay together"
        )
    return tuple(_names(what, names) for names in groups)


def _encodings(given: Iterable[str]) -> tuple[Encoding, ...]:
    """Return the encodings in the order in which they are tried."""
    # Two lists with the same names are one choice: the order in which a user writes them must not
    # give another plan, nor another fingerprint.
    names = [known_name("encoding", name, ENCODINGS) for name in _names("encodings", given)]
    return tuple(encoding for encoding in ENCODINGS if encoding in names)
