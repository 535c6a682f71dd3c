"""Layouts as people write them: which format they are, and what does not parse."""

from __future__ import annotations

from enum import Enum

import pytest

from pipecompile.errors import InputError
from pipecompile.layouts.layout_text import layout_text, read_layout
from pipecompile.layouts.megatron import megatron_text, string_stages

# Published layouts: stages a rank × ranks, the layers of the model, and its MTP layers.
PUBLISHED = {
    "llama3-405b-paper": ("E|(t|)*126L", 16 * 8, 126, 0),
    "llama3-70b-h100-fp8": ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8 * 5, 80, 0),
    "deepseek-v3-h100": ("Et|(tt|)*30mL", 8 * 4, 61, 1),
    "deepseek-v3-megatron-docs": ("Et*3|(tt|)*29,m|L", 16 * 2, 61, 1),
    "deepseek-v3-bridge-8x1": ("Et*8|(t*8|)*6t*5mL", 8, 61, 1),
    "kimi-k2-h100": ("Et|(tt|)*30L", 16 * 2, 61, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_layouts_have_the_stages_and_layers_of_their_models(name: str) -> None:
    text, k, layers, mtp = PUBLISHED[name]
    layout = read_layout(text)
    assert (layout.format, layout.k) == ("megatron", k)
    symbols = [symbol for stage in layout.stages for symbol in stage]
    assert (symbols.count("t"), symbols.count("m")) == (layers, mtp)
    assert (symbols[0], symbols[-1]) == ("E", "L")
    assert string_stages(megatron_text(layout.stages)) == layout.stages


class SplitPoint(Enum):
    """As torch.distributed.pipelining has it."""

    BEGINNING = 1
    END = 2


@pytest.mark.parametrize(
    ("given", "form", "stages"),
    [
        ("Et*2|((t|)*2m)*1,L", "megatron", ("Ett", "t", "t", "mL")),
        ("--pipeline-model-parallel-layout 'Et|tL'", "megatron", ("Et", "tL")),
        ([["embedding", "decoder"], ["decoder", "loss"]], "megatron", ("Et", "tL")),
        ("*-*E|*-", "megatron-hybrid", ("*-*E", "*-")),
        ("33,28", "vllm", ("t" * 33, "t" * 28)),
        ([2, 1], "vllm", ("tt", "t")),
        ("SGLANG_PP_LAYER_PARTITION=2,1", "sglang", ("tt", "t")),
        ('[["embed", "layers.0"], ["head"]]', "json", (("embed", "layers.0"), ("head",))),
        ("module_fqns_per_model_part=[['embed'], ['head']]", "torchtitan", (("embed",), ("head",))),
        ({"l.4": SplitPoint.BEGINNING}, "split-spec", ((), ("l.4", "BEGINNING"))),
        ('{"l.4": SplitPoint.END}', "split-spec", ((), ("l.4", "END"))),
        ({"a": "cuda:9", "b": "cuda:10", "c": 9}, "device-map", (("a", "c"), ("b",))),
    ],
)
def test_formats_are_told_apart_by_their_form(given: object, form: str, stages: object) -> None:
    layout = read_layout(layout_text(given))
    assert layout.format == form
    assert layout.stages == tuple(tuple(stage) for stage in stages)  # type: ignore[attr-defined]


def test_a_format_that_is_given_decides() -> None:
    assert read_layout("2,1", "sglang").format == "sglang"
    assert read_layout('[["embedding"], ["loss"]]', "json").stages == (("embedding",), ("loss",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "is empty"),
        ("Etx|L", r"no known form.*megatron"),
        ("Et|(tL", r"has '\(', which is no symbol"),
        ("(t*999999)*99", "more than 100,000 symbols"),
        ("*M|*-", "'M', but of its symbols only"),
        ('[["a"', "neither JSON nor"),
        ('{"a": 0, "a": 1}', "names 'a' twice"),
        ({"a": "cpu"}, r"'a' on 'cpu'; stages are devices with numbers"),
        ('{"a": SplitPoint.BEGINNING, "b": 3}', "'a' on 'BEGINNING'"),
        ("VLLM_PP_LAYER_PARTITION=a", "none of the format vllm"),
        (3, "neither a text nor"),
    ],
)
def test_what_is_no_layout_is_refused_with_what_is(given: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_layout(layout_text(given))


def test_a_name_and_another_format_disagree() -> None:
    with pytest.raises(InputError, match="named as one of vllm, but layout_format is 'json'"):
        read_layout("VLLM_PP_LAYER_PARTITION=1,2", "json")
