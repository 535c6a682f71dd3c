"""U-Nets of diffusers: a few small blocks, random weights, a mean square error of the noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from torch import Tensor, nn

BATCH = 8
SIZE = 16
SMALL: dict[str, Any] = {
    "sample_size": SIZE,
    "layers_per_block": 1,
    "block_out_channels": (32, 64),
    "norm_num_groups": 8,
    "attention_head_dim": 8,
}


def noise_loss(output: Any, noise: Tensor) -> Tensor:
    """Return the mean square error of the noise that the model finds in a sample."""
    return nn.functional.mse_loss(output["sample"], noise)


def _denoiser(kind: Callable[..., nn.Module], channels: int, **more: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = kind(in_channels=channels, out_channels=channels, **SMALL, **more)
    sample, noise = torch.randn(2, BATCH, channels, SIZE, SIZE)
    inputs = {"sample": sample, "timestep": torch.randint(1000, (BATCH,))}
    return {"model": model, "sample_input": inputs, "targets": noise, "loss_fn": noise_loss}


def diffusers_unet() -> dict[str, Any]:
    """Convolutions with skips, attention over pixels, and the time of each sample embedded."""
    return _denoiser(
        UNet2DModel,
        channels=3,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


def diffusers_conditional_unet() -> dict[str, Any]:
    """Cross attention to a text, as in Stable Diffusion."""
    target = _denoiser(
        UNet2DConditionModel,
        channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
    )
    target["sample_input"]["encoder_hidden_states"] = torch.randn(BATCH, 7, 32)
    return target


DIFFUSION: dict[str, Callable[[], Any]] = {
    factory.__name__: factory for factory in (diffusers_unet, diffusers_conditional_unet)
}
