"""What a forward reads out of tensors that sizes alone make; and decoders that do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from plain_loop import mean_square, steps_alike
from torch import Tensor, nn

from pipecompile import InputError, pipecompile
from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import arguments_of

WIDTH = 8


class Branching(nn.Module):
    """Takes one of two layers, as `choose` says of its input."""

    def __init__(self, choose: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.choose = choose

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return (self.one if self.choose(value) else self.other)(value).tanh()


def positions(value: Tensor) -> Tensor:
    return torch.arange(value.shape[1], device=value.device)


def with_first(value: Tensor, first: int) -> Tensor:
    value[:1].fill_(first)
    return value


ANSWERS: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "all": (lambda value: (positions(value) >= 0).all(), True),
    "any": (lambda value: (positions(value).diff() != 1).any(), False),
    "item": (lambda value: positions(value).sum().item() == 28, True),
    "tolist": (lambda value: positions(value).tolist() == list(range(WIDTH)), True),
    "int": (lambda value: int(positions(value).max()) % 2, True),
    "expanded": (
        lambda value: (positions(value).expand(value.shape[0], -1).cumsum(-1)[:, -1] == 28).all(),
        True,
    ),
    "of zeros": (lambda value: torch.zeros(3, dtype=torch.bool).any(), False),
    "a draw below 0": (lambda value: torch.rand([]) < 0.0, False),
    "a draw below 1": (lambda value: torch.rand(1, 1) < 1, True),
    "a draw, not below 0": (lambda value: not torch.rand(1) >= 0, False),
    "a draw, by a function": (lambda value: torch.gt(torch.rand([]), 1.5), False),
    "a draw, as a number": (lambda value: (torch.rand([]).ge(1.0)).item(), False),
}
REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "an input": lambda value: (value > 0).all(),
    "a shape of an input, filled": lambda value: torch.zeros_like(value).add_(value).any(),
    "chance": lambda value: torch.rand(3).sum() > 1,
    "chance in between": lambda value: torch.rand([]) < 0.5,
    "chance at the edge": lambda value: torch.rand([]) <= 0,
    "chance of another kind": lambda value: torch.randn([]) < 1,
    "chance, written by a view": lambda value: with_first(torch.rand(1), 2) < 1,
    "chance and an input": lambda value: torch.rand([]) < value[0, 0],
    "written": lambda value: positions(value).add_(1).any(),
    "written by a view": lambda value: with_first(positions(value), 9).max() > 8,
}


@pytest.mark.parametrize("name", ANSWERS)
def test_the_branch_is_the_models(name: str) -> None:
    torch.manual_seed(0)
    choose, takes_one = ANSWERS[name]
    call = arguments_of(model := Branching(choose), torch.randn(4, WIDTH))
    captured, module, _ = proven_capture(model, call)
    layers = [str(node.target) for node in module.graph.nodes if node.op == "call_module"]
    assert layers == ["one" if takes_one else "other"]
    assert captured.method == "recorded" and not captured.guards.is_fixed
    # What led to the answer is no part of the graph.
    assert not any("arange" in node.name for node in module.graph.nodes)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_more_than_sizes_is_no_constant(name: str) -> None:
    model = Branching(REFUSED[name])
    with pytest.raises(CaptureError, match=r"values of a tensor|reads a number"):
        capture(model, arguments_of(model, torch.randn(4, WIDTH)))


class LayerDrop(nn.Module):
    """Layers that are left out by chance."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.rate = rate

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        for layer in self.layers:
            if self.training and torch.rand([]) < self.rate:
                continue
            value = layer(value).tanh()
        return value


def test_a_layer_drop_that_is_switched_off() -> None:
    torch.manual_seed(0)
    model, batch = LayerDrop(0.0), torch.randn(8, WIDTH)
    steps_alike(model, [batch, batch * 2])
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "loss_fn": mean_square}
    pipeline = pipecompile(model, batch, **options)
    model.rate = 0.5
    with pytest.raises(InputError, match="rate"):
        pipeline.step(batch)
    with pytest.raises(CaptureError, match="branches on the values of a tensor"):
        pipecompile(model, batch, **options)


def test_an_answer_that_depends_on_the_batch_is_asked_again() -> None:
    torch.manual_seed(0)
    model = Branching(lambda value: (torch.arange(value.shape[0]) < 3).all())
    captured = capture(model, arguments_of(model, torch.randn(2, WIDTH)))
    for batch, layer in ((2, "one"), (3, "one"), (4, "other"), (2, "one")):
        module = captured.instantiate(arguments_of(model, torch.randn(batch, WIDTH)))
        assert [str(n.target) for n in module.graph.nodes if n.op == "call_module"] == [layer]
    steps_alike(model, [torch.randn(8, WIDTH) for _ in range(2)])


def test_meta_models_take_the_same_branch() -> None:
    with torch.device("meta"):
        model = Branching(ANSWERS["all"][0])
        call = arguments_of(model, torch.randn(4, WIDTH))
    module = capture(model, call).instantiate(call)
    assert [str(n.target) for n in module.graph.nodes if n.op == "call_module"] == ["one"]


SIZES = {
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
DECODERS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM),
    "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
    "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
}


def decoder(kind: str, heads: int, head_size: int, dtype: torch.dtype) -> nn.Module:
    """A small decoder with two queries to a key, trained."""
    config_of, model_of = DECODERS[kind]
    torch.manual_seed(0)
    config = config_of(
        hidden_size=heads * head_size,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=head_size,
        pad_token_id=0,
        **SIZES,
    )
    return model_of(config).to(dtype).train()


def is_as_outside(model: nn.Module) -> bool:
    """Whether attention is captured with the arguments that it has outside of a capture."""
    tokens = torch.randint(50, (4, 16))
    captured, module, _ = proven_capture(model, arguments_of(model, {"input_ids": tokens}))
    calls = [n.kwargs for n in module.graph.nodes if "scaled_dot_product" in str(n.target)]
    expected = {"attn_mask": None, "is_causal": True, "enable_gqa": True}
    return (
        captured.method == "recorded"
        and len(calls) == 2
        and all(call.get(key) == value for call in calls for key, value in expected.items())
    )


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("kind", DECODERS)
def test_decoders_with_grouped_queries_run_as_outside(kind: str) -> None:
    assert is_as_outside(decoder(kind, 2, 16, torch.float32))


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("head_size", [8, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_llama_of_any_head_size_and_type(head_size: int, dtype: torch.dtype) -> None:
    assert is_as_outside(decoder("llama", 2, head_size, dtype))


def test_a_model_does_not_see_that_tensors_are_fake() -> None:
    seen: list[bool] = []

    class Looking(nn.Module):
        """Notes what it sees."""

        def forward(self, value: Tensor) -> Tensor:
            """Its input."""
            seen.append(isinstance(value, torch._subclasses.FakeTensor))
            return value.tanh()

    model = nn.Sequential(Looking(), nn.Linear(WIDTH, WIDTH))
    capture(model, arguments_of(model, torch.randn(4, WIDTH)))
    assert seen == [False]
    assert torch._subclasses.FakeTensor is torch._subclasses.fake_tensor.FakeTensor


class Masked(nn.Module):
    """Branches by a mask in its own forward, beside its weights."""

    def __init__(self, choose: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.choose = choose

    def forward(self, value: Tensor, mask: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) and a mask like it to a value of that shape."""
        value = self.layer(value) * (self.one if self.choose(mask) else self.other * mask)
        return self.last(value.tanh())


MASKS: dict[str, Callable[[Tensor], Any]] = {
    "all": lambda mask: mask.all(),
    "any": lambda mask: not (mask == 0).any(),
    "sum": lambda mask: mask.sum().item() == mask.numel(),
    "min": lambda mask: int(mask.min()) == 1,
    "list": lambda mask: mask[:, 0].tolist() == [1] * mask.shape[0],
    "rows": lambda mask: bool(mask.long().cumsum(-1)[:, -1].eq(WIDTH).all()),
}


def test_a_mask_without_elements_masks_nothing() -> None:
    model, mask = Masked(lambda mask: not mask.any()), torch.ones(4, 0, 5, dtype=torch.bool)
    model.other.requires_grad_(False)
    call = arguments_of(model, (torch.randn(4, WIDTH), mask))
    assert capture(model, call).method == "recorded, inputs read"


@pytest.mark.one_case_in(12)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_what_is_read_of_a_mask_is_compared_at_each_step(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, full = Masked(MASKS[name]), torch.ones(8, WIDTH, dtype=dtype)
    batches = [(torch.randn(8, WIDTH), full) for _ in range(2)]
    steps_alike(model, batches)
    padded = full.clone()
    padded[5, 0] = 0
    options: dict[str, Any] = {"k": 2, "microbatches": 4, "costs": "flops", "loss_fn": mean_square}
    pipeline = pipecompile(model, batches[0], **options)
    assert pipeline.plan.capture.method == "recorded, inputs read"
    with pytest.raises(InputError, match=r"out of mask of sample_input, but .* of microbatch 2;"):
        pipeline.step((batches[0][0], padded))
    # A sample with padding goes the other way, and so must each of its microbatches.
    padded[:, 0] = 0
    steps_alike(model, [(values, padded) for values, _ in batches])


@pytest.mark.parametrize("padded", [0, 3], ids=["the first", "the last"])
def test_a_sample_of_which_some_microbatches_are_padded(padded: int) -> None:
    tokens, model = torch.randint(50, (8, 16)), decoder("llama", 2, 16, torch.float32)
    mask = torch.ones(8, 16, dtype=torch.int64)
    mask[2 * padded, -3:] = 0
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    steps_alike(model, [batch], loss_fn=lambda output, _: output.loss)


def test_a_decoder_with_grouped_queries_takes_a_mask_of_ones() -> None:
    tokens, model = torch.randint(50, (4, 16)), decoder("llama", 2, 16, torch.float32)
    mask = torch.ones(4, 16, dtype=torch.int64)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    steps_alike(model, [batch], loss_fn=lambda output, _: output.loss)
    _, module, _ = proven_capture(model, arguments_of(model, batch))
    calls = [n.kwargs for n in module.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert all(call["is_causal"] and call["attn_mask"] is None for call in calls)


class MaskedInEvaluation(Masked):
    """Asks for the mask in one mode only."""

    def __init__(self, asks_in_training: bool) -> None:
        super().__init__(lambda mask: self.training == asks_in_training and mask.all())


def masked_rows(*padded: int) -> tuple[Tensor, Tensor]:
    """A batch of 8, in which these rows are padded."""
    mask = torch.ones(8, WIDTH, dtype=torch.int64)
    mask[list(padded), 0] = 0
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), mask


@pytest.mark.sweep
def test_a_smaller_microbatch_keeps_the_mask_of_the_plan() -> None:
    torch.manual_seed(0)
    tokens, model = torch.randint(50, (4, 16)), decoder("llama", 4, 16, torch.float32)
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[1, :4] = 0
    sample = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops"}
    pipeline = pipecompile(model, sample, loss_fn=lambda output, _: output.loss, **options)
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[2, :4] = 0
    batch = {"input_ids": tokens[:3], "attention_mask": mask, "labels": tokens[:3]}
    loss = pipeline.step(batch)
    losses = [
        model(**{name: value[rows] for name, value in batch.items()}).loss
        for rows in (slice(0, 2), slice(2, 3))
    ]
    assert torch.allclose(loss, (losses[0] * 2 + losses[1]) / 3, rtol=1e-6)


def test_a_smaller_microbatch_is_checked_by_its_own_answers() -> None:
    torch.manual_seed(0)
    model = Masked(lambda mask: mask.all())
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "loss_fn": mean_square}
    pipeline = pipecompile(model, masked_rows(1, 5), **options)
    values, mask = masked_rows(0, 4, 5)
    loss = pipeline.step((values[:6], mask[:6]))
    parts = slice(0, 4), slice(4, 6)
    losses = [mean_square(model(values[part], mask[part]), None) for part in parts]
    assert torch.allclose(loss, (losses[0] * 4 + losses[1] * 2) / 6)
    # The first row of the sample, which a microbatch of one is captured by, has no padding.
    with pytest.raises(InputError, match="of sample_input, but reads something else of microbatch"):
        pipeline.step((values[:5], mask[:5]))


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("asks_in_training", [True, False])
def test_each_mode_has_its_own_answers(asks_in_training: bool) -> None:
    torch.manual_seed(0)
    model = MaskedInEvaluation(asks_in_training)
    options: dict[str, Any] = {"k": 2, "microbatches": 2, "costs": "flops", "loss_fn": mean_square}
    pipeline = pipecompile(model, masked_rows(), **options)
    padded = masked_rows(6)
    act, other = (
        (pipeline.step, pipeline.evaluate)
        if asks_in_training
        else (pipeline.evaluate, pipeline.step)
    )
    with pytest.raises(InputError, match="of sample_input, but reads something else of microbatch"):
        act(padded)
    other(padded)
    model.eval()
    with torch.no_grad():
        expected = torch.cat(
            [model(*rows) for rows in zip(*(t.chunk(2) for t in masked_rows()), strict=True)]
        )
        assert torch.equal(pipeline.evaluate(masked_rows()), expected)
