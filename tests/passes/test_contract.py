from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import fx

from pipecompile.passes.contract import apply_passes


def graph() -> fx.Graph:
    made = fx.Graph()
    made.output(made.call_function(torch.sin, (made.placeholder("x"),)))
    return made


@dataclass(frozen=True)
class Fine:
    def requires(self, graph: fx.Graph) -> None: ...

    def __call__(self, graph: fx.Graph) -> None: ...

    def ensures(self, graph: fx.Graph) -> None: ...


class Needy(Fine):
    def requires(self, graph: fx.Graph) -> None:
        raise AssertionError("something must come first")


class Liar(Fine):
    def ensures(self, graph: fx.Graph) -> None:
        raise AssertionError("it was not done")


class Marks(Fine):
    def __call__(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            node.meta["seen"] = True

    def ensures(self, graph: fx.Graph) -> None:
        assert all(node.meta["seen"] for node in graph.nodes)


def test_a_broken_requirement_names_the_pass_and_those_before_it() -> None:
    with pytest.raises(
        AssertionError, match=r"^pass Needy failed after passes \['Fine', 'Marks'\]: something must"
    ):
        apply_passes(graph(), [Fine(), Marks(), Needy(), Fine()])


def test_a_broken_promise_names_the_pass_and_those_before_it() -> None:
    with pytest.raises(
        AssertionError, match=r"^pass Liar failed after passes \['Fine'\]: it was not done"
    ):
        apply_passes(graph(), [Fine(), Liar()])


def test_passes_run_in_order_on_the_graph_itself() -> None:
    made = graph()
    apply_passes(made, [Fine(), Marks()])
    assert all(node.meta["seen"] for node in made.nodes)
