"""FLOPs and bytes against closed formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from pipecompile.cost_models.flops import Flops
from pipecompile.graph.torch_repairs import repair_torch
from pipecompile.ir import serialization as serde
from pipecompile.ir.graph import CostGraph, Node
from pipecompile.profiling.profile import profile

FLOAT = 4


def profiled(model: nn.Module, *inputs: Tensor) -> CostGraph:
    return profile(fx.symbolic_trace(model), inputs, Flops())


def only(graph: CostGraph) -> Node:
    """The one node that computes."""
    (node,) = (node for node in graph.nodes if node.operator not in ("placeholder", "output"))
    return node


def compute_ns(flops: int) -> int:
    return -(-flops // 10_000)


def memory_ns(size: int) -> int:
    return -(-size // 1_000)


def wanting(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


def test_linear_is_two_flops_a_multiply_add_and_each_half_of_its_backward_as_much() -> None:
    node = only(profiled(nn.Sequential(nn.Linear(512, 1024)), wanting(128, 512)))
    forward = 2 * 128 * 512 * 1024
    assert node.operator == "torch.nn.Linear"
    assert node.forward_ns == compute_ns(forward)
    assert node.backward_input_ns == compute_ns(forward)
    assert node.backward_weight_ns == compute_ns(forward)
    assert node.backward_ns == compute_ns(2 * forward)


def test_convolution() -> None:
    node = only(
        profiled(nn.Sequential(nn.Conv2d(32, 64, 3, stride=2, padding=1)), wanting(4, 32, 32, 32))
    )
    forward = 2 * (4 * 64 * 16 * 16) * (32 * 3 * 3)
    assert node.forward_ns == compute_ns(forward)
    assert node.backward_input_ns == compute_ns(forward)
    assert node.backward_weight_ns == compute_ns(forward)


class Product(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.matmul(left, right)


def test_matmul_has_no_weights() -> None:
    node = only(profiled(Product(), wanting(8, 256, 384), wanting(8, 384, 512)))
    forward = 2 * 8 * 256 * 384 * 512
    assert node.operator == "torch.matmul"
    assert node.forward_ns == compute_ns(forward)
    assert node.backward_ns == node.backward_input_ns == compute_ns(2 * forward)
    assert node.backward_weight_ns == 0


class Experts(nn.Module):
    """Four experts, each with the tokens that a router has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 384, 512, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor, experts: Tensor) -> Tensor:
        # As CUDA has it: the CPU counts no integers.
        counts = torch.histc(experts.int(), bins=4, min=0, max=3)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        return functional.grouped_mm(tokens, self.weight, offs=ends)


def test_the_products_of_experts_are_as_much_as_one_of_all_tokens() -> None:
    repair_torch()
    tokens = torch.randn(4096, 384, dtype=torch.bfloat16, requires_grad=True)
    graph = profiled(Experts(), tokens, torch.zeros(4096, dtype=torch.int64))
    node = max(graph.nodes, key=lambda each: each.forward_ns)
    forward = 2 * 4096 * 384 * 512
    assert node.forward_ns == compute_ns(forward)
    assert node.backward_input_ns == node.backward_weight_ns == compute_ns(forward)


class Attention(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(query, key, value)


def test_attention_is_two_products_and_five_in_its_backward() -> None:
    """The fused kernel recomputes the scores, then computes four gradients."""
    node = only(profiled(Attention(), *(wanting(2, 8, 256, 64) for _ in range(3))))
    product = 2 * (2 * 8) * 256 * 256 * 64
    assert node.forward_ns == compute_ns(2 * product)
    assert node.backward_ns == compute_ns(5 * product)


def test_an_elementwise_operator_costs_the_bytes_it_moves() -> None:
    node = only(profiled(nn.Sequential(nn.ReLU()), wanting(1000, 1000)))
    size = 1000 * 1000 * FLOAT
    assert node.forward_ns == memory_ns(2 * size)  # reads one, writes one
    assert node.backward_ns == memory_ns(
        3 * size
    )  # reads the gradient and the value, writes a gradient


def test_an_embedding_reads_the_rows_it_returns_and_writes_the_gradient_of_the_whole_table() -> (
    None
):
    node = only(
        profiled(nn.Sequential(nn.Embedding(50_000, 64)), torch.zeros(4, 128, dtype=torch.long))
    )
    indices, rows, table = 4 * 128 * 8, 4 * 128 * 64 * FLOAT, 50_000 * 64 * FLOAT
    assert node.forward_ns == memory_ns(indices + 2 * rows)
    assert node.backward_ns == node.backward_weight_ns == memory_ns(indices + 2 * rows + table)
    assert node.backward_input_ns == 0


class Views(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        left, _ = image.flatten(1).chunk(2, dim=1)
        return left.transpose(0, 1)


def test_views_are_free() -> None:
    graph = profiled(Views(), wanting(4, 8, 8))
    assert {node.operator for node in graph.nodes} >= {
        "Tensor.flatten",
        "Tensor.chunk",
        "operator.getitem",
    }
    assert all(node.forward_ns == node.backward_ns == 0 for node in graph.nodes)


class InPlace(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return (image * 2).relu_()


def test_an_in_place_operator_is_no_view() -> None:
    node = profiled(InPlace(), wanting(1000, 1000)).by_name["relu_"]
    size = 1000 * 1000 * FLOAT
    assert node.forward_ns == memory_ns(2 * size)
    assert node.backward_ns == memory_ns(3 * size)


def test_frozen_parameters_have_no_backward() -> None:
    node = only(profiled(nn.Sequential(nn.Linear(64, 64).requires_grad_(False)), wanting(8, 64)))
    assert node.backward_weight_ns == 0
    assert node.backward_ns == node.backward_input_ns


def test_data_that_needs_no_gradient_has_none() -> None:
    node = only(profiled(nn.Sequential(nn.Linear(64, 64)), torch.randn(8, 64)))
    assert node.backward_input_ns == 0
    assert node.backward_ns == node.backward_weight_ns


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(288, 4),
    )


def test_the_same_bytes_every_time() -> None:
    image = torch.randn(2, 3, 8, 8)
    assert serde.encode(profiled(network(), image)) == serde.encode(profiled(network(), image))


class Logits(nn.Module):
    def forward(self, logits: Tensor) -> tuple[Tensor]:
        return (logits,)


def cross_entropy(outputs: Any, targets: Any) -> Tensor:
    return functional.cross_entropy(outputs[0], targets[0])


def test_the_loss_is_the_cost_of_the_output_node() -> None:
    trace, logits, labels = (
        fx.symbolic_trace(Logits()),
        wanting(64, 32_000),
        torch.zeros(64, dtype=torch.long),
    )
    without = profile(trace, [logits], Flops()).by_name["output"]
    node = profile(trace, [logits], Flops(), loss=cross_entropy, targets=[labels]).by_name["output"]
    size = 64 * 32_000 * FLOAT
    assert without.forward_ns == without.backward_ns == without.saved_bytes == 0
    assert node.forward_ns == memory_ns(size + 64 * 8 + FLOAT)
    assert node.saved_bytes >= size  # the log-probabilities


@pytest.mark.parametrize("key_heads", [8, 2])
def test_attention_with_fewer_key_heads_computes_as_much(key_heads: int) -> None:
    class Grouped(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    key, value = (wanting(2, key_heads, 256, 64) for _ in range(2))
    node = only(profiled(Grouped(), wanting(2, 8, 256, 64), key, value))
    assert node.forward_ns == compute_ns(4 * (2 * 8) * 256 * 256 * 64)
