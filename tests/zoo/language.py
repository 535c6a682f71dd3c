"""Language models of transformers, a few small layers each, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from examples import models as examples
from examples.models import bert, gpt2, t5, token_loss

BATCH = 8
TOKENS = 16
VOCABULARY = 256
SPECIAL = 4  # the first tokens pad, begin and end a text, or begin an answer
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def _tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(SPECIAL, VOCABULARY, (BATCH, TOKENS), generator=generator)


def with_loss(kind: Callable[..., nn.Module], config: Any) -> dict[str, Any]:
    """A model that is given the labels and computes its loss itself."""
    torch.manual_seed(0)
    tokens = _tokens()
    return {"model": kind(config), "sample_input": {"input_ids": tokens, "labels": tokens}}


def with_logits(kind: Callable[..., nn.Module], config: Any) -> dict[str, Any]:
    """A model that ends with its logits; the loss lies outside."""
    torch.manual_seed(0)
    tokens = _tokens()
    model = kind(config)
    return {
        "model": model,
        "sample_input": {"input_ids": tokens},
        "targets": tokens.roll(-1, 1),
        "loss_fn": token_loss,
    }


def llama() -> dict[str, Any]:
    """Rotary positions, gated feed-forward, a key-value head for each head; the loss is outside."""
    return with_logits(
        transformers.LlamaForCausalLM, transformers.LlamaConfig(**SMALL, use_cache=False)
    )


def llama_gqa() -> tuple[nn.Module, dict[str, Tensor]]:
    """Grouped-query attention: two key-value heads for four heads."""
    return examples.llama()


def qwen2() -> dict[str, Any]:
    """Grouped-query attention with biases, its head tied to the embedding."""
    config = transformers.Qwen2Config(
        **SMALL, num_key_value_heads=2, tie_word_embeddings=True, use_cache=False
    )
    return with_loss(transformers.Qwen2ForCausalLM, config)


def mistral() -> dict[str, Any]:
    """A sliding window of attention shorter than the text."""
    config = transformers.MistralConfig(
        **SMALL, num_key_value_heads=2, sliding_window=8, use_cache=False
    )
    return with_logits(transformers.MistralForCausalLM, config)


def gemma() -> dict[str, Any]:
    """One key-value head for all heads, scaled embeddings, a head tied to them."""
    config = transformers.GemmaConfig(**SMALL, num_key_value_heads=1, head_dim=32, use_cache=False)
    return with_loss(transformers.GemmaForCausalLM, config)


def phi() -> dict[str, Any]:
    """Attention and feed-forward side by side, positions rotated in a part of each head."""
    config = transformers.PhiConfig(**SMALL, resid_pdrop=0.1, embd_pdrop=0.1, use_cache=False)
    return with_logits(transformers.PhiForCausalLM, config)


def opt() -> dict[str, Any]:
    """Narrow embeddings, projected in and out; learned positions from the padding mask."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        word_embed_proj_dim=32,
        ffn_dim=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
    )
    return with_loss(transformers.OPTForCausalLM, config)


def bloom() -> dict[str, Any]:
    """Positions as biases of attention (ALiBi), a normed embedding tied to the head."""
    config = transformers.BloomConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        n_layer=3,
        n_head=4,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        use_cache=False,
    )
    return with_loss(transformers.BloomForCausalLM, config)


def gpt_neox() -> dict[str, Any]:
    """One projection for queries, keys and values, a parallel residual."""
    config = transformers.GPTNeoXConfig(**SMALL, hidden_dropout=0.1, use_cache=False)
    return with_logits(transformers.GPTNeoXForCausalLM, config)


def falcon() -> dict[str, Any]:
    """Multi-query attention beside the feed-forward, both from one norm."""
    config = transformers.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        hidden_dropout=0.1,
        use_cache=False,
    )
    return with_logits(transformers.FalconForCausalLM, config)


def mixtral() -> dict[str, Any]:
    """Two of four experts for each token; the routers' balance is a part of the loss."""
    config = transformers.MixtralConfig(
        **SMALL,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        use_cache=False,
    )
    return with_loss(transformers.MixtralForCausalLM, config)


def roberta() -> dict[str, Any]:
    """Positions counted from the tokens that are not padding."""
    config = transformers.RobertaConfig(**SMALL, max_position_embeddings=64)
    return with_logits(transformers.RobertaForMaskedLM, config)


def distilbert() -> dict[str, Any]:
    """BERT without token types and pooler; the loss lies outside."""
    config = transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=64,
        hidden_dim=128,
        n_layers=3,
        n_heads=4,
        max_position_embeddings=64,
    )
    return with_logits(transformers.DistilBertForMaskedLM, config)


def albert() -> dict[str, Any]:
    """One layer, called three times: every stage shares its weights."""
    config = transformers.AlbertConfig(**SMALL, embedding_size=32, hidden_dropout_prob=0.1)
    return with_loss(transformers.AlbertForMaskedLM, config)


def electra() -> dict[str, Any]:
    """Embeddings narrower than the layers; each token is judged genuine or replaced."""
    target = with_loss(
        transformers.ElectraForPreTraining, transformers.ElectraConfig(**SMALL, embedding_size=32)
    )
    target["sample_input"]["labels"] = target["sample_input"]["labels"] % 2
    return target


def deberta() -> dict[str, Any]:
    """Attention between contents and relative positions, disentangled."""
    config = transformers.DebertaV2Config(
        **SMALL,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        max_relative_positions=16,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    )
    return with_loss(transformers.DebertaV2ForMaskedLM, config)


def bart() -> dict[str, Any]:
    """Encoder and decoder, which reads the shifted labels; one embedding, tied three times."""
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        max_position_embeddings=64,
        use_cache=False,
    )
    return with_loss(transformers.BartForConditionalGeneration, config)


def mamba() -> dict[str, Any]:
    """A selective state space: a loop over the tokens instead of attention."""
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, use_cache=False
    )
    return with_logits(transformers.MambaForCausalLM, config)


LANGUAGE: dict[str, Callable[[], Any]] = {
    factory.__name__: factory
    for factory in (
        gpt2, llama, llama_gqa, qwen2, mistral, gemma, phi, opt, bloom, gpt_neox, falcon,
        mixtral, bert, roberta, distilbert, albert, electra, deberta, t5, bart, mamba,
    )
}  # fmt: skip
