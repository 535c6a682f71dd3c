"""Megatron-LM's layouts: strings of symbols, nested lists of words, and hybrid patterns.

`Et*3|(tt|)*29,m|L` is --pipeline-model-parallel-layout: | parts stages, x*n and (…)*n repeat, and
commas mean nothing (docs/user-guide/features/pipeline_parallel_layout.md there).
`*-*-|*-*-` is --hybrid-layer-pattern, whose symbols are the halves of layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from pipecompile.errors import InputError
from pipecompile.layouts.layout import HYBRID_ATTENTION, HYBRID_MLP, SYMBOLS

__all__ = ["hybrid_stages", "megatron_text", "stages_of_lists", "string_stages"]

Stages = tuple[tuple[str, ...], ...]
MOST = 100_000  # symbols: a mistyped repetition must not fill the memory
_WORDS = {word: symbol for symbol, word in SYMBOLS.items()}
_REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)|([A-Za-z|])\*(\d+)")


def string_stages(text: str) -> Stages:
    """Return the symbols of each stage; InputError names the first thing that is none."""
    expanded = re.sub(r"[\s,]", "", text)
    # From the inside out: of ((t|)*2E)*3 first (t|)*2, then the rest.
    while match := _REPEATED.search(expanded):
        part, times = match[1] if match[1] is not None else match[3], int(match[2] or match[4])
        if len(expanded) + len(part) * times > MOST:
            raise InputError(f"the layout has more than {MOST:,} symbols at {match[0]!r}")
        expanded = expanded[: match.start()] + part * times + expanded[match.end() :]
    wrong = re.search(r"[^EtmL|]", expanded)
    if wrong is not None:
        raise InputError(
            f"the layout {text!r} has {wrong[0]!r}, which is no symbol of Megatron's; write E, t, "
            "m, L, | between stages, and x*n or (…)*n for repetitions"
        )
    return tuple(tuple(stage) for stage in expanded.split("|"))


def stages_of_lists(stages: Sequence[Sequence[str]]) -> Stages:
    """Return the symbols for a nested list of words, such as [["embedding", "decoder"], …]."""
    for word in (word for stage in stages for word in stage):
        if word not in _WORDS:
            raise InputError(
                f"the layout has {word!r}, which is no word of Megatron's; choose from "
                f"{', '.join(_WORDS)}"
            )
    return tuple(tuple(_WORDS[word] for word in stage) for stage in stages)


def hybrid_stages(text: str) -> Stages:
    """Return the symbols of each stage of a hybrid pattern; InputError if one is not supported."""
    wrong = re.search(rf"[^{re.escape(HYBRID_ATTENTION + HYBRID_MLP)}|\s]", text)
    if wrong is not None:
        raise InputError(
            f"the hybrid pattern {text!r} has {wrong[0]!r}, but of its symbols only those of "
            f"attention ({' '.join(HYBRID_ATTENTION)}) and MLP ({' '.join(HYBRID_MLP)}) are read"
        )
    return tuple(tuple(stage) for stage in re.sub(r"\s", "", text).split("|"))


def megatron_text(stages: Iterable[Sequence[str]]) -> str:
    """Return the string for symbols of stages, with repetitions: Ett|(tt|)*3L."""
    # Each stage except the last one ends with its |.
    parts = [_run_text(stage) for stage in stages]
    rows = [f"{part}|" for part in parts[:-1]] + parts[-1:]
    text = ""
    for row, same in groupby(rows):
        count = len(list(same))
        text += row if count == 1 else f"({row})*{count}"
    return text


def _run_text(symbols: Sequence[str]) -> str:
    text = ""
    for symbol, same in groupby(symbols):
        count = len(list(same))
        # tt is as long as t*2, and easier to read.
        text += symbol * count if count < 3 else f"{symbol}*{count}"
    return text
