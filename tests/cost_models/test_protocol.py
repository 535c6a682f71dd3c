"""The protocol of cost models, and the example of it in docs/design/cost-models.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from pipecompile.api.costs import cost_model
from pipecompile.cost_models.protocol import CostModel
from pipecompile.profiling.profile import profile

PAGE = Path(__file__).parents[2] / "docs" / "design" / "cost-models.md"


def example() -> Any:
    """The class of the section "Adding one", made by the code of the page alone."""
    section = PAGE.read_text().partition("## Adding one")[2]
    block = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert block is not None
    namespace: dict[str, Any] = {"__name__": "an_added_cost_model"}
    # The page has no __future__ import, which code would otherwise inherit from this file.
    exec(compile(block[1], str(PAGE), "exec", dont_inherit=True), namespace)
    return namespace["Constant"]()


def test_the_example_of_the_page_makes_a_cost_graph() -> None:
    graph = profile(fx.symbolic_trace(nn.Linear(2, 2)), [torch.ones(1, 2)], example())
    # Of the three nodes only the module computes.
    assert sorted(node.forward_ns for node in graph.nodes) == [0, 0, 1]
    # A model that says so is never printed in seconds; nothing else has to be told.
    assert graph.time_unit == "relative"


@pytest.mark.parametrize("costs", ["flops", "measured", "roofline:h100", "function"])
def test_every_cost_model_has_all_members_and_the_page_names_them(costs: str) -> None:
    members = {name for name in vars(CostModel) if not name.startswith("_")}
    assert {"cost", "time_unit", "reproducible"} <= members
    assert members <= set(dir(example()))
    assert members <= set(dir(cost_model(costs, lambda node, call: 1)))
