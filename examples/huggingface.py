"""A Llama fine-tuned as a pipeline, with the libraries of Hugging Face around `pipeline.step`.

    python -m examples.huggingface                        both stages in one process
    torchrun --nproc-per-node 2 -m examples.huggingface   one stage on each rank; with 4, 2 replicas

No hub is asked. The model to begin with has random weights and is first saved as the hub would have
it; the text are the pages of this project. After the last step the weights are saved under the
names of the model, `from_pretrained` loads them, and the example exits 1 unless the unsplit model
has the same loss.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import PartialState, init_empty_weights
from accelerate.utils import broadcast_object_list, set_seed
from datasets.distributed import split_dataset_by_node
from rich.logging import RichHandler
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import DataLoader

from pipecompile import Pipeline, pipecompile

PAGES = Path(__file__).resolve().parents[1] / "docs"
STAGES = 2
BATCH, BLOCK = 16, 64  # samples, and tokens in each
LEARNING_RATE, WEIGHT_DECAY = 1e-3, 0.1
CLOSE = 1e-5  # of losses in float32 that were summed in another order, relative

logger = logging.getLogger("examples.huggingface")


def main() -> int:
    """Fine-tune, save, load unsplit, compare."""
    options = read_options()
    # accelerate makes the process group; on CPUs only if it is told to.
    state = PartialState(cpu=not torch.cuda.is_available())
    set_up_logging(state)
    set_seed(0)
    with state.main_process_first():
        if state.is_main_process:
            save_start(options.folder / "start")
        blocks = token_blocks(options.folder / "cache")
    loader = loader_of(blocks, state)
    sample = transformers.default_data_collator([blocks[index] for index in range(BATCH)])
    start = options.folder / "start"
    pipeline = pipecompile(
        empty_model(start), sample, k=STAGES, microbatches=4, costs="flops", weights=start
    )
    logger.info("%s", pipeline.plan)
    train(pipeline, loader, options.steps, state)
    code = save_and_compare(pipeline, sample, options.folder, state)
    state.destroy_process_group()
    return code


def read_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("demo/huggingface"))
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


def set_up_logging(state: PartialState) -> None:
    """Messages and bars once, from rank 0; the others say only what is wrong."""
    level = logging.INFO if state.is_main_process else logging.WARNING
    handler = RichHandler(show_time=False, show_level=False, show_path=False)
    logging.basicConfig(level=level, format="%(message)s", handlers=[handler])
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()


def save_start(folder: Path) -> None:
    """Write what `from_pretrained` reads: a config, and random weights as safetensors."""
    config = transformers.LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
        use_cache=False,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def empty_model(folder: Path) -> nn.Module:
    """The model of a folder with its parameters on the meta device: no rank needs all of it.

    Buffers stay in memory. Rotary frequencies are buffers that no file has.
    """
    config = transformers.AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()  # which init_empty_weights has taken apart
    return model.train()


def token_blocks(cache: Path) -> datasets.Dataset:
    """The text as blocks of BLOCK bytes: `input_ids` and the same `labels`.

    There is nothing to pad, and so no attention mask.
    """
    files = [str(path) for path in sorted(PAGES.rglob("*.md"))]
    text = datasets.load_dataset("text", data_files=files, split="train", cache_dir=str(cache))
    tokenizer = transformers.ByT5Tokenizer()

    def blocks(lines: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        tokens = [token for ids in tokenizer(lines["text"])["input_ids"] for token in ids]
        rows = [tokens[at : at + BLOCK] for at in range(0, len(tokens) - BLOCK + 1, BLOCK)]
        return {"input_ids": rows, "labels": rows}

    return text.map(blocks, batched=True, remove_columns=text.column_names)


def loader_of(blocks: datasets.Dataset, state: PartialState) -> DataLoader[dict[str, Tensor]]:
    """Batches that are the same on all ranks of a pipeline, and others on each replica.

    `Accelerator.prepare` would give each rank a part of its own, as if each had the whole model.
    """
    part = split_dataset_by_node(
        blocks, rank=state.process_index // STAGES, world_size=max(1, state.num_processes // STAGES)
    )
    return DataLoader(
        part,
        batch_size=BATCH,
        shuffle=True,
        drop_last=True,  # replicas need equally many samples
        collate_fn=transformers.default_data_collator,
        generator=torch.Generator().manual_seed(0),  # of its own: rank 0 has drawn weights
    )


def train(
    pipeline: Pipeline, loader: DataLoader[dict[str, Tensor]], steps: int, state: PartialState
) -> None:
    """The usual loop: `step` stands for the model's forward and `accelerator.backward`."""
    optimizer = torch.optim.AdamW(groups_of(pipeline), lr=LEARNING_RATE)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
    batches = islice(epochs(loader), steps)
    for step, batch in enumerate(
        track(batches, "training", total=steps, disable=not state.is_main_process)
    ):
        loss = pipeline.step(batch, everywhere=True)
        pipeline.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            logger.info("step %d: loss %.4f, rate %.1e", step, loss, scheduler.get_last_lr()[0])


def epochs(loader: DataLoader[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """The batches of one epoch after another."""
    while True:
        yield from loader


def groups_of(pipeline: Pipeline) -> list[dict[str, Any]]:
    """The parameters of this process: norms without weight decay, all others with it."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in pipeline.named_parameters():
        groups["norm" not in name].append(parameter)
    return [
        {"params": groups[True], "weight_decay": WEIGHT_DECAY},
        {"params": groups[False], "weight_decay": 0.0},
    ]


def save_and_compare(
    pipeline: Pipeline, sample: dict[str, Tensor], folder: Path, state: PartialState
) -> int:
    """Save the weights for `from_pretrained`; return 1 if the loss of what it loads is another."""
    trained = folder / "trained"
    if state.is_main_process:
        transformers.AutoConfig.from_pretrained(folder / "start").save_pretrained(trained)
    pipeline.save_safetensors(trained / "model.safetensors")
    losses = [pipeline.evaluate(sample, ())]
    # Only ranks with the last stage have it.
    broadcast_object_list(losses, from_process=state.num_processes - 1)
    if not state.is_main_process:
        return 0
    unsplit = transformers.AutoModelForCausalLM.from_pretrained(trained)
    with torch.no_grad():
        expected = unsplit(**sample).loss.item()
    logger.info("loss of the pipeline %.6f, of the unsplit model %.6f", losses[0], expected)
    return 0 if abs(losses[0].item() - expected) <= CLOSE * expected else 1


if __name__ == "__main__":
    raise SystemExit(main())
