"""Small models with layers of their own: mixtures of experts, subclasses, parametrizations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .modules import VOCABULARY, WIDTH, Block, language, normal, regression


class DenseMixture(nn.Module):
    """All experts see all tokens; the gate weighs their answers."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts)
        self.expand = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH**0.5)
        self.contract = nn.Parameter(torch.randn(experts, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("...i,eih->...eh", x, self.expand).relu()
        return x + torch.einsum(
            "...e,...eh,eho->...o", self.gate(x).softmax(dim=-1), hidden, self.contract
        )


def moe_einsum() -> dict[str, Any]:
    """A dense mixture of experts in einsums over parameters of no module of torch's."""
    return regression(
        lambda: nn.Sequential(DenseMixture(), Block(), DenseMixture(), Block(), nn.Linear(WIDTH, 4))
    )


class DispatchMixture(nn.Module):
    """Each token goes to two of four experts; each expert is given its tokens only."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(dim=-1).topk(2, dim=-1)
        result = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, places = torch.nonzero(chosen == index, as_tuple=True)
            result.index_add_(0, rows, expert(tokens[rows]).relu() * weights[rows, places, None])
        return x + result.view_as(x)


def dispatch_moe() -> dict[str, Any]:
    """A mixture of experts by nonzero and index_add, with data-dependent shapes inside modules."""

    def model() -> nn.Module:
        layers = (Block(), DispatchMixture(), Block(), DispatchMixture(), Block())
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))

    return language(model)


class PaddedConvolution(nn.Conv2d):
    """Keeps the image's size; the forward is torch's."""

    def __init__(self, inputs: int, outputs: int, size: int = 3) -> None:
        super().__init__(inputs, outputs, size, padding=size // 2)


class StandardizedConvolution(PaddedConvolution):
    """Its filters are standardized at each call."""

    def forward(self, input: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        return self._conv_forward(input, (self.weight - mean) / (variance + 1e-5).sqrt(), self.bias)


class ActivatedNorm(nn.BatchNorm2d):
    """Batch normalisation with its activation."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.silu(super().forward(input))


class ScaledLinear(nn.Linear):
    """A linear layer with a learned scale."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.ones(outputs))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


def subclasses() -> dict[str, Any]:
    """Subclasses of torch's own modules, with and without a forward of their own."""

    def model() -> nn.Module:
        convolutions = (
            PaddedConvolution(3, 8),
            ActivatedNorm(8),
            StandardizedConvolution(8, 8),
            ActivatedNorm(8),
        )
        return nn.Sequential(
            *convolutions, nn.AdaptiveAvgPool2d(2), nn.Flatten(), ScaledLinear(32, 4)
        )

    return regression(model, normal(3, 16, 16))


def parametrized() -> dict[str, Any]:
    """Weights computed from parameters at each call; spectral_norm also updates its buffers."""

    def model() -> nn.Module:
        normed = [parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        bounded = [parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        pairs = [
            layer for pair in zip(normed, bounded, strict=True) for layer in (*pair, nn.GELU())
        ]
        return nn.Sequential(*pairs, parametrizations.weight_norm(nn.Linear(WIDTH, 4)))

    return regression(model)


CUSTOM_LAYERS: dict[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (moe_einsum, dispatch_moe, subclasses, parametrized)
}
