"""Vision, audio and multimodal models of transformers: a few small layers, random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

BATCH = 8
SIZE = 32
CLASSES = 10
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


def class_loss(output: Any, target: Tensor) -> Tensor:
    """Cross entropy of one label for each sample."""
    return nn.functional.cross_entropy(output["logits"], target)


def _normal(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(1))


def _with_loss(kind: Callable[..., nn.Module], config: Any) -> dict[str, Any]:
    """A classifier that is given the labels and computes its loss itself."""
    torch.manual_seed(0)
    inputs = {"pixel_values": _normal(3, SIZE, SIZE), "labels": torch.arange(BATCH)}
    return {"model": kind(config), "sample_input": inputs}


def _with_logits(kind: Callable[..., nn.Module], config: Any) -> dict[str, Any]:
    """A classifier that ends with its logits; the loss lies outside."""
    target = _with_loss(kind, config)
    return {**target, "targets": target["sample_input"].pop("labels"), "loss_fn": class_loss}


def vit() -> dict[str, Any]:
    """Patches as tokens, a class token in front, dropout."""
    config = transformers.ViTConfig(
        **SMALL, image_size=SIZE, patch_size=8, hidden_dropout_prob=0.1, num_labels=CLASSES
    )
    return _with_logits(transformers.ViTForImageClassification, config)


def deit() -> dict[str, Any]:
    """A class token and a distillation token, each with its head; the answer is their mean."""
    config = transformers.DeiTConfig(**SMALL, image_size=SIZE, patch_size=8, num_labels=CLASSES)
    return _with_logits(transformers.DeiTForImageClassificationWithTeacher, config)


def beit() -> dict[str, Any]:
    """Attention biases by relative position, scaled residuals, stochastic depth for each sample."""
    config = transformers.BeitConfig(
        **SMALL,
        image_size=SIZE,
        patch_size=8,
        use_relative_position_bias=True,
        out_indices=[3],
        num_labels=CLASSES,
    )
    return _with_loss(transformers.BeitForImageClassification, config)


def swin() -> dict[str, Any]:
    """Attention in windows that shift in every second layer; patches merge in between."""
    config = transformers.SwinConfig(
        image_size=SIZE,
        patch_size=2,
        embed_dim=16,
        depths=[2, 2, 2],
        num_heads=[2, 4, 8],
        window_size=4,
        num_labels=CLASSES,
    )
    return _with_loss(transformers.SwinForImageClassification, config)


def convnext() -> dict[str, Any]:
    """Depthwise convolutions, channels last in each block, stochastic depth."""
    config = transformers.ConvNextConfig(
        depths=[1, 1, 2, 1],
        hidden_sizes=[8, 16, 32, 64],
        drop_path_rate=0.1,
        layer_scale_init_value=0.1,
        num_labels=CLASSES,
    )
    return _with_logits(transformers.ConvNextForImageClassification, config)


def resnet() -> dict[str, Any]:
    """Bottleneck blocks; batch normalisation keeps running statistics."""
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[2, 2, 2], num_labels=CLASSES
    )
    return _with_loss(transformers.ResNetForImageClassification, config)


def regnet() -> dict[str, Any]:
    """Grouped convolutions with squeeze and excitation."""
    config = transformers.RegNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32, 64],
        depths=[1, 2, 1],
        groups_width=8,
        downsample_in_first_stage=False,
        num_labels=CLASSES,
    )
    return _with_logits(transformers.RegNetForImageClassification, config)


def mobilenet() -> dict[str, Any]:
    """MobileNetV2: inverted residuals, padding computed from the image's size, strong dropout."""
    config = transformers.MobileNetV2Config(
        image_size=SIZE, depth_multiplier=0.25, output_stride=8, num_labels=CLASSES
    )
    return _with_logits(transformers.MobileNetV2ForImageClassification, config)


def efficientnet() -> dict[str, Any]:
    """Depthwise convolutions with squeeze and excitation, dropout before each sum."""
    config = transformers.EfficientNetConfig(
        image_size=SIZE,
        width_coefficient=0.25,
        depth_coefficient=1.0,
        in_channels=[32, 16, 24],
        out_channels=[16, 24, 40],
        kernel_sizes=[3, 3, 5],
        strides=[1, 2, 2],
        num_block_repeats=[1, 2, 2],
        expand_ratios=[1, 6, 6],
        hidden_dim=320,
        initializer_range=0.2,
        num_labels=CLASSES,
    )
    return _with_loss(transformers.EfficientNetForImageClassification, config)


def segformer() -> dict[str, Any]:
    """An image of labels: attention over a reduced image; the head joins features of all levels."""
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 32, 64],
        num_attention_heads=[1, 2, 4, 8],
        decoder_hidden_size=32,
        num_labels=CLASSES,
    )
    image = _normal(3, SIZE, SIZE)
    labels = (image.sum(dim=1) > 0).long()
    model = transformers.SegformerForSemanticSegmentation(config)
    return {"model": model, "sample_input": {"pixel_values": image, "labels": labels}}


def clip() -> dict[str, Any]:
    """Two towers, for texts and images; the loss compares each text with every image."""
    torch.manual_seed(0)
    text = {
        **SMALL,
        "vocab_size": 256,
        "max_position_embeddings": 16,
        "bos_token_id": 1,
        "eos_token_id": 255,
    }
    image = {**SMALL, "image_size": SIZE, "patch_size": 8}
    config = transformers.CLIPConfig(text_config=text, vision_config=image, projection_dim=32)
    tokens = torch.randint(0, 255, (BATCH, 16), generator=torch.Generator().manual_seed(2))
    tokens[:, -1] = 255
    inputs = {
        "input_ids": tokens,
        "pixel_values": _normal(3, SIZE, SIZE),
        "attention_mask": torch.ones_like(tokens),
        "return_loss": True,
    }
    return {"model": transformers.CLIPModel(config), "sample_input": inputs}


def wav2vec2() -> dict[str, Any]:
    """Raw sound through convolutions; a convolution with a parametrized weight gives positions."""
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        **SMALL,
        conv_dim=(32, 32, 32),
        conv_stride=(5, 4, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        classifier_proj_size=32,
        layerdrop=0.0,
        apply_spec_augment=False,
        num_labels=CLASSES,
    )
    model = transformers.Wav2Vec2ForSequenceClassification(config)
    return {
        "model": model,
        "sample_input": {"input_values": _normal(640), "labels": torch.arange(BATCH)},
    }


def whisper() -> dict[str, Any]:
    """Encoder of a spectrogram, decoder of text: two inputs of different kinds and lengths."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        num_mel_bins=16,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        dropout=0.1,
        max_source_positions=16,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        use_cache=False,
    )
    labels = torch.randint(4, 256, (BATCH, 12), generator=torch.Generator().manual_seed(2))
    model = transformers.WhisperForConditionalGeneration(config)
    return {"model": model, "sample_input": {"input_features": _normal(16, 32), "labels": labels}}


VISION: dict[str, Callable[[], Any]] = {
    factory.__name__: factory
    for factory in (
        vit, deit, beit, swin, convnext, resnet, regnet, mobilenet, efficientnet, segformer,
        clip, wav2vec2, whisper,
    )
}  # fmt: skip
