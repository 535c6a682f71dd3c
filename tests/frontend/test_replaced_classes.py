"""Objects whose class, table of attributes or bases are replaced after a compile, and classes that
get what they had not: a step says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipecompile import Pipeline, pipecompile
from pipecompile.errors import InputError

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """Reads an attribute that is there, and three that may come."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.config.scale * getattr(self.config, "gain", 1.0)
        hidden = hidden * getattr(self, "weight_of_all", 1.0)
        if hasattr(self.config, "offset"):
            hidden = hidden + self.config.offset
        return self.last(hidden)


def of_class(model: Any) -> None:
    type(model.config).gain = 3.0


def of_base(model: Any) -> None:
    type(model.config).__mro__[1].offset = 1.0  # type: ignore[attr-defined]


def of_model(model: Any) -> None:
    type(model).weight_of_all = 2.0


def other_class(model: Any) -> None:
    model.config.__class__ = type("Other", type(model.config).__bases__, {})


def other_bases(model: Any) -> None:
    base = type("OtherBase", (), {"scale": 5.0})
    type(model.config).__bases__ = (base,)


def other_table(model: Any) -> None:
    model.config.__dict__ = {"scale": 3.0}


def equal_table(model: Any) -> None:
    """What is written to it later would not be seen in the old one."""
    model.config.__dict__ = dict(vars(model.config))


CHANGES: dict[Callable[[Any], None], str] = {
    of_class: r"Config\.gain has changed",
    of_base: r"Base\.offset has changed",
    of_model: r"Own\.weight_of_all has changed",
    other_class: "the class of config has changed",
    other_bases: r"the bases of .*Config has changed",
    other_table: r"config\.(scale|__dict__) has changed",
    equal_table: r"config\.__dict__ has changed",
}


def own_model() -> nn.Module:
    class Base:
        scale = 2.0

    class Config(Base):
        pass

    class Own(Scaled):
        pass

    config = Config()
    config.scale = 2.0
    return Own(config)


def compiled(model: nn.Module) -> Pipeline:
    loss = nn.functional.mse_loss
    return pipecompile(model, X, k=2, microbatches=2, costs="flops", loss_fn=loss, sample_target=X)


@pytest.mark.parametrize("change", CHANGES)
def test_a_step_names_what_was_replaced(change: Callable[[Any], None]) -> None:
    model = own_model()
    pipeline = compiled(model)
    pipeline.step(X, X)
    change(model)
    with pytest.raises(InputError, match=CHANGES[change]):
        pipeline.step(X, X)


def test_attributes_that_no_code_names_may_come() -> None:
    model: Any = own_model()
    pipeline = compiled(model)
    type(model).author = type(model.config).author = "somebody"
    vars(model.config).update(author="somebody else")
    model.config.steps = 1
    pipeline.step(X, X)
    pipeline.evaluate(X)
