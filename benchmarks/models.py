"""Models of a few million parameters, on which predictions are compared with measurements.

They are large enough that a rank's work outweighs what the runtime does between two actions, and
small enough for eight ranks on one machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from examples.models import UNet, token_loss

BATCH = 16


def _tokens(vocabulary: int, tokens: int) -> Tensor:
    return torch.randint(
        0, vocabulary, (BATCH, tokens + 1), generator=torch.Generator().manual_seed(1)
    )


def _language_model(model: nn.Module, tokens: int = 64) -> dict[str, Any]:
    text = _tokens(2000, tokens)
    return {
        "model": model,
        "sample_input": {"input_ids": text[:, :-1].contiguous()},
        "targets": text[:, 1:].contiguous(),
        "loss_fn": token_loss,
    }


def gpt2() -> dict[str, Any]:
    """Eight blocks of 256, dropout on."""
    config = transformers.GPT2Config(
        vocab_size=2000, n_positions=64, n_embd=256, n_layer=8, n_head=4, use_cache=False
    )
    return _language_model(transformers.GPT2LMHeadModel(config))


def llama() -> dict[str, Any]:
    """Eight blocks of 256."""
    config = transformers.LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    return _language_model(transformers.LlamaForCausalLM(config))


def opt() -> dict[str, Any]:
    """Eight blocks of 256, ReLU."""
    config = transformers.OPTConfig(
        vocab_size=2000,
        hidden_size=256,
        ffn_dim=1024,
        num_hidden_layers=8,
        num_attention_heads=4,
        use_cache=False,
        word_embed_proj_dim=256,
        max_position_embeddings=128,
    )
    return _language_model(transformers.OPTForCausalLM(config))


def bert() -> dict[str, Any]:
    """Eight blocks of 256 with a padding mask, loss inside the model."""
    config = transformers.BertConfig(
        vocab_size=2000,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=512,
    )
    tokens = _tokens(2000, 63)
    mask = torch.ones_like(tokens)
    mask[::2, -9:] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    return {"model": transformers.BertForMaskedLM(config), "sample_input": inputs}


def t5() -> dict[str, Any]:
    """Encoder and decoder of four blocks of 256, one embedding tied three times."""
    config = transformers.T5Config(
        vocab_size=2000, d_model=256, d_kv=64, d_ff=512, num_layers=4, num_heads=4, use_cache=False
    )
    tokens = _tokens(2000, 63)
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens, "labels": tokens}
    return {"model": transformers.T5ForConditionalGeneration(config), "sample_input": inputs}


def vit() -> dict[str, Any]:
    """Eight blocks of 256 on 64 × 64 images."""
    config = transformers.ViTConfig(
        image_size=64,
        patch_size=8,
        hidden_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=512,
        num_labels=10,
    )
    return _images(transformers.ViTForImageClassification(config))


def _images(model: nn.Module, size: int = 64) -> dict[str, Any]:
    images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))
    return {
        "model": model,
        "sample_input": {"pixel_values": images, "labels": torch.arange(BATCH) % 10},
    }


def mlp() -> dict[str, Any]:
    """Twelve layers of 512, large batch."""
    layers = [
        layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))
    ]
    return {
        "model": nn.Sequential(*layers, nn.Linear(512, 10)),
        "sample_input": torch.randn(64 * BATCH, 512, generator=torch.Generator().manual_seed(1)),
        "targets": torch.arange(64 * BATCH) % 10,
        "loss_fn": nn.functional.cross_entropy,
    }


def resnet() -> dict[str, Any]:
    """ResNet-50, 96 × 96 images: the last ones, 3 × 3, are not lower than their kernels."""
    config = transformers.ResNetConfig(num_labels=10)  # type: ignore[call-arg]
    return _images(transformers.ResNetForImageClassification(config), 96)


def convnext() -> dict[str, Any]:
    """ConvNeXt with depthwise convolutions, 64 × 64 images."""
    config = transformers.ConvNextConfig(
        depths=[2, 2, 4, 2], hidden_sizes=[64, 128, 256, 512], num_labels=10
    )
    return _images(transformers.ConvNextForImageClassification(config))


def unet() -> dict[str, Any]:
    """A U-Net whose features skip to the other side, 64 × 64 images."""
    images = torch.randn(BATCH, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    return {
        "model": UNet(width=32),
        "sample_input": images,
        "targets": images.mean(dim=1, keepdim=True),
        "loss_fn": nn.functional.mse_loss,
    }


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    factory.__name__: factory
    for factory in (gpt2, llama, opt, bert, t5, vit, mlp, resnet, convnext, unet)
}
CONVOLUTIONAL = ("resnet", "convnext", "unet")
