"""Example models to plan.

Each function is a factory as the command line expects it: it takes no argument and returns
(model, sample_input) or a mapping.

    pipecompile plan examples/models.py:gpt2 -k 4 -o plan.json
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH = 8
TOKENS = 16


def _tokens(vocabulary: int, *, batch: int = BATCH, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocabulary, (batch, tokens), generator=generator)


def _images(size: int, *, channels: int = 3, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(1))


def token_loss(output: Any, target: Tensor) -> Tensor:
    """Return the cross entropy of next-token logits.

    It is a plain function, so that plans and workers can refer to it by name.
    """
    return nn.functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def gpt2_small() -> dict[str, Any]:
    """GPT-2 small, 124M parameters, random weights, 8 × 128 tokens."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(use_cache=False)
    tokens = _tokens(config.vocab_size, tokens=129)
    return {
        "model": transformers.GPT2LMHeadModel(config),
        "sample_input": {"input_ids": tokens[:, :-1].contiguous()},
        "targets": tokens[:, 1:].contiguous(),
        "loss_fn": token_loss,
    }


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small GPT-2 with its loss inside the model."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=64, n_layer=4, n_head=4, use_cache=False
    )
    tokens = _tokens(512)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def gpt_96_layers() -> tuple[nn.Module, dict[str, Tensor]]:
    """GPT-2 with the 96 layers of GPT-3 and a small width, in memory."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=64, n_layer=96, n_head=4, use_cache=False
    )
    tokens = _tokens(512)
    return transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small BERT with a padding mask, masked-token loss inside the model."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
    )
    tokens = _tokens(512)
    mask = torch.ones_like(tokens)
    mask[::2, -3:] = 0
    return transformers.BertForMaskedLM(config), {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens,
    }


def t5() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small T5: encoder, decoder and one embedding tied three times."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, use_cache=False
    )
    inputs = {
        "input_ids": _tokens(512),
        "decoder_input_ids": _tokens(512, seed=2),
        "labels": _tokens(512, seed=3),
    }
    return transformers.T5ForConditionalGeneration(config), inputs


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    """A small Llama with grouped-query attention."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    tokens = _tokens(512)
    return transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def llama_13b() -> dict[str, Any]:
    """Llama with 13B parameters, 4 × 2048 tokens, on the meta device.

    It can be planned, but not run.
    """
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
        use_cache=False,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        tokens = torch.empty(4, 2048, dtype=torch.int64)
    return {
        "model": model,
        "sample_input": {"input_ids": tokens},
        "targets": tokens,
        "loss_fn": token_loss,
    }


def resnet50() -> tuple[nn.Module, dict[str, Tensor]]:
    """ResNet-50 on 64 × 64 images, 10 classes; its batch normalisation keeps running statistics."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(num_labels=10)  # type: ignore[call-arg]
    labels = torch.arange(BATCH) % 10
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": _images(64),
        "labels": labels,
    }


class ConvBlock(nn.Module):
    """Convolution, batch normalisation, ReLU, dropout."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(outputs)
        self.dropout = nn.Dropout2d(0.1)

    def forward(self, image: Tensor) -> Tensor:
        features: Tensor = self.dropout(torch.relu(self.norm(self.convolution(image))))
        return features


class UNet(nn.Module):
    """A U-Net: each level's features skip to the level of the same size on the way up."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth + 1)]
        self.stem = ConvBlock(3, width)
        self.down = nn.ModuleList(ConvBlock(a, b) for a, b in pairwise(widths))
        self.up = nn.ModuleList(ConvBlock(a + b, a) for a, b in pairwise(widths))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        features = self.stem(image)
        skips = []
        for block in self.down:
            skips.append(features)
            features = block(nn.functional.max_pool2d(features, 2))
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            features = nn.functional.interpolate(features, scale_factor=2.0, mode="nearest")
            features = block(torch.cat([skip, features], dim=1))
        mask: Tensor = self.head(features)
        return mask


def unet() -> dict[str, Any]:
    """A U-Net on 32 × 32 images with a mean squared error."""
    torch.manual_seed(0)
    image = _images(32)
    return {
        "model": UNet(),
        "sample_input": image,
        "targets": image.mean(dim=1, keepdim=True),
        "loss_fn": nn.functional.mse_loss,
    }


def sequential() -> dict[str, Any]:
    """A plain nn.Sequential with dropout."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(16, 32)]
    for _ in range(6):
        layers += [nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 32)]
    return {
        "model": nn.Sequential(*layers, nn.Linear(32, 4)),
        "sample_input": torch.randn(BATCH, 16, generator=torch.Generator().manual_seed(1)),
        "targets": torch.arange(BATCH) % 4,
        "loss_fn": nn.functional.cross_entropy,
    }


def mlp() -> dict[str, Any]:
    """Eight square layers of 512, 32 samples: gradients are larger than activations."""
    torch.manual_seed(0)
    layers = [module for _ in range(8) for module in (nn.Linear(512, 512), nn.GELU())]
    generator = torch.Generator().manual_seed(1)
    return {
        "model": nn.Sequential(*layers, nn.Linear(512, 10)),
        "sample_input": torch.randn(32, 512, generator=generator),
        "targets": torch.arange(32) % 10,
        "loss_fn": nn.functional.cross_entropy,
    }


def vgg() -> dict[str, Any]:
    """A small VGG on 32 × 32 images: convolutions and pooling, then wide layers."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise((3, 16, 32, 64, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, 10)]
    return {
        "model": nn.Sequential(*layers),
        "sample_input": _images(32),
        "targets": torch.arange(BATCH) % 10,
        "loss_fn": nn.functional.cross_entropy,
    }
