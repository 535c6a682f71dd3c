"""Layouts from text: which format it is, and what its stages have."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipecompile.errors import InputError
from pipecompile.ir.plan import LAYOUT_FORMATS, LayoutFormat
from pipecompile.layouts.layout import BEGINNING, END, SYMBOLS, Layout
from pipecompile.layouts.megatron import hybrid_stages, stages_of_lists, string_stages

__all__ = ["layout_text", "read_layout"]

# What may stand before the value, as it is copied from a command, a script or a configuration.
_NAMES: dict[str, LayoutFormat] = {
    "pipeline_model_parallel_layout": "megatron",
    "hybrid_layer_pattern": "megatron-hybrid",
    "module_fqns_per_model_part": "torchtitan",
    "split_spec": "split-spec",
    "device_map": "device-map",
    "VLLM_PP_LAYER_PARTITION": "vllm",
    "SGLANG_PP_LAYER_PARTITION": "sglang",
}
_NAMED = re.compile(r"(?:export\s+)?-{0,2}([A-Za-z][\w.-]*)[=\s]\s*(.+)", re.DOTALL)


def read_layout(text: str, form: LayoutFormat | None = None) -> Layout:
    """Return the layout that `text` is, of the format `form` or told apart by its form.

    InputError if it is of none, or has two meanings.
    """
    named, body = _without_name(text.strip())
    if form is not None and named is not None and form != named:
        raise InputError(f"the layout is named as one of {named}, but layout_format is {form!r}")
    form = form or named
    if not body:
        raise InputError("the layout is empty; write what each stage has")
    if body[0] in "[{":
        return _of_value(_value(body), form)
    return _of_string(body.strip("\"'"), form)


def layout_text(layout: object) -> str:
    """Return the text of a layout that Python was given: a text, a list or a mapping."""
    if isinstance(layout, str):
        return layout.strip()
    if not isinstance(layout, Mapping | Sequence):
        raise InputError(f"layout={layout!r} is neither a text nor a list nor a mapping")
    # torch's SplitPoint is an enum: its name says where it cuts.
    return json.dumps(layout, default=lambda value: getattr(value, "name", str(value)))


def _without_name(text: str) -> tuple[LayoutFormat | None, str]:
    """Return the format that a name before the value stands for, and the value."""
    match = _NAMED.fullmatch(text)
    if match is None:
        return None, text
    name = match[1].rpartition(".")[2].replace("-", "_")
    return (_NAMES[name], match[2].strip()) if name in _NAMES else (None, text)


def _value(text: str) -> Any:
    """Return the list or mapping in `text`, as JSON or as Python writes it."""
    # Of torch's enum only the name is wanted: {"layers.4": SplitPoint.BEGINNING}.
    plain = re.sub(r"(?:\w+\.)*SplitPoint\.(\w+)", r'"\1"', text)
    try:
        return json.loads(plain, object_pairs_hook=_without_repetition)
    except json.JSONDecodeError:
        pass
    try:
        return ast.literal_eval(plain)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise InputError(
            f"the layout {_short(text)} is neither JSON nor a list or mapping of Python"
        ) from None


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping; InputError if a key comes twice, of which JSON would keep the last."""
    mapping = dict(pairs)
    for key in mapping:
        if sum(key == other for other, _ in pairs) > 1:
            raise InputError(f"the layout names {key!r} twice; name each module once")
    return mapping


def _of_value(value: Any, form: LayoutFormat | None) -> Layout:
    if isinstance(value, Mapping):
        points = all(point in (BEGINNING, END) for point in value.values())
        form = form or ("split-spec" if points and value else "device-map")
        if form == "split-spec":
            return Layout(form, _split_points(value))
        if form == "device-map":
            return Layout(form, _devices(value))
    elif value and all(isinstance(stage, Sequence) and _texts(stage) for stage in value):
        words = {word for stage in value for word in stage}
        # A list of modules for each stage is read alike as json and as torchtitan.
        form = form or ("megatron" if words <= set(SYMBOLS.values()) else "json")
        if form == "megatron":
            return Layout(form, stages_of_lists(value))
        if form in ("json", "torchtitan"):
            return Layout(form, tuple(tuple(stage) for stage in value))
    # Not isinstance: True is an int too.
    elif value and all(type(count) is int for count in value):
        return _of_string(",".join(map(str, value)), form)
    raise _no_layout(str(value), form)


def _texts(stage: Sequence[Any]) -> bool:
    return not isinstance(stage, str) and all(isinstance(entry, str) for entry in stage)


def _of_string(text: str, form: LayoutFormat | None) -> Layout:
    if form is None:
        form = _form_of(text)
    if form == "megatron":
        return Layout(form, string_stages(text))
    if form == "megatron-hybrid":
        return Layout(form, hybrid_stages(text))
    if form in ("vllm", "sglang") and re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        return Layout(form, tuple(("t",) * int(count) for count in text.split(",")))
    raise _no_layout(text, form)


def _form_of(text: str) -> LayoutFormat | None:
    """Return the format of a text; None if it is of no known one.

    A hybrid pattern has no t, and a string for GPT-like models always has.
    """
    # vLLM and SGLang write counts alike; which of them it is changes nothing.
    if re.fullmatch(r"[\d,\s]+", text):
        return "vllm"
    if re.fullmatch(r"[EtmL|()*\d,\s]+", text) and "t" in text:
        return "megatron"
    return "megatron-hybrid" if re.fullmatch(r"[*\-+DEM/|\s]+", text) else None


def _split_points(points: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    for module, point in points.items():
        if point not in (BEGINNING, END):
            raise InputError(
                f"the split of {module!r} is {point!r}; write SplitPoint.BEGINNING or "
                "SplitPoint.END"
            )
    return ((), *((module, point) for module, point in points.items()))


def _devices(devices: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the modules of each stage: one stage for each device, by its number."""
    # By number, so that cuda:10 comes after cuda:9.
    stages: dict[int, list[str]] = {}
    for module, device in devices.items():
        match = re.fullmatch(r"(?:[a-z]+:)?(\d+)", str(device))
        if match is None:
            raise InputError(
                f"the device map has {module!r} on {device!r}; stages are devices with numbers, "
                "such as 0 or cuda:0"
            )
        stages.setdefault(int(match[1]), []).append(str(module))
    return tuple(tuple(stages[number]) for number in sorted(stages))


def _no_layout(text: str, form: LayoutFormat | None) -> InputError:
    if form is not None:
        return InputError(f"the layout {_short(text)} is none of the format {form}")
    return InputError(
        f"the layout {_short(text)} is no file and of no known form; write one of these "
        f"formats, or name it with layout_format: {', '.join(LAYOUT_FORMATS)}"
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}…")
