"""One capture for several lengths, against a capture for each of them."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

from pipecompile.frontend.capture import capture
from pipecompile.frontend.digest import digest
from pipecompile.frontend.open_capture import OpenCapture
from pipecompile.frontend.signature import Arguments


class Tokens(nn.Module):
    """Embeds tokens; subclasses do something with their number."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50)


class Causal(Tokens):
    """A mask and positions of as many tokens as there are, from sizes and from buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(64, 8))
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        hidden = self.embedding(tokens) + self.positions[:length]
        scores = (hidden @ hidden.mT / length**0.5).masked_fill(
            ~self.mask[:length, :length], -torch.inf
        )
        decay = torch.arange(length).flip(0).float().div(2 * length + 1)
        mixed = (scores.softmax(-1) @ hidden + decay[:, None]).view(rows * length, -1)
        return self.head(mixed).view(rows, length, 50)


class Mask(Tokens):
    """A mask of rows and columns: one length in two dimensions, and another one."""

    def forward(self, tokens: Tensor, mask: Tensor, other: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        mixed = mask @ hidden + self.embedding(other).mean(1, keepdim=True)
        return self.head(torch.cat([mixed, hidden], 1))


class Branching(Tokens):
    """Other weights for long sequences."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(hidden if tokens.shape[1] <= 10 else hidden.relu())


class Stepping(Tokens):
    """One step for each token."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, state = self.embedding(tokens), torch.zeros(tokens.shape[0], 8)
        for index in range(tokens.shape[1]):
            state = torch.tanh(state + hidden[:, index])
        return self.head(state)


class Answering(Tokens):
    """A branch on a tensor that is made of the length alone."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        if (torch.arange(tokens.shape[1]) < 10).all():
            hidden = hidden.relu()
        return self.head(hidden)


def tokens_of(rows: int, length: int) -> Arguments:
    return Arguments((torch.randint(50, (rows, length)),), {})


def masks_of(rows: int, length: int, other: int) -> Arguments:
    tokens, others = (torch.randint(50, (rows, each)) for each in (length, other))
    return Arguments((tokens, torch.randn(rows, length, length), others), {})


def opened(model: nn.Module, calls: list[Arguments]) -> OpenCapture | None:
    return OpenCapture.of(capture(model, calls[0]), calls[0], calls[1:], ())


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=8, n_layer=2, n_head=2, n_positions=32, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def signals_of(rows: int, length: int) -> Arguments:
    return Arguments((torch.randn(rows, 2, length),), {})


SEQUENCES = [tokens_of(2, 16), tokens_of(4, 8), tokens_of(3, 23)]


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        pytest.param(Causal(), SEQUENCES, id="causal"),
        pytest.param(gpt2(), SEQUENCES, id="gpt2"),
        pytest.param(llama(), SEQUENCES, id="llama"),
        pytest.param(
            Mask(), [masks_of(2, 6, 9), masks_of(3, 5, 4), masks_of(4, 9, 5)], id="two lengths"
        ),
        pytest.param(
            nn.Sequential(nn.Conv1d(2, 4, 3, stride=2), nn.BatchNorm1d(4), nn.AdaptiveAvgPool1d(1)),
            [signals_of(2, 16), signals_of(2, 9), signals_of(5, 31)],
            id="signals",
        ),
        pytest.param(
            # As many samples as tokens: a symbol for both would be wrong, so another is recorded.
            *(Causal(), [tokens_of(8, 8), tokens_of(8, 12), tokens_of(4, 4)]),
            id="as many samples as tokens",
        ),
    ],
)
def test_a_graph_for_each_length_is_that_of_a_capture_for_it(
    model: nn.Module, calls: list[Arguments]
) -> None:
    shared = opened(model, calls)
    assert shared is not None
    for call in calls:
        placed = shared.at(call)
        assert placed is not None
        alone = capture(model, call)
        assert digest(placed.instantiate(call)) == digest(alone.instantiate(call))
        # Where outputs have the batch is told by the first capture.
        assert placed.outputs == alone.outputs
        assert placed.guards.is_fixed == alone.guards.is_fixed


@pytest.mark.parametrize("model", [Branching(), Answering()])
def test_a_length_that_takes_another_branch_is_not_in_it(model: nn.Module) -> None:
    shared = opened(model, [tokens_of(2, 6), tokens_of(2, 16), tokens_of(2, 8)])
    assert shared is not None
    assert [shared.at(tokens_of(3, length)) is None for length in (4, 10, 11, 16)] == [
        *(False, False, True, True)
    ]


def test_sizes_of_one_symbol_stay_equal() -> None:
    shared = opened(Mask(), [masks_of(2, 6, 9), masks_of(3, 5, 4), masks_of(4, 9, 5)])
    assert shared is not None
    tokens, other = (torch.ones(2, length, dtype=torch.int64) for length in (6, 9))
    assert shared.at(Arguments((tokens, torch.ones(2, 6, 7), other), {})) is None


@pytest.mark.parametrize(
    ("model", "calls"),
    [
        pytest.param(Stepping(), SEQUENCES, id="a number of each length"),
        pytest.param(Causal(), SEQUENCES[:2], id="one further shape"),
        pytest.param(
            nn.Linear(4, 4),
            [Arguments((torch.randn(2, *sizes, 4),), {}) for sizes in ((3,), (5,), (2, 3))],
            id="another number of dimensions",
        ),
        pytest.param(
            nn.Conv2d(3, 4, 3),
            [
                Arguments((torch.randn(2, 3, *sizes),), {})
                for sizes in ((16, 16), (16, 12), (9, 20))
            ],
            id="height and width",
        ),
    ],
)
def test_others_are_captured_for_each_shape(model: nn.Module, calls: list[Arguments]) -> None:
    assert opened(model, calls) is None
