"""Tied parameters: which stages read one, and which stage owns it."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.graph.ties import Tie, names_of_read_state, ties_of
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.place import Place


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(tokens) * self.scale)
        return self.head((hidden * self.scale).relu())


def tied(stages: dict[str, int]) -> tuple[fx.GraphModule, dict[str, Tie]]:
    model = Tied()
    call = arguments_of(model, torch.arange(6) % 8)
    captured = capture(model, call)
    module = captured.instantiate(call)
    names = [node.name for node in module.graph.nodes if node.op != "get_attr"]
    apply_passes(module.graph, [Place({name: stages.get(name, 0) for name in names})])
    canonical = {
        alias: name for name, aliases in captured.aliases.items() for alias in (name, *aliases)
    }
    return module, ties_of(module, module.graph, canonical)


CUT = {"norm": 1, "mul_1": 1, "relu": 1, "head": 2, "output": 2}


def test_a_tied_parameter_is_on_all_stages_that_read_it_and_the_first_owns_it() -> None:
    _, ties = tied(CUT)
    assert ties["embedding.weight"] == Tie("embedding.weight", (0, 2))
    assert ties["embedding.weight"].owner == 0
    assert "head.weight" not in ties


def test_a_parameter_that_two_stages_read_is_tied_too() -> None:
    assert tied(CUT)[1]["scale"] == Tie("scale", (0, 1))


def test_other_parameters_and_buffers_have_one_stage() -> None:
    others = {name: tie.stages for name, tie in tied(CUT)[1].items() if name.startswith("norm.")}
    assert others == dict.fromkeys(
        [
            "norm.weight",
            "norm.bias",
            "norm.running_mean",
            "norm.running_var",
            "norm.num_batches_tracked",
        ],
        (1,),
    )


def test_one_stage_has_no_ties() -> None:
    assert {tie.stages for tie in tied({})[1].values()} == {(0,)}


def test_names_of_read_state() -> None:
    module, _ = tied({})
    reads = {node.name: names_of_read_state(module, node) for node in module.graph.nodes}
    assert reads["head"] == ["head.weight"]
    assert [reads[node.name] for node in module.graph.nodes if node.op == "get_attr"] == [["scale"]]
    assert reads["relu"] == []
