"""The plan: the file that a team commits, like a lockfile.

Simulating, checking and drawing it needs neither the model nor PyTorch.
"""

from __future__ import annotations

from typing import Literal, get_args

from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.encodings import Encoding
from pipecompile.ir.footprint import Footprint
from pipecompile.ir.graph import TimeUnit
from pipecompile.ir.links import Links
from pipecompile.ir.plurals import counted
from pipecompile.ir.rank_memory import RankMemory
from pipecompile.ir.robustness import NoiseShare, Robustness
from pipecompile.ir.schedule import Idle, Schedule
from pipecompile.ir.serialization import FileValue, NonNegative, Positive, Value
from pipecompile.ir.setting import JointSearch
from pipecompile.ir.size import caps_by_rank
from pipecompile.ir.stage import Stage
from pipecompile.ir.stage_ranks import has_stage_replicas, stages_on

__all__ = [
    "GRANULARITIES",
    "LAYOUT_FORMATS",
    "RECOMPUTES",
    "SHARD_LEVELS",
    "BatchNormUpdate",
    "Faster",
    "Fingerprint",
    "Granularity",
    "LayoutFormat",
    "Options",
    "Ordering",
    "OwnedParameter",
    "Plan",
    "Prediction",
    "Recompute",
    "Route",
    "Search",
    "ShardLevel",
]

Granularity = Literal["operators", "modules", "blocks", "auto"]
GRANULARITIES: tuple[Granularity, ...] = get_args(Granularity)
Communication = Literal["relay", "overlap"]
"""What a load pays for transfers: all of them, or what is longer than its compute."""
Recompute = Literal["auto", "none", "stage", "except-last", "block", "sqrt"]
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)
LayoutFormat = Literal[
    "megatron",
    "megatron-hybrid",
    "torchtitan",
    "split-spec",
    "device-map",
    "vllm",
    "sglang",
    "json",
]
"""In whose words a layout is written."""
LAYOUT_FORMATS: tuple[LayoutFormat, ...] = get_args(LayoutFormat)
ShardLevel = Literal["optimizer", "gradients", "parameters"]
SHARD_LEVELS: tuple[ShardLevel, ...] = get_args(ShardLevel)
"""What replicas divide among them: each includes those before it."""
BatchNormUpdate = Literal["microbatch", "minibatch"]
"""After what batch norms update their running averages."""


class Options(Value, frozen=True, kw_only=True):
    """The options that a plan was made by.

    `memory_bytes` is the cap of every rank, or one for each; None for no cap. `stages_per_rank` and
    `placement` (linear, loop or v) are None where the schedule decides. Without an `optimizer` its
    state is not counted; `master_weights` are float32 copies of parameters of fewer bits, held
    beside that state, and `optimizer_on_host` says that all of it is in the host's memory. With
    `post_validation` updates are made before they are known to be right, and copies of what they
    overwrite are held until then. `recompute` is the policy: `auto` takes what fits the cap at the
    least extra time, the others are named in the glossary. `encodings` are the ones of saved
    tensors that stages may use where that lets them fit. `granularity` is what the model was cut
    between, `comm` what the loads that were compared pay for transfers (None: what the objective
    asks for), and `leaf` are modules that were taken as one node. `batch_norm` says after what
    batch norms update their running averages; no figure of a plan depends on it. A `layout`, of
    `layout_format`, is the cut; its layers are those in the module `layers`, or found in the model.
    Over `replicas` gradients are summed, and over `stage_replicas`, the ranks of each stage, that
    take its microbatches in turns; with `shard` each replica holds a part of every parameter
    and of its optimizer state between steps, and in a step of the gradients and the parameters too,
    as far as it says. For inference `kv_tokens` are reserved in each rank's KV cache, to which an
    attention adds `kv_token_bytes` for each, or its keys and values if that is None. Under `noise`,
    a share of all times, the plan is one of least regret among those about as fast.
    """

    k: Positive
    microbatches: Positive
    schedule: str
    objective: str
    recompute: Recompute
    memory_bytes: NonNegative | tuple[NonNegative, ...] | None
    costs: str
    # Not shared: msgspec gives each instance an empty dict of its own.
    pin: dict[str, int] = {}
    layout: str | None = None
    layout_format: LayoutFormat | None = None
    layers: str | None = None
    groups: tuple[tuple[str, ...], ...] = ()
    parameters_everywhere: bool = False
    granularity: Granularity = "operators"
    comm: Communication | None = None
    leaf: tuple[str, ...] = ()
    stages_per_rank: Positive | None = None
    placement: Literal["linear", "loop", "v"] | None = None
    optimizer: str | None = None
    master_weights: bool = False
    optimizer_on_host: bool = False
    post_validation: bool = False
    encodings: tuple[Encoding, ...] = ()
    batch_norm: BatchNormUpdate = "microbatch"
    replicas: Positive = 1
    stage_replicas: tuple[Positive, ...] | None = None
    shard: ShardLevel | None = None
    kv_tokens: Positive | None = None
    kv_token_bytes: Positive | None = None
    noise: NoiseShare | None = None

    @property
    def is_inference(self) -> bool:
        """Whether the plan runs forwards alone, and so trains nothing."""
        return self.schedule == "forward-only"

    def caps(self, ranks: int) -> tuple[int, ...] | None:
        """Return the cap of each rank, None without caps.

        InputError if they are listed for another number of ranks.
        """
        return None if self.memory_bytes is None else caps_by_rank(self.memory_bytes, ranks)


class Fingerprint(Value, frozen=True, kw_only=True):
    """SHA-256 of the captured graph and of its costs: the plan holds for these alone."""

    graph: str
    costs: str


class Route(Value, frozen=True, kw_only=True):
    """A tensor that is read later than in the next stage: the stages in between relay it."""

    name: str
    stages: tuple[NonNegative, ...]


class OwnedParameter(Value, frozen=True, kw_only=True, omit_defaults=True):
    """A parameter or buffer, the stages that hold it, and the stage whose copy is saved (`owner`).

    The gradients of a tied parameter, which several stages hold, are summed over them.
    """

    name: str
    aliases: tuple[str, ...] = ()
    bytes: NonNegative
    trainable: bool = True
    owner: NonNegative
    stages: tuple[NonNegative, ...]


# Left out of files where it says nothing, so that those of synchronous plans are as before.
class Prediction(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The predicted time and memory of one step; loads, idle times and memory are per rank.

    Of an asynchronous schedule the step is one minibatch alone, filled and emptied, and
    `minibatch_ns` what one takes in a full pipeline. It is None of others.
    """

    step_ns: NonNegative
    span_ns: NonNegative
    bubble: float
    # Of one microbatch, on average over the step: with `except-last` the last one takes less.
    loads_ns: tuple[NonNegative, ...]
    idle: tuple[Idle, ...]
    memory: tuple[RankMemory, ...]
    minibatch_ns: NonNegative | None = None


class Faster(Value, frozen=True, kw_only=True):
    """Another objective, and the simulated step of its cut."""

    objective: str
    step_ns: NonNegative


class Search(Value, frozen=True, kw_only=True):
    """How good the cut is: `value` and lower `bound` of the objective, and all objectives' values.

    `faster` is another objective, if the simulated step of its cut is more than 1 % shorter.
    """

    objective: str
    method: str
    # Whole numbers in the unit of the objective, ns² for `variance` and else ns: so whether they
    # are equal, which is the proof, does not depend on rounding.
    value: NonNegative
    bound: NonNegative
    gap: float
    proven: bool
    values: dict[str, int]
    faster: Faster | None = None


class Ordering(Value, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a search for a schedule: steps of the best order and of named ones that fit.

    No order on this placement has a shorter step than `bound_ns`. If the search's order
    `is_in_plan`, its gain survived noise on the durations. Else the plan has the best named one.
    Where memory keeps ranks idle and nothing is recomputed, `recomputed_ns` is a shorter step that
    recompute would give, if there is one.
    """

    searched_ns: NonNegative
    bound_ns: NonNegative
    named_ns: dict[str, int]
    is_in_plan: bool
    recomputed_ns: NonNegative | None = None


class Provenance(Value, frozen=True, kw_only=True):
    """How the model, of class `model`, became a graph: by which method, and what to know about it.

    `verified` tells whether a training step proved graph and model equal. `target` is what the
    command line was given; a plan that was made in Python has none.
    """

    verified: bool
    model: str = ""
    target: str = ""
    method: str = "recorded"
    notes: tuple[str, ...] = ()


class Plan(FileValue, frozen=True, kw_only=True):
    """Everything that a pipelined training step needs besides the model's weights.

    `allocator` is the one that memory is predicted for. Times (`_ns`) are in `time_unit`, and
    `cost_notes` say what to know of how they were found. `joint` says how its options were chosen
    where they were, for the devices at hand.
    """

    schema: Literal["pipecompile/plan/1"] = "pipecompile/plan/1"
    fingerprint: Fingerprint
    options: Options
    capture: Provenance
    k: Positive
    ranks: Positive
    stages_per_rank: Positive
    replicas: Positive
    microbatches: Positive
    microbatch_shapes: tuple[tuple[NonNegative, ...], ...]
    links: Links
    allocator: AllocatorName
    time_unit: TimeUnit = "ns"
    cost_notes: tuple[str, ...] = ()
    stages: tuple[Stage, ...]
    routes: tuple[Route, ...]
    parameters: tuple[OwnedParameter, ...]
    schedule: Schedule
    prediction: Prediction
    search: Search
    ordering: Ordering | None = None
    robustness: Robustness | None = None
    joint: JointSearch | None = None

    def __post_init__(self) -> None:
        # What a plan says twice must agree, so that a file that was edited in one place is refused.
        self._check_sizes()
        self._check_options()
        self._check_stages()

    def _check_sizes(self) -> None:
        """Raise ValueError unless all parts have the plan's stages, ranks and microbatches."""
        _same("stages", len(self.stages), "k", self.k)
        _same("ranks of the schedule", self.schedule.ranks, "ranks", self.ranks)
        _same("placed stages", len(self.schedule.placement), "k", self.k)
        _same(
            "microbatches of the schedule",
            self.schedule.microbatches,
            "microbatches",
            self.microbatches,
        )
        if not has_stage_replicas(self.schedule.placement):
            _same("ranks × stages per rank", self.ranks * self.stages_per_rank, "k", self.k)
        _same("ranks in the prediction", len(self.prediction.memory), "ranks", self.ranks)
        if not self.links.fits(self.ranks * self.replicas):
            raise ValueError(
                f"links for {self.links.ranks} ranks do not connect the plan's "
                f"{self.ranks * self.replicas}"
            )

    def _check_options(self) -> None:
        """Raise ValueError unless the plan has what its options ask for."""
        _same("k of the options", self.options.k, "k", self.k)
        _same("replicas of the options", self.options.replicas, "replicas", self.replicas)
        replicas, ranks = self.options.stage_replicas, self.schedule.stage_ranks
        if replicas != tuple(map(len, ranks)) and (replicas or self.ranks > self.k):
            raise ValueError(
                f"the options ask for stages on {list(replicas or ())} ranks, but the placement "
                f"{list(self.schedule.placement)} has them on {list(map(len, ranks))}"
            )
        self.options.caps(self.ranks)
        _same(
            "microbatches of the options",
            self.options.microbatches,
            "microbatches",
            self.microbatches,
        )
        if (self.options.schedule == "search") != (self.ordering is not None):
            raise ValueError(
                "a plan must have an ordering if its options ask for a search, and only then"
            )
        if self.robustness is not None and self.robustness.noise != self.options.noise:
            raise ValueError(
                f"the options ask for a noise of {self.options.noise}, the plan was chosen under "
                f"{self.robustness.noise}"
            )
        if self.options.schedule not in ("search", self.schedule.name):
            raise ValueError(
                f"the options ask for {self.options.schedule!r}, "
                f"the schedule is {self.schedule.name!r}"
            )

    def _check_stages(self) -> None:
        # A node in two stages runs twice for each microbatch, so it must be a copy.
        names = [name for stage in self.stages for name in stage.own_nodes]
        _same("distinct nodes", len(set(names)), "nodes in all stages", len(names))
        before: set[str] = set()
        for index, stage in enumerate(self.stages):
            if absent := set(stage.copies) - before:
                raise ValueError(f"stage {index} copies {min(absent)}, which no earlier stage runs")
            before.update(stage.own_nodes)
            if stage.module_runs:
                counted_nodes = sum(run.nodes for run in stage.module_runs)
                _same("nodes of the module runs", counted_nodes, "nodes", len(stage.own_nodes))
        # Also of what is only relayed: every tensor crosses one boundary at a time.
        for left, right in zip(self.stages, self.stages[1:], strict=False):
            if left.outputs != right.inputs:
                raise ValueError("a stage's outputs are not the next one's inputs")

    def __repr__(self) -> str:
        """One line: the whole plan is a page, which `pipecompile show` prints."""
        return (
            f"Plan({counted(self.k, 'stage')} on {counted(self.ranks, 'rank')}, "
            f"{self.schedule.name}, {counted(self.microbatches, 'microbatch')}, "
            f"costs {self.options.costs})"
        )

    def _repr_html_(self) -> str:
        """The plan in short, as a notebook shows it."""
        # A report of a value, which lies above the values: pyproject.toml allows this one import.
        from pipecompile.api.report import card_of

        return card_of(self)

    @property
    def assignment(self) -> dict[str, int]:
        """The stage of each node: of one with copies the first."""
        return {name: index for index, stage in enumerate(self.stages) for name in stage.own_nodes}

    @property
    def copied(self) -> frozenset[str]:
        """The nodes that several stages run, each for itself."""
        return frozenset(name for stage in self.stages for name in stage.copies)

    @property
    def regions(self) -> dict[int, tuple[tuple[str, ...], ...]]:
        """The runs of nodes that the backward of each stage recomputes."""
        return {index: stage.regions for index, stage in enumerate(self.stages) if stage.regions}

    @property
    def encoded_runs(self) -> dict[int, tuple[tuple[tuple[str, ...], tuple[Encoding, ...]], ...]]:
        """The runs of nodes of each stage whose saved tensors are encoded, with the encodings."""
        runs = {
            index: tuple((run.nodes, run.encodings) for run in s.encoded_runs)
            for index, s in enumerate(self.stages)
        }
        return {index: chosen for index, chosen in runs.items() if chosen}

    def parameters_of(self, stage: int) -> list[OwnedParameter]:
        """Return the parameters and buffers that lie on a stage."""
        return [parameter for parameter in self.parameters if stage in parameter.stages]

    def footprints(self, rank: int) -> dict[int, Footprint]:
        """Return what the stages of a rank hold, by stage."""
        own = stages_on(self.schedule.placement, rank)
        return {index: self.stages[index].footprint for index in own}


def _same(what: str, got: int, expected_what: str, expected: int) -> None:
    if got != expected:
        raise ValueError(f"{what} ({got}) and {expected_what} ({expected}) must be equal")
