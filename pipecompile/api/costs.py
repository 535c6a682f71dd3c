"""What one microbatch of a captured model costs: its cost graph, under the cost model that the user names."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, fx

from pipecompile import __version__
from pipecompile.api.target import Target
from pipecompile.cost_models.cache import NodeCost, keep, recalled
from pipecompile.cost_models.clock import describe
from pipecompile.cost_models.device import named_devices
from pipecompile.cost_models.flops import Flops
from pipecompile.cost_models.measured import VERSION, Measured, Recalled
from pipecompile.cost_models.protocol import Cost, CostModel
from pipecompile.cost_models.roofline import Roofline
from pipecompile.cost_models.table import CostFunction, Function, Table
from pipecompile.errors import InputError
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.settings import described, qualified
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.autograd_context import observed
from pipecompile.graph.recomputability import copied_bytes, recompute_limits
from pipecompile.ir.amount import Instructions
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.plan import Provenance
from pipecompile.profiling.kernel_scratch import own_instructions
from pipecompile.profiling.profile import profile
from pipecompile.profiling.workload import Loss
from pipecompile.runtime.microbatch import split

__all__ = ["Captured", "comparable", "cost_graph", "cost_model", "measured_on"]

CPU = torch.device("cpu")
FLOAT32 = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
NAMES = "flops, measured, measured:DEVICE, roofline:DEVICE, table:FILE"


@dataclass(frozen=True)
class Captured:
    """A model captured at the size of one microbatch: what it is, the graph for that size, and the microbatch."""

    capture: Capture
    module: fx.GraphModule
    sample: Arguments
    digest: str
    verified: bool

    @property
    def provenance(self) -> Provenance:
        """How the graph came about, as a plan states it."""
        notes = tuple(note.text for note in self.capture.notes)
        return Provenance(verified=self.verified, method=self.capture.method, notes=notes)


def cost_model(
    name: str, function: CostFunction | None = None, device: torch.device = CPU
) -> CostModel:
    """The cost model that `--costs NAME` stands for, "function" for the one given; InputError if there is none.

    `device` is where the model is: it is measured there unless the name says where.
    """
    kind, _, place = name.partition(":")
    match kind, bool(place):
        case "flops", False:
            return Flops()
        case "measured", _:
            return Measured(_device(place) if place else device)
        case "roofline", True:
            return Roofline.of(place)
        case "table", True:
            return Table.of(place)
        case "function", False if function is not None:
            return Function(function)
    raise InputError(
        f"costs={name!r} is not known; choose one of {NAMES}, or in Python give a function"
    )


def _device(name: str) -> torch.device:
    """The device to measure on; InputError if there is none of that name."""
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()):
        return device
    raise InputError(
        f"costs='measured:{name}', but there is no device {name!r} here; write measured:cpu or measured:cuda"
    )


def measured_on(costs: str, target: Target) -> torch.device | None:
    """The device on which these costs are measured; None if they are not. Reads no file."""
    if costs.partition(":")[0] != "measured":
        return None
    model = cost_model(costs, target.costs, target.device)
    return model.device if isinstance(model, Measured) else None


def comparable(costs: str) -> bool:
    """Whether these costs come out the same wherever a plan is checked; what is in a file only where the file is."""
    kind, _, place = costs.partition(":")
    if kind in ("roofline", "table"):
        return Path(place).is_file() or (kind == "roofline" and place in named_devices())
    return kind == "flops"


def cost_graph(
    target: Target,
    costs: str,
    microbatches: int,
    captured: Captured,
    *,
    fresh: bool = False,
    instructions: Instructions | None = None,
) -> CostGraph:
    """What one microbatch costs; with the loss, where a target is at hand or the model has its own.

    Measured costs are reused from an earlier call for the same graph and surroundings, unless they are to be `fresh`.
    On a CPU, scratch is that of kernels with these `instructions`, by default this CPU's.
    """
    model = cost_model(costs, target.costs, target.device)
    if isinstance(model, Table):
        model.check(
            captured.digest,
            (node.name for node in captured.module.graph.nodes if node.op != "get_attr"),
        )
    if model.real:
        target.check_values(f"costs={costs!r}")
    inputs = [
        target.on_device(tensor) for tensor in captured.capture.inputs.flatten(captured.sample)
    ]
    loss, targets = loss_of(target, microbatches, captured)

    def profiled(model: CostModel) -> CostGraph:
        graph = profile(
            captured.module,
            inputs,
            model,
            loss=loss,
            targets=targets,
            instructions=instructions or own_instructions(),
        )
        graph = _limited(
            replace(_canonical(graph, captured.capture), fingerprint=captured.digest),
            captured.module,
        )
        return model.finished(graph) if isinstance(model, Table) else graph

    if not isinstance(model, Measured):
        return profiled(model)
    depends_on = _surroundings(model, target, microbatches, captured)
    known = recalled(depends_on) if depends_on and not fresh else None
    if known is not None:
        before = {name: Cost(**msgspec.structs.asdict(cost)) for name, cost in known.items()}
        return profiled(Recalled(before, model.memory, model.fused_attention))
    graph = profiled(model)
    _tell(model, len(graph.nodes))
    if depends_on:
        keep(depends_on, {name: NodeCost(**asdict(cost)) for name, cost in model.by_name.items()})
    return graph


def _limited(graph: CostGraph, module: fx.GraphModule) -> CostGraph:
    """With what may not be computed again, and what has to be copied for that."""
    limits, copied = recompute_limits(module), copied_bytes(module)
    nodes = tuple(
        replace(node, again=node.name not in limits.never, written=copied.get(node.name, ()))
        for node in graph.nodes
    )
    return replace(graph, nodes=nodes, together=limits.together)


def _tell(model: Measured, nodes: int) -> None:
    print(
        f"measured {len(model.known):,} distinct calls of {nodes:,} nodes on {describe(model.device)}, "
        f"median spread {model.spread:.1%}",
        file=sys.stderr,
    )


def _surroundings(
    model: Measured, target: Target, microbatches: int, captured: Captured
) -> dict[str, str] | None:
    """All that measured costs depend on; None, which standard error explains, if the loss cannot be described."""
    try:
        loss = _described_loss(target, microbatches)
    except LookupError as error:
        print(
            f"measured costs are not kept: the loss uses {error.args[0]}, which may change",
            file=sys.stderr,
        )
        return None
    return {
        "graph": captured.digest,
        "loss": loss,
        "device": f"{model.device.type} {describe(model.device)}",
        "threads": str(torch.get_num_threads()),
        "autocast": str(observed().autocast),
        "backends": str(_backends()),
        "torch": str(torch.__version__),
        "pipecompile": __version__,
        "measured": str(VERSION),
    }


def _described_loss(target: Target, microbatches: int) -> str:
    """The loss and the targets of a microbatch, as far as they are part of the costs; LookupError if nobody can say."""

    def refuse(value: object) -> str:
        raise LookupError(f"an object of {qualified(type(value))}")

    if target.loss_fn is None or target.targets is None:
        return ""
    return described((target.loss_fn, split(target.targets, microbatches)[0]), refuse, code=True)


def _backends() -> dict[str, object]:
    """The switches by which kernels are chosen."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    return {
        **{name: attrgetter(f"{name}.fp32_precision")(torch.backends) for name in FLOAT32},
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "mkldnn": (mkldnn.enabled, mkldnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def loss_of(
    target: Target, microbatches: int, captured: Captured
) -> tuple[Loss | None, list[Tensor]]:
    """The loss of a microbatch as a function of flat outputs and target tensors, and these; None without a target."""
    if target.loss_fn is None or target.targets is None:
        return None, []
    leaves, spec = torch.utils._pytree.tree_flatten(split(target.targets, microbatches)[0])

    def loss(outputs: Sequence[Any], given: Sequence[Tensor]) -> Tensor:
        rest = iter(given)
        tree = torch.utils._pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec
        )
        return target.trained_by(captured.capture.outputs.unflatten(outputs), tree)

    return loss, [target.on_device(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def _canonical(costs: CostGraph, captured: Capture) -> CostGraph:
    """The same with every parameter under its first name in the original model, tied or not."""
    first, aliases = captured.first_names, captured.aliases
    parameters = [
        replace(parameter, name=name, aliases=aliases.get(name, ()))
        for parameter in costs.parameters
        for name in [first.get(parameter.name, parameter.name)]
    ]

    def canonical(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({first.get(name, name) for name in names}))

    nodes = [
        replace(
            node,
            parameters=canonical(node.parameters),
            given_as_views=canonical(node.given_as_views),
        )
        for node in costs.nodes
    ]
    return replace(
        costs, nodes=tuple(nodes), parameters=tuple(sorted(parameters, key=lambda p: p.name))
    )
