"""A searched schedule on a real model: shorter than 1F1B in the same memory, and the same
gradients.
"""

from __future__ import annotations

import pytest

from examples import models
from pipecompile.api.options import options_for
from pipecompile.api.plan import make_plan
from pipecompile.api.soundness import findings
from pipecompile.api.verification import verify
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import capture_target
from pipecompile.ir.plan import Plan


def planned(target: Target, schedule: str, memory: int | None = None) -> Plan:
    options = options_for(
        target, k=4, microbatches=8, costs="flops", schedule=schedule, memory=memory
    )
    return make_plan(target, options, capture_target(target, options, verify=False))


@pytest.mark.sweep
def test_a_searched_step_is_never_longer_than_1f1b_in_the_same_memory() -> None:
    target = Target.of(models.gpt2(), "gpt2")
    named = planned(target, "1f1b")
    held = max(memory.total.bound for memory in named.prediction.memory)
    searched = planned(target, "search", held)
    assert findings(searched) == []
    assert max(memory.total.bound for memory in searched.prediction.memory) <= held
    assert searched.prediction.step_ns <= named.prediction.step_ns


@pytest.mark.sweep
def test_a_searched_step_is_shorter_than_1f1b_in_half_as_much_memory_again_and_exact() -> None:
    target = Target.of(models.gpt2(), "gpt2")
    named = planned(target, "1f1b")
    held = max(memory.total.bound for memory in named.prediction.memory) * 3 // 2
    searched, comparisons = verify(
        target, self_check=False, k=4, microbatches=8, costs="flops", schedule="search", memory=held
    )
    assert findings(searched) == []
    assert max(memory.total.bound for memory in searched.prediction.memory) <= held
    assert searched.prediction.step_ns < named.prediction.step_ns
    assert all(not [d for d in c.differences if not d.equal] for c in comparisons)
