"""Which nodes leave their running averages for the end of the step, and what takes their place."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.batch_statistics import DeferredBatchNorm
from pipecompile.passes.batch_norm import DeferStatistics, MarkBatchNorms
from pipecompile.passes.contract import apply_passes

X = torch.randn(8, 6)


class Norms(nn.Module):
    """Batch norms as modules, as a function, in eval mode and without averages; another norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.frozen, self.untracked = (
            nn.BatchNorm1d(6),
            nn.BatchNorm1d(6, track_running_stats=False),
        )
        self.layer = nn.LayerNorm(6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.untracked(self.frozen(self.linear(self.first(x)))))
        return functional.batch_norm(x, self.mean, self.variance, training=self.training)


class LowLevel(nn.Module):
    """It calls what `torch.batch_norm` calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        averages = self.mean, self.variance
        return torch.native_batch_norm(
            self.linear(x), None, None, *averages, self.training, 0.1, 1e-5
        )[0]


def graph(model: nn.Module) -> fx.GraphModule:
    call = Arguments((X,), {})
    return capture(model, call).instantiate(call)


def norms() -> Norms:
    model = Norms()
    model.frozen.eval()
    return model


def test_nodes_that_update_averages_are_replaced_and_no_others() -> None:
    module = graph(norms())
    apply_passes(module.graph, [MarkBatchNorms(), DeferStatistics()])
    deferred = {n.name: n.target for n in module.graph.nodes if type(n.target) is DeferredBatchNorm}
    assert {name: target.target for name, target in deferred.items()} == {
        "first": operator.call,
        "batch_norm": functional.batch_norm,
    }
    assert [n.name for n in module.graph.nodes if n.op == "call_module"] == [
        *("linear", "frozen", "untracked", "layer"),
    ]


def test_without_marks_nothing_is_replaced() -> None:
    module = graph(norms())
    code = module.code
    apply_passes(module.graph, [DeferStatistics()])
    module.recompile()
    assert module.code == code


def test_a_model_in_eval_mode_has_no_marks() -> None:
    module = graph(Norms().eval())
    apply_passes(module.graph, [MarkBatchNorms()])
    assert not any(node.meta.get("deferred") for node in module.graph.nodes)


def test_names_of_parameters_and_buffers_stay() -> None:
    module = graph(norms())
    names = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    (stage,) = emit(module, {node.name: 0 for node in module.graph.nodes}, batch_norm="minibatch")
    own = (*stage.module.named_parameters(), *stage.module.named_buffers())
    assert {name for name, _ in own} == names
    assert set(stage.written) == {"first.running_mean", "first.running_var", "mean", "variance"} | {
        "first.num_batches_tracked"
    }


def test_helpers_of_a_marked_node_are_not_replaced() -> None:
    """A boundary after a batch norm has nodes that restore the layout; they have its meta."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)).to(
        memory_format=torch.channels_last
    )
    call = Arguments((torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last),), {})
    module = capture(model, call).instantiate(call)
    stages = {name: index > 2 for index, name in enumerate(n.name for n in module.graph.nodes)}
    first, second = emit(module, stages, batch_norm="minibatch")
    assert first.outputs[0].is_permuted
    targets = [[type(n.target) for n in s.module.graph.nodes] for s in (first, second)]
    assert [names.count(DeferredBatchNorm) for names in targets] == [1, 0]


def test_a_function_below_batch_norm_is_refused() -> None:
    with pytest.raises(InputError, match="native_batch_norm calls native_batch_norm, whose"):
        apply_passes(graph(LowLevel()).graph, [MarkBatchNorms()])
    apply_passes(graph(LowLevel().eval()).graph, [MarkBatchNorms()])
