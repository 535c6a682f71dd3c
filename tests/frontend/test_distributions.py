"""Distributions of torch in a forward: they look at the values of their parameters, and a graph
goes on looking.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.nn import functional

from pipecompile import InputError, pipecompile

WIDTH = 4
X = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))


def normal(mean: Tensor, raw: Tensor) -> Tensor:
    own = distributions.Normal(mean, functional.softplus(raw) + 0.1)
    sample = own.rsample()
    return sample + own.log_prob(sample)


def divergence(mean: Tensor, raw: Tensor) -> Tensor:
    own, prior = distributions.Normal(mean, raw.exp()), distributions.Normal(0.0, 1.0)
    return own.rsample() + distributions.kl_divergence(own, prior)


def categorical(mean: Tensor, raw: Tensor) -> Tensor:
    own = distributions.Categorical(logits=mean)
    action = own.sample()
    return functional.one_hot(action, WIDTH) * raw + own.log_prob(action)[:, None]


def several(mean: Tensor, raw: Tensor) -> Tensor:
    own = distributions.MultivariateNormal(mean, torch.eye(WIDTH) * 0.3)
    return own.rsample() + own.log_prob(raw)[:, None]


def mixture(mean: Tensor, raw: Tensor) -> Tensor:
    parts = distributions.Normal(raw, torch.ones_like(raw))
    own = distributions.MixtureSameFamily(distributions.Categorical(logits=mean), parts)
    return own.log_prob(mean[:, 0])[:, None] + raw


def squashed(mean: Tensor, raw: Tensor) -> Tensor:
    base = distributions.Independent(distributions.Normal(mean, raw.exp()), 1)
    own = distributions.TransformedDistribution(base, [distributions.TanhTransform(cache_size=1)])
    sample = own.rsample()
    return sample + own.log_prob(sample)[:, None]


def relaxed(mean: Tensor, raw: Tensor) -> Tensor:
    temperature = torch.tensor(0.5)
    return distributions.RelaxedOneHotCategorical(temperature, logits=mean).rsample() + raw


def coins(mean: Tensor, raw: Tensor) -> Tensor:
    own = distributions.Bernoulli(logits=mean)
    return own.log_prob(own.sample()) + raw


def beta(mean: Tensor, raw: Tensor) -> Tensor:
    return distributions.Beta(functional.softplus(mean) + 1, functional.softplus(raw) + 1).rsample()


def unchecked(mean: Tensor, raw: Tensor) -> Tensor:
    return distributions.Normal(mean, raw.exp(), validate_args=False).rsample()


class Model(nn.Module):
    """Parameters of a distribution, what is made of it, and a layer."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.parameters_of = nn.Linear(WIDTH, 2 * WIDTH)
        self.function = function
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        mean, raw = self.parameters_of(x).chunk(2, -1)
        return self.last(self.function(mean, raw))


def compiled(function: Callable[[Tensor, Tensor], Tensor], x: Tensor = X, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"k": 2, "microbatches": 2, "costs": "flops", **options}
    return pipecompile(Model(function), x, loss_fn=lambda o, _: o.square().mean(), **options)


@pytest.mark.parametrize("options", [{}, {"schedule": "zb-h1"}, {"recompute": "stage"}])
@pytest.mark.parametrize(
    "function",
    [
        *(normal, divergence, categorical, several, mixture, squashed, relaxed, coins, beta),
        unchecked,
    ],
)
def test_they_are_captured_and_train(function: Any, options: dict[str, Any]) -> None:
    pipeline = compiled(function, **options)
    assert pipeline.plan.capture.verified
    pipeline.step(X)
    for name, parameter in pipeline.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_what_a_distribution_does_not_allow_is_an_error_of_the_step() -> None:
    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return distributions.Normal(self.layer(x), x).rsample()

    positive = X.abs() + 0.1
    options = {"k": 2, "microbatches": 2, "costs": "flops"}
    pipeline = pipecompile(Signed(), positive, loss_fn=lambda o, _: o.square().mean(), **options)
    pipeline.step(positive)
    # From torch 2.15 on the distribution itself asks so.
    words = "outside of what the distribution allows|satisfy its distribution constraint"
    with pytest.raises(InputError, match=words):
        pipeline.step(X)
    pipeline.step(positive)
