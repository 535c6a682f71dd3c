"""The options of a plan, each declared once: its name, type, default and help.

The Python keywords with their types (`pipecompile.Choices`), the command line, and
docs/reference/options.md come from the declarations below; a plan's file has fields of the same
names, which a test compares. Needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict, get_args, get_type_hints

from pipecompile.ir.encodings import Encoding
from pipecompile.ir.option import Option
from pipecompile.ir.option_names import Objective, OptimizerName, PlacementShape, ScheduleName
from pipecompile.ir.plan import (
    BatchNormUpdate,
    Communication,
    Granularity,
    LayoutFormat,
    Recompute,
    ShardLevel,
)

__all__ = [
    "DEFAULT_COSTS",
    "DEFAULT_EFFORT",
    "DEFAULT_STAGES",
    "DEFAULT_TOP",
    "JOINT_SEARCH",
    "OPTIONS",
    "ChoiceTypes",
]

DEFAULT_STAGES = 4
DEFAULT_COSTS = "measured"
DEFAULT_EFFORT = 16
DEFAULT_TOP = 5
JOINT_SEARCH = ("devices", "effort", "time_limit", "top")
"""The options that ask for a joint search, and of what size."""


class ChoiceTypes(TypedDict, total=False):
    """The keywords by which `pipecompile()` chooses a plan, with their types, defaults and help."""

    ranks: Annotated[
        int | None,
        Option(
            None,
            "Number of ranks, instead of k: k is then as many stages as the schedule has on these "
            "ranks, and how many that are is chosen if microbatches are open.",
            default_text="k / stages per rank",
            field=None,
        ),
    ]
    microbatches: Annotated[
        int | None,
        Option(
            None,
            "Number of equal parts that the minibatch is cut into.",
            default_text="k if costs are measured; else chosen, from k to 4 × k",
        ),
    ]
    schedule: Annotated[
        ScheduleName | None,
        Option(
            None,
            "A named schedule, or search for the shortest one for this model, its links and its "
            "memory; forward-only plans for inference.",
            default_text="1f1b, or chosen if microbatches are open; forward-only for inference",
        ),
    ]
    stages_per_rank: Annotated[
        int | None,
        Option(None, "Number of stages on each rank.", default_text="what the schedule needs"),
    ]
    placement: Annotated[
        PlacementShape | None,
        Option(
            None,
            "Which stages share a rank: neighbours (linear), around and around (loop), or there "
            "and back (v).",
            default_text="what the schedule needs; a search tries all",
        ),
    ]
    objective: Annotated[
        Objective | None,
        Option(
            None,
            "What the cut minimises: the variance of the loads, the largest load, or the simulated "
            "step. For inference: how often a full pipeline is done with a microbatch "
            "(throughput), or how long one takes through all stages (latency).",
            default_text="variance; throughput for forward-only",
        ),
    ]
    noise: Annotated[
        float | str | None,
        Option(
            None,
            "Choose a plan that stays good if times are off by about this share, such as 5%, on "
            "each device and for each node: of plans within 2 % of the shortest step, the one of "
            "least regret at the 90th percentile.",
            default_text="none: the shortest step",
            metavar="SHARE",
        ),
    ]
    memory: Annotated[
        int | str | Sequence[int | str] | None,
        Option(
            None,
            "Cap of each rank, such as 16GiB, or one for each rank with commas between.",
            default_text="no cap; for inference the memory of the device of roofline:DEVICE",
            metavar="SIZE[,…]",
            field="memory_bytes",
        ),
    ]
    kv_tokens: Annotated[
        int | None,
        Option(
            None,
            "For inference: reserve a KV cache of so many tokens on each rank, for all requests "
            "together.",
            default_text="none",
        ),
    ]
    kv_token_bytes: Annotated[
        int | None,
        Option(
            None,
            "For inference: what each attention adds to the KV cache for a token, where it is not "
            "its keys and values (latent attention, a cache of another type).",
            default_text="its keys and values",
        ),
    ]
    optimizer: Annotated[
        OptimizerName | None,
        Option(None, "Count the state of this optimizer.", default_text="the target's optimizer"),
    ]
    master_weights: Annotated[
        bool,
        Option(False, "Count float32 copies of parameters that have fewer bits.", form="switch"),
    ]
    optimizer_on_host: Annotated[
        bool,
        Option(
            False,
            "Count the optimizer's state in the host's memory, where HostOptimizer holds it "
            "(ZeRO-Offload).",
            form="switch",
        ),
    ]
    post_validation: Annotated[
        bool,
        Option(
            False,
            "Let each rank update its weights and begin the next step before it knows the norm of "
            "all gradients, and roll back where that was wrong; train(batches, factory) then does "
            "so, and memory counts the copies.",
            form="switch",
        ),
    ]
    recompute: Annotated[
        Recompute | None,
        Option(
            None,
            "What stages recompute instead of saving it: nothing (none), each stage but the last "
            "as a whole (stage), that for all microbatches but a step's last (except-last), each "
            "block (block), about √n of n blocks together (sqrt), or what lets each rank fit its "
            "memory at the least extra time (auto).",
            default_text="none; auto if microbatches are open and nothing fits",
        ),
    ]
    encodings: Annotated[
        Iterable[Encoding],
        Option(
            (),
            "Encodings of saved tensors that stages may use where they do not fit their memory; "
            "gradients stay the same bit for bit, except with half.",
            default_text="none",
            form="list",
            metavar="ENCODING[,…]",
        ),
    ]
    batch_norm: Annotated[
        BatchNormUpdate,
        Option(
            "microbatch",
            "When BatchNorm updates its running averages: after each microbatch, as the original "
            "module does, or once a step with the statistics of the whole minibatch, over all "
            "replicas.",
        ),
    ]
    replicas: Annotated[
        int | None,
        Option(
            None,
            "Number of replicas of the pipeline, each with its own data, whose gradients are "
            "summed.",
            default_text="1; under torchrun as many as there are",
        ),
    ]
    stage_replicas: Annotated[
        str | Sequence[int] | None,
        Option(
            None,
            "Ranks of each stage, such as 7,1: they take its microbatches in turns, and sum its "
            "gradients (PipeDream's replicated stages). There are as many stages, and the last one "
            "has one rank.",
            default_text="one rank a stage, or several stages on a rank",
            metavar="N,N[,…]",
        ),
    ]
    shard: Annotated[
        ShardLevel | None,
        Option(
            None,
            "What replicas divide among them by FSDP2 (parallelize=): the state of the optimizer, "
            "with sums of gradients and gathers of parameters once a step; the gradients too, "
            "summed in each backward; the parameters too, gathered for each action.",
            default_text="nothing: each replica holds all of its stages",
        ),
    ]
    pin: Annotated[
        Mapping[str, int] | None,
        Option(
            None,
            "Fix the stage of a node; -1 is the last stage.",
            default_text="none",
            form="pins",
            metavar="NODE=STAGE",
        ),
    ]
    layout: Annotated[
        Any,
        Option(
            None,
            "Take the cut from a layout, a text or its file: Megatron's string or lists, "
            "torchtitan's module_fqns_per_model_part, torch's split_spec, a device_map, counts of "
            "layers (vLLM, SGLang), or a JSON list of modules for each stage. It has its own k.",
            default_text="none: the cut is searched",
            metavar="LAYOUT",
        ),
    ]
    layout_format: Annotated[
        LayoutFormat | None,
        Option(None, "The format of the layout.", default_text="told by its form"),
    ]
    layers: Annotated[
        str | None,
        Option(
            None,
            "The list of modules that are the layers of a layout, such as transformer.h.",
            default_text="the list of numbered modules that takes most of the time",
            metavar="MODULE",
        ),
    ]
    no_split: Annotated[
        Iterable[Iterable[str]],
        Option(
            (),
            "Keep modules or nodes together on one stage.",
            default_text="none",
            form="groups",
            metavar="MODULE[,…]",
            field="groups",
        ),
    ]
    parameters_everywhere: Annotated[
        bool,
        Option(False, "Give each stage a node with parameters.", form="switch"),
    ]
    granularity: Annotated[
        Granularity,
        Option(
            "operators",
            "What the model is cut between; auto opens blocks where balance or memory needs it.",
        ),
    ]
    comm: Annotated[
        Communication | None,
        Option(
            None,
            "What the load of a rank pays for its transfers while cuts are compared: all of them "
            "(relay), or what is longer than its compute (overlap).",
            default_text="relay; overlap for throughput",
        ),
    ]
    leaf: Annotated[
        Iterable[str],
        Option(
            (),
            "Take a module, by path or class, as one node.",
            default_text="none",
            form="repeated",
            metavar="MODULE",
        ),
    ]
    devices: Annotated[
        Any,
        Option(
            None,
            "Choose all that is not given for the shortest step of the minibatch on these devices: "
            "8xh100, 2x8xh100 (two nodes) or a cluster file. Costs, memory and links are then "
            "theirs unless given.",
            default_text="none: what is not given has the defaults of this table",
            metavar="DEVICES",
            field=None,
        ),
    ]
    effort: Annotated[
        int | None,
        Option(
            None,
            "With devices: how many settings are planned, of which those with very many actions "
            "count as several; the answer depends on nothing else.",
            default_text=str(DEFAULT_EFFORT),
            field=None,
        ),
    ]
    time_limit: Annotated[
        float | None,
        Option(
            None,
            "With devices: seconds after which no further setting is planned.",
            default_text="none",
            metavar="SECONDS",
            field=None,
        ),
    ]
    top: Annotated[
        int | None,
        Option(
            None,
            "With devices: how many of the best settings the plan lists.",
            default_text=str(DEFAULT_TOP),
            field=None,
        ),
    ]


# Apart from the choices: in Python these are arguments of their own, not among `Choices`.
class _OtherTypes(TypedDict, total=False):
    """What `pipecompile()` and the commands take beside the choices."""

    k: Annotated[
        int | None,
        Option(None, "Number of stages.", default_text=str(DEFAULT_STAGES), flag="-k"),
    ]
    costs: Annotated[
        str | None,
        Option(
            None,
            "Cost model: flops, measured, measured:DEVICE, roofline:DEVICE (a name, or a file that "
            "calibrate wrote; several with commas between for ranks of several kinds, as "
            "roofline:4xh100,4xa100) or table:FILE (a file that profile wrote).",
            default_text=f"{DEFAULT_COSTS}; roofline of the devices where they are given",
        ),
    ]
    links: Annotated[
        Any,
        Option(
            None,
            "File with bandwidth and latency from rank to rank, which the command links writes.",
            default_text="transfers take no time",
            metavar="FILE",
            field=None,
        ),
    ]
    self_check: Annotated[
        bool,
        Option(
            True,
            "Prove the captured graph by a training step before it is used.",
            form="switch",
            field=None,
        ),
    ]


def _declared(types: type, *, is_choice: bool) -> Iterator[Option]:
    """Yield the options that a TypedDict declares, in its order."""
    for name, hint in get_type_hints(types, include_extras=True).items():
        # Annotated[int | None, Option(…)] has these two arguments.
        kind, option = get_args(hint)
        yield option.declared_as(name, kind, is_choice=is_choice)


# Help and page list them in this order.
OPTIONS: tuple[Option, ...] = (
    *_declared(_OtherTypes, is_choice=False),
    *_declared(ChoiceTypes, is_choice=True),
)
