"""Newer decoders of transformers, two or three small layers each, with their default attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

from .language import SMALL, with_logits, with_loss

GROUPED: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,  # a pipeline leaves caches out of its output
}
SHORT = {"num_hidden_layers": 2}


def qwen3() -> dict[str, Any]:
    """Queries and keys are normed; grouped queries."""
    return with_loss(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**GROUPED))


def qwen3_moe() -> dict[str, Any]:
    """Two of four experts for each token, multiplied as groups of matrices."""
    config = transformers.Qwen3MoeConfig(
        **GROUPED | SHORT, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    return with_loss(transformers.Qwen3MoeForCausalLM, config)


def deepseek_v3() -> dict[str, Any]:
    """Attention in a latent space, routed experts beside a shared one."""
    config = transformers.DeepseekV3Config(
        **GROUPED | SHORT | {"num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )
    return with_logits(transformers.DeepseekV3ForCausalLM, config)


def gemma2() -> dict[str, Any]:
    """Scores and logits are capped, layers look near and far in turns."""
    config = transformers.Gemma2Config(**GROUPED, head_dim=16, sliding_window=8)
    return with_logits(transformers.Gemma2ForCausalLM, config)


def gemma3() -> dict[str, Any]:
    """Five layers that look near to each that looks far, with positions of their own."""
    config = transformers.Gemma3TextConfig(**GROUPED, head_dim=16, sliding_window=8)
    return with_loss(transformers.Gemma3ForCausalLM, config)


def phi3() -> dict[str, Any]:
    """Queries, keys and values from one projection, both halves of the gate from another."""
    return with_logits(transformers.Phi3ForCausalLM, transformers.Phi3Config(**GROUPED))


def olmo2() -> dict[str, Any]:
    """Norms behind attention and feed-forward."""
    return with_loss(transformers.Olmo2ForCausalLM, transformers.Olmo2Config(**GROUPED))


def granite() -> dict[str, Any]:
    """Embeddings, attention, residuals and logits have scales of their own."""
    config = transformers.GraniteConfig(**GROUPED, embedding_multiplier=2.0, logits_scaling=4.0)
    return with_loss(transformers.GraniteForCausalLM, config)


def cohere() -> dict[str, Any]:
    """Attention beside the feed-forward, scaled logits, a tied head."""
    return with_logits(transformers.CohereForCausalLM, transformers.CohereConfig(**GROUPED))


def starcoder2() -> dict[str, Any]:
    """Layer norms and biases with grouped queries and a window."""
    config = transformers.Starcoder2Config(**GROUPED, sliding_window=8)
    return with_loss(transformers.Starcoder2ForCausalLM, config)


def gpt_oss() -> dict[str, Any]:
    """A learned sink for each head's scores, experts with biases."""
    config = transformers.GptOssConfig(
        **GROUPED | SHORT, head_dim=16, num_local_experts=4, num_experts_per_tok=2
    )
    return with_logits(transformers.GptOssForCausalLM, config)


def smollm3() -> dict[str, Any]:
    """Every fourth layer has no positions."""
    return with_loss(transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config(**GROUPED))


def mamba2() -> dict[str, Any]:
    """A state space in chunks."""
    config = transformers.Mamba2Config(
        vocab_size=SMALL["vocab_size"],
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        chunk_size=8,
        use_cache=False,
    )
    return with_logits(transformers.Mamba2ForCausalLM, config)


DECODERS: dict[str, Callable[[], Any]] = {
    factory.__name__: factory
    for factory in (
        qwen3, qwen3_moe, deepseek_v3, gemma2, gemma3, phi3, olmo2, granite, cohere, starcoder2,
        gpt_oss, smollm3, mamba2,
    )
}  # fmt: skip
