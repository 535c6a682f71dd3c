"""The most layers that fit, against every cut; and the parameters of the GPipe paper's table 1."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from benchmarks.deep_plans import LayerCapacity, plan_layers
from benchmarks.gpipe_memory import FORMATS, PAPER, Format, even_layers
from benchmarks.gpipe_models import Transformer, token_loss
from pipecompile.api.costs import cost_graph
from pipecompile.api.options import options_for
from pipecompile.errors import InfeasibleError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target


def small(recompute: str, mebibytes: int) -> LayerCapacity:
    """Return three stages of a narrow Transformer, four microbatches."""
    with torch.device("meta"):
        model, tokens = Transformer(3, 64), torch.zeros(4, 128, dtype=torch.long)
    target = Target(model, arguments_of(model, tokens), token_loss, tokens)
    options = options_for(
        target,
        k=3,
        microbatches=4,
        memory=mebibytes << 20,
        optimizer="rmsprop",
        costs="flops",
        recompute=recompute,
    )
    return LayerCapacity(
        cost_graph(target, "flops", 4, capture_target(target, options, verify=False)), options
    )


def fits(capacity: LayerCapacity, layers: tuple[int, ...]) -> bool:
    try:
        plan_layers(capacity.shallow, capacity.options, layers)
    except InfeasibleError:
        return False
    return True


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize(("recompute", "mebibytes"), [("none", 120), ("stage", 100), ("auto", 90)])
def test_no_cut_between_layers_has_one_more(recompute: str, mebibytes: int) -> None:
    capacity = small(recompute, mebibytes)
    assert fits(capacity, capacity.most_layers)
    more = sum(capacity.most_layers) + 1
    cuts = [
        (first, middle, more - first - middle)
        for first in range(1, more)
        for middle in range(1, more - first)
    ]
    assert not [cut for cut in cuts if fits(capacity, cut)]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_parameters_take_what_the_paper_says(format: Format) -> None:
    for k in (1, 8):
        options = replace(format.options(k, 32, "1f1b", "none"), memory_bytes=None)
        plan = plan_layers(format.graph(32), options, even_layers(PAPER[k].layers, k))
        assert plan.parameter_bytes / 2**30 == pytest.approx(PAPER[k].parameter_gb, rel=0.005)


def test_layers_are_spread_even_layers() -> None:
    assert even_layers(103, 8) == [13] * 7 + [12]
    assert even_layers(9, 4) == [2, 3, 2, 2]
