"""What ranks do with a model of transformers that peft has given adapters; each runs on every
rank.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pipecompile import Pipeline, pipecompile

STEPS, MICROBATCHES = 3, 4


@cache
def base_config() -> transformers.GPT2Config:
    """A small GPT-2 without dropout, so that no random numbers are compared."""
    return transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )


def base_model() -> nn.Module:
    """The same frozen weights in every process, in float64."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(base_config()).double()


def with_adapters(layers: list[int]) -> peft.PeftModel:
    """The base model with adapters in these layers, which do something from the beginning."""
    torch.manual_seed(1)
    config = peft.LoraConfig(
        r=4,
        target_modules=["c_attn", "c_proj"],
        layers_to_transform=layers,
        fan_in_fan_out=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base_model(), config).double().train()


def batches() -> list[dict[str, Tensor]]:
    """Minibatches of eight samples, one for each step."""
    generator = torch.Generator().manual_seed(2)
    return [
        {"input_ids": tokens, "labels": tokens}
        for tokens in torch.randint(32, (STEPS, 8, 12), generator=generator)
    ]


class Training:
    """An optimizer with two groups, a schedule of rates and an average of what it trains.

    `named` are the parameters that it is for: of the unsplit model, or those of a rank.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        self.parameters = nn.ParameterList()
        for name, parameter in named:
            self.parameters.append(parameter)
            if parameter.requires_grad:
                groups["lora_A" in name].append(parameter)
        self.optimizer = torch.optim.AdamW(
            [
                {"params": groups[True], "weight_decay": 0.1, "lr": 0.01},
                {"params": groups[False], "weight_decay": 0.0, "lr": 0.02},
            ]
        )
        self.scheduler = transformers.get_linear_schedule_with_warmup(self.optimizer, 1, STEPS)
        # Frozen ones too: torch has no average of nothing, and a rank may have no others.
        self.average = AveragedModel(self.parameters, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    def update(self) -> None:
        """What follows each backward."""
        self.optimizer.step()
        self.scheduler.step()
        self.average.update_parameters(self.parameters)
        self.optimizer.zero_grad()


def unsplit_step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """The same microbatches through the whole model."""
    for rows in zip(*(tensor.chunk(MICROBATCHES) for tensor in batch.values()), strict=True):
        (model(**dict(zip(batch, rows, strict=True))).loss / MICROBATCHES).backward()


def fine_tuned(layers: list[int], folder: str) -> tuple[dict[str, float], set[str]]:
    """How far gradients, weights and averages are from those of the unsplit model, at most; and
    what this rank trains. Rank 0 saves the adapters into `folder`.
    """
    model = with_adapters(layers)
    unsplit = copy.deepcopy(model)
    pipeline = pipecompile(
        model, batches()[0], k=dist.get_world_size(), microbatches=MICROBATCHES, costs="flops"
    )
    own = Training(pipeline.named_parameters())
    whole = Training(unsplit.named_parameters())
    frozen = {name: p.detach().clone() for name, p in pipeline.named_parameters()}
    worst = dict.fromkeys(("gradients", "norm", "weights", "averages"), 0.0)
    for batch in batches():
        pipeline.step(batch)
        unsplit_step(unsplit, batch)
        worst["gradients"] = max(worst["gradients"], _distance(pipeline, unsplit, "grad"))
        norm = pipeline.clip_grad_norm_(0.1)
        expected = nn.utils.clip_grad_norm_(unsplit.parameters(), 0.1)
        worst["norm"] = max(worst["norm"], abs(norm.item() / expected.item() - 1))
        own.update()
        whole.update()
    worst["weights"] = _distance(pipeline, unsplit, "data")
    put_averages(own)
    put_averages(whole)
    worst["averages"] = _distance(pipeline, unsplit, "data")
    state = pipeline.full_state_dict()
    if state is not None:
        model.save_pretrained(folder, state_dict=state)
    changed = {name for name, p in pipeline.named_parameters() if not torch.equal(p, frozen[name])}
    return worst, changed


def trained_unsplit(model: nn.Module) -> nn.Module:
    """The same run without a pipeline; its parameters are averages in the end."""
    training = Training(model.named_parameters())
    for batch in batches():
        unsplit_step(model, batch)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        training.update()
    put_averages(training)
    return model


@torch.no_grad()
def put_averages(training: Training) -> None:
    """Give the parameters their averages."""
    for own, average in zip(training.parameters, training.average.module, strict=True):
        own.copy_(average)


def _distance(pipeline: Pipeline, unsplit: nn.Module, what: str) -> float:
    """The largest difference of a gradient or a value of this rank; both have the same ones."""
    wanted: dict[str, Any] = {name: getattr(p, what) for name, p in unsplit.named_parameters()}
    worst = 0.0
    for name, parameter in pipeline.named_parameters():
        found = getattr(parameter, what)
        assert (found is None) == (wanted[name] is None), name
        if found is not None:
            worst = max(worst, (found - wanted[name]).abs().max().item())
    return worst
