"""Does each rank hold what the plan predicts? Expected and bound against the allocator's own events.

Every rank is a process with gloo and one thread. It runs two steps with the optimizer under torch.profiler, which
reports each allocation of torch's CPU allocator: receive buffers, optimizer state, activations, gradients, scratch of
kernels. The highest running sum, with the stage's parameters and buffers and its part of the minibatch, is what is
measured. Prints a table, names the worst case, writes benchmarks/results/memory_prediction.json.

    python -m benchmarks.memory_prediction [MODEL …]
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from examples.models import UNet, token_loss
from pipecompile.api.compile import pipecompile
from pipecompile.api.pipeline import Pipeline
from pipecompile.api.target import Target
from tests.distributed.workers import Workers

RESULT = Path(__file__).parent / "results" / "memory_prediction.json"
BATCH = 16
SETTLING_SECONDS = 0.2


class Setting(NamedTuple):
    """A plan to make and run."""

    schedule: str
    k: int
    microbatches: int
    optimizer: str
    recompute: str = "none"


SETTINGS = (
    Setting("gpipe", 2, 1, "adamw"),
    Setting("gpipe", 2, 2, "sgd"),
    Setting("1f1b", 2, 4, "momentum"),
    Setting("gpipe", 2, 8, "rmsprop"),
    Setting("1f1b", 4, 8, "adamw"),
    Setting("1f1b", 8, 8, "adafactor"),
    Setting("1f1b", 4, 4, "adam", "stage"),
    Setting("zb-h1", 4, 8, "adamw"),
)


def _tokens(vocabulary: int, tokens: int) -> Tensor:
    return torch.randint(0, vocabulary, (BATCH, tokens + 1), generator=torch.Generator().manual_seed(1))


def _language_model(model: nn.Module, tokens: int = 64) -> dict[str, Any]:
    given = _tokens(2000, tokens)
    return {
        "model": model,
        "sample_input": {"input_ids": given[:, :-1].contiguous()},
        "targets": given[:, 1:].contiguous(),
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
        vocab_size=2000, hidden_size=256, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    return _language_model(transformers.LlamaForCausalLM(config))


def opt() -> dict[str, Any]:
    """Eight blocks of 256, ReLU."""
    config = transformers.OPTConfig(
        vocab_size=2000, hidden_size=256, ffn_dim=1024, num_hidden_layers=8, num_attention_heads=4, use_cache=False,
        word_embed_proj_dim=256, max_position_embeddings=128,
    )  # fmt: skip
    return _language_model(transformers.OPTForCausalLM(config))


def bert() -> dict[str, Any]:
    """Eight blocks of 256 with a padding mask, loss inside the model."""
    config = transformers.BertConfig(
        vocab_size=2000, hidden_size=256, num_hidden_layers=8, num_attention_heads=4, intermediate_size=512
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
        image_size=64, patch_size=8, hidden_size=256, num_hidden_layers=8, num_attention_heads=4,
        intermediate_size=512, num_labels=10,
    )  # fmt: skip
    return _images(transformers.ViTForImageClassification(config))


def _images(model: nn.Module, size: int = 64) -> dict[str, Any]:
    images = torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1))
    return {"model": model, "sample_input": {"pixel_values": images, "labels": torch.arange(BATCH) % 10}}


def mlp() -> dict[str, Any]:
    """Twelve layers of 512, large batch."""
    layers = [layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
    return {
        "model": nn.Sequential(*layers, nn.Linear(512, 10)),
        "sample_input": torch.randn(64 * BATCH, 512, generator=torch.Generator().manual_seed(1)),
        "targets": torch.arange(64 * BATCH) % 10,
        "loss_fn": nn.functional.cross_entropy,
    }


def resnet() -> dict[str, Any]:
    """ResNet-50, 64 × 64 images."""
    return _images(transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=10)))  # type: ignore[call-arg]


def convnext() -> dict[str, Any]:
    """ConvNeXt with depthwise convolutions, 64 × 64 images."""
    config = transformers.ConvNextConfig(depths=[2, 2, 4, 2], hidden_sizes=[64, 128, 256, 512], num_labels=10)
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
    made.__name__: made for made in (gpt2, llama, opt, bert, t5, vit, mlp, resnet, convnext, unet)
}
CONVOLUTIONAL = ("resnet", "convnext", "unet")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
    "rmsprop": torch.optim.RMSprop,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "adafactor": torch.optim.Adafactor,
}


def measured_rank(name: str, setting: Setting) -> tuple[int, int, int]:
    """On one rank: bytes expected, bound and measured."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    target = Target.of(MODELS[name](), name)
    pipeline = pipecompile(
        target.model,
        target.call,
        k=setting.k,
        microbatches=setting.microbatches,
        schedule=setting.schedule,
        recompute=setting.recompute,
        optimizer=setting.optimizer,
        costs="flops",
        loss_fn=target.loss_fn,
        sample_target=target.targets,
    )
    rank = torch.distributed.get_rank()
    memory = pipeline.plan.prediction.memory[rank].total
    return memory.expected, memory.bound, _resident(pipeline, target, rank) + _highest(pipeline, target, setting)


def _resident(pipeline: Pipeline, target: Target, rank: int) -> int:
    """What the rank holds before its first step: parameters, buffers, and the minibatch where it is read."""
    tensors = [*pipeline.parameters(), *(buffer for _, buffer in pipeline.named_buffers())]
    if rank == pipeline.plan.schedule.placement[0]:
        tensors += _leaves((target.call.args, target.call.kwargs))
    if rank == pipeline.plan.schedule.placement[-1]:
        tensors += _leaves(target.targets)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _leaves(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _highest(pipeline: Pipeline, target: Target, setting: Setting) -> int:
    """The highest sum of allocations during two steps, the first of which makes what stays."""
    optimizer = OPTIMIZERS[setting.optimizer](list(pipeline.parameters()))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        time.sleep(SETTLING_SECONDS)  # events at the very begin and end are dropped
        for _ in range(2):
            pipeline.step(target.call, target.targets)
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(SETTLING_SECONDS)
    events = (event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]")
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def main() -> None:
    """Prints and writes the table."""
    rows = list(_rows(sys.argv[1:] or list(MODELS)))
    for kind, names in (("transformers and MLPs", MODELS.keys() - set(CONVOLUTIONAL)), ("convnets", CONVOLUTIONAL)):
        _say_worst(kind, [row for row in rows if row["model"] in names])
    if not sys.argv[1:]:
        RESULT.write_text(json.dumps({"torch": torch.__version__, "device": "cpu", "rows": rows}, indent=1) + "\n")


def _rows(names: list[str]) -> Iterator[dict[str, Any]]:
    header = ("model", "plan", "rank", "expected", "measured", "error", "bound", "above")
    print("{:9} {:28} {:>4} {:>11} {:>11} {:>7} {:>11} {:>6}".format(*header))
    workers = Workers(max(setting.k for setting in SETTINGS))
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name in names:
                for setting in SETTINGS:
                    yield from _measured(workers, name, setting, folder)
    finally:
        workers.close()


def _measured(workers: Workers, name: str, setting: Setting, folder: str) -> Iterator[dict[str, Any]]:
    label = f"{setting.schedule} k={setting.k} m={setting.microbatches} {setting.optimizer}"
    label += " recompute" * (setting.recompute != "none")
    for rank, row in enumerate(workers.run(setting.k, measured_rank, name, setting, folder=folder)):
        expected, bound, measured = row
        error, above = expected / measured - 1, bound / measured - 1
        print(
            f"{name:9} {label:28} {rank:4} {expected:11,} {measured:11,} {error:+7.2%} {bound:11,} {above:+6.1%}",
            flush=True,
        )
        yield {
            "model": name, "plan": label, "rank": rank, "expected": expected, "measured": measured, "bound": bound,
        }  # fmt: skip


def _say_worst(kind: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    worst = max(rows, key=lambda row: abs(row["expected"] / row["measured"] - 1))
    loosest = max(rows, key=lambda row: row["bound"] / row["measured"])
    broken = [row for row in rows if row["bound"] < row["measured"]]
    print(
        f"{kind}: {len(rows)} ranks; expected at worst {worst['expected'] / worst['measured'] - 1:+.2%} "
        f"({worst['model']}, {worst['plan']}, rank {worst['rank']}); bound at most "
        f"{loosest['bound'] / loosest['measured'] - 1:+.1%} ({loosest['model']}, {loosest['plan']}, rank "
        f"{loosest['rank']}), below what was measured on {len(broken)}"
    )


if __name__ == "__main__":
    main()
