"""The ten models of `benchmarks.models` in sizes for a GPU, and GPT-2 medium.

Weights are random. Factories are called under `torch.device`, so that weights are made where they
belong. Minibatches are made on the CPU, because seeded generators belong to one device, and then
moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from examples.models import UNet, token_loss
from pipecompile.frontend.target import Target

__all__ = ["GPU", "MODELS", "TINY", "Scale", "gpt2_medium", "target_on"]

HALF = torch.bfloat16


class Scale(NamedTuple):
    """The sizes of all models; each one uses those that it has."""

    width: int
    layers: int
    heads: int
    tokens: int
    vocabulary: int
    batch: int  # of sequences; there are eight times as many images
    image: int
    filters: int


# GPT-2 medium has 24 layers of width 1024 and 50,257 words: see gpt2_medium.
GPU = Scale(
    width=1024, layers=8, heads=16, tokens=1024, vocabulary=32000, batch=16, image=224, filters=64
)
"""Each rank of a plan for two holds 1 to 20 GiB."""
TINY = Scale(width=32, layers=2, heads=2, tokens=16, vocabulary=64, batch=4, image=32, filters=8)
"""For tests on a CPU."""

Parts = dict[str, Any]
"""The keywords of a target, as a factory of `benchmarks.models` returns them."""


def _tokens(scale: Scale, extra: int = 0) -> Tensor:
    shape = scale.batch, scale.tokens + extra
    return torch.randint(
        0, scale.vocabulary, shape, generator=torch.Generator().manual_seed(1), device="cpu"
    )


def _language_model(model: nn.Module, scale: Scale) -> Parts:
    text = _tokens(scale, extra=1)
    return {
        "model": model,
        "sample_input": {"input_ids": text[:, :-1].contiguous()},
        "targets": text[:, 1:].contiguous(),
        "loss_fn": token_loss,
    }


def gpt2(scale: Scale) -> Parts:
    """Return a GPT-2 in float32, dropout on."""
    config = transformers.GPT2Config(
        vocab_size=scale.vocabulary,
        n_positions=scale.tokens,
        n_embd=scale.width,
        n_layer=scale.layers,
        n_head=scale.heads,
        use_cache=False,
    )
    return _language_model(transformers.GPT2LMHeadModel(config), scale)


def gpt2_medium(scale: Scale) -> Parts:
    """Return a GPT-2 with three times the layers; at GPU sizes it is GPT-2 medium."""
    return gpt2(
        scale._replace(layers=3 * scale.layers, vocabulary=scale.vocabulary * 50257 // 32000)
    )


def llama(scale: Scale) -> Parts:
    """Return a Llama in bfloat16, with half as many heads for keys and values."""
    config = transformers.LlamaConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.width,
        intermediate_size=3 * scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        num_key_value_heads=scale.heads // 2,
        max_position_embeddings=scale.tokens,
        use_cache=False,
    )
    return _language_model(transformers.LlamaForCausalLM(config).to(HALF), scale)


def opt(scale: Scale) -> Parts:
    """Return an OPT in bfloat16, with ReLU."""
    config = transformers.OPTConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.width,
        ffn_dim=4 * scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        word_embed_proj_dim=scale.width,
        max_position_embeddings=2 * scale.tokens,
        use_cache=False,
    )
    return _language_model(transformers.OPTForCausalLM(config).to(HALF), scale)


def bert(scale: Scale) -> Parts:
    """Return a BERT in float32 with a padding mask, loss inside the model."""
    config = transformers.BertConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        intermediate_size=4 * scale.width,
        max_position_embeddings=scale.tokens,
    )
    tokens = _tokens(scale)
    mask = torch.ones_like(tokens)
    mask[::2, -scale.tokens // 8 :] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    return {"model": transformers.BertForMaskedLM(config), "sample_input": inputs}


def t5(scale: Scale) -> Parts:
    """Return a T5 in float32 of half the size, with one embedding tied three times."""
    config = transformers.T5Config(
        vocab_size=scale.vocabulary,
        d_model=scale.width // 2,
        d_kv=scale.width // 2 // scale.heads,
        d_ff=2 * scale.width,
        num_layers=scale.layers // 2,
        num_heads=scale.heads,
        use_cache=False,
    )
    tokens = _tokens(scale._replace(tokens=scale.tokens // 2))
    inputs = {"input_ids": tokens, "decoder_input_ids": tokens, "labels": tokens}
    return {"model": transformers.T5ForConditionalGeneration(config), "sample_input": inputs}


def vit(scale: Scale) -> Parts:
    """Return a ViT in bfloat16, with patches of a fourteenth of the image."""
    config = transformers.ViTConfig(
        image_size=scale.image,
        patch_size=max(2, scale.image // 14),
        hidden_size=scale.width,
        num_hidden_layers=scale.layers,
        num_attention_heads=scale.heads,
        intermediate_size=4 * scale.width,
        num_labels=10,
    )
    parts = _images(transformers.ViTForImageClassification(config).to(HALF), scale)
    parts["sample_input"]["pixel_values"] = parts["sample_input"]["pixel_values"].to(HALF)
    return parts


def _images(model: nn.Module, scale: Scale) -> Parts:
    count = 8 * scale.batch
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(count, 3, scale.image, scale.image, generator=generator, device="cpu")
    labels = torch.arange(count, device="cpu") % 10
    return {"model": model, "sample_input": {"pixel_values": images, "labels": labels}}


def mlp(scale: Scale) -> Parts:
    """Return twelve layers, four times as wide as those of other models, in float32."""
    width, rows = 4 * scale.width, 512 * scale.batch
    layers: list[nn.Module] = []
    for _ in range(12):
        layers += [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)]
    generator = torch.Generator().manual_seed(1)
    return {
        "model": nn.Sequential(*layers, nn.Linear(width, 10)),
        "sample_input": torch.randn(rows, width, generator=generator, device="cpu"),
        "targets": torch.arange(rows, device="cpu") % 10,
        "loss_fn": nn.functional.cross_entropy,
    }


def resnet(scale: Scale) -> Parts:
    """Return ResNet-50 in float32."""
    config = transformers.ResNetConfig(num_labels=10)  # type: ignore[call-arg]
    return _images(transformers.ResNetForImageClassification(config), scale)


def convnext(scale: Scale) -> Parts:
    """Return a ConvNeXt in float32 with depthwise convolutions."""
    sizes = [2 * scale.filters * 2**level for level in range(4)]
    config = transformers.ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=sizes, num_labels=10)
    return _images(transformers.ConvNextForImageClassification(config), scale)


def unet(scale: Scale) -> Parts:
    """Return a U-Net in float32 whose features skip to the other side."""
    generator = torch.Generator().manual_seed(1)
    shape = 2 * scale.batch, 3, scale.image, scale.image
    images = torch.randn(shape, generator=generator, device="cpu")
    return {
        "model": UNet(width=scale.filters),
        "sample_input": images,
        "targets": images.mean(dim=1, keepdim=True),
        "loss_fn": nn.functional.mse_loss,
    }


MODELS: dict[str, Callable[[Scale], Parts]] = {
    factory.__name__: factory
    for factory in (gpt2, llama, opt, bert, t5, vit, mlp, resnet, convnext, unet)
}


def target_on(device: torch.device, factory: Callable[[Scale], Parts], scale: Scale) -> Target:
    """Return the target with its weights made on `device` and its minibatch moved there."""
    torch.manual_seed(0)
    with device:
        parts = factory(scale)

    def moved(tree: Any) -> Any:
        return tree_map_only(Tensor, lambda value: value.to(device), tree)

    data = {key: moved(parts[key]) for key in ("sample_input", "targets") if key in parts}
    return Target.of({**parts, "model": parts["model"].to(device), **data}, factory.__name__)
