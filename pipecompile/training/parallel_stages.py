"""Stages that a user's `parallelize` has divided: by FSDP2 over replicas, or by tensor parallelism.

`parallelize(stage, mesh)` changes the planned stages of this rank in place. The model gets the new
parameters, so that its state is under the original names as before. Its modules of torch.nn are
also those of the stages: they have new classes and hooks, which a later capture must not see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from pipecompile.errors import InputError
from pipecompile.graph.loss_module import LOSS, held_loss
from pipecompile.graph.model_state import named_state
from pipecompile.graph.recomputed_region import has_recomputed_regions
from pipecompile.ir.plan import ShardLevel
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.whole_values import WholeValues
from pipecompile.runtime import world
from pipecompile.runtime.local_share import LocalShare
from pipecompile.runtime.sharded_stages import ShardedStages
from pipecompile.runtime.shards import Shard, shard_of
from pipecompile.runtime.watch import StepWatch
from pipecompile.training.materialisation import bind
from pipecompile.training.program import Program

__all__ = ["ParallelStages", "Parallelize", "first_holders", "refuse_parallelize"]

Parallelize = Callable[[nn.Module, DeviceMesh], object]
"""Changes a stage in place; `fully_shard` and `parallelize_module` return the stage."""
# What a module is besides its tensors, as tools for parallelism change it.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def refuse_parallelize(parallelize: Parallelize | None, share: LocalShare) -> None:
    """Raise InputError unless a mesh and `parallelize` go together."""
    place = share.place
    if parallelize is None and place.divides_work:
        names = place.mesh.mesh_dim_names if place.mesh is not None else ()
        raise InputError(
            f"the mesh has the dimensions {names}, and the ranks along one that is neither pp nor "
            "dp would all compute the same; give parallelize=…, which divides the work"
        )
    if parallelize is not None and place.mesh is None:
        raise InputError(
            "parallelize= divides stages over a mesh, but there is none; give mesh=init_device_mesh"
            '(…, mesh_dim_names=("dp", "pp")), on several processes'
        )


class ParallelStages:
    """The stages of `planned` on this rank, after `parallelize` was called with each.

    `sharded` are those that FSDP2 divides, as far as the plan's `shard` says. InputError if the
    stages cannot run as they were left.
    """

    def __init__(
        self,
        parallelize: Parallelize,
        planned: Program,
        share: LocalShare,
        model: nn.Module,
        watch: StepWatch | None,
        shard: ShardLevel | None,
    ) -> None:
        place = share.place
        assert place.mesh is not None
        self._planned = planned
        self._as_built = {
            module: (type(module), *(vars(module)[hooks].copy() for hooks in _HOOKS))
            for module in model.modules()
        }
        # Tools for parallelism replace tensors: by name the old ones are found again in the model.
        stages = {index: planned.stages[index].module for index in share.stages}
        before = {index: dict(named_state(stage)) for index, stage in stages.items()}
        self._divides_work = place.divides_work
        for index, stage in stages.items():
            self._keep_whole(stage)
            _check_returned(parallelize(stage, place.mesh), stage, index)
        # Only when all stages are divided: FSDP2 settles its groups at the first use.
        self.sharded = ShardedStages(stages, _ranks_of(place.replica_group), watch, shard)
        for index, stage in stages.items():
            _check_hooks(stage, index)
        _replace(model, _replacements(before, stages))

    def adopt(self, program: Program, stages: Sequence[int]) -> None:
        """Let the stages of another program compute with the parameters of the planned ones."""
        for index in stages:
            stage = program.stages[index].module
            with self.sharded.named_as_whole(index):
                bind(stage, self._planned.stages[index].module)
            self._keep_whole(stage)

    @contextmanager
    def as_built(self) -> Iterator[None]:
        """Have the modules of the model as they were built in the block, except their tensors."""
        # A capture runs the modules themselves, whose hooks would talk to other ranks.
        now = {m: (type(m), *(vars(m)[hooks] for hooks in _HOOKS)) for m in self._as_built}
        try:
            _set(self._as_built)
            yield
        finally:
            _set(now)

    def _keep_whole(self, stage: fx.GraphModule) -> None:
        """Let what leaves a stage be whole, and what dropout draws for."""
        if not self._divides_work:
            return
        if has_recomputed_regions(stage):
            raise InputError(
                "the plan recomputes regions of stages, which tensor parallelism does not know; "
                'plan with recompute="none" or whole stages'
            )
        # Messages have the shapes of the plan, and the next stage takes a plain tensor: a part of
        # one, or a DTensor, would be neither.
        apply_passes(stage.graph, [WholeValues()])
        stage.recompile()


def _ranks_of(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return (world.rank(),) if group is None else tuple(sorted(dist.get_process_group_ranks(group)))


def _set(modules: Mapping[nn.Module, tuple[Any, ...]]) -> None:
    for module, (own_class, *hooks) in modules.items():
        module.__class__ = own_class
        vars(module).update(zip(_HOOKS, hooks, strict=True))


def _check_returned(returned: object, stage: nn.Module, index: int) -> None:
    """Raise InputError unless the stage was changed in place."""
    if returned is None or returned is stage:
        return
    kind = type(returned).__name__
    if isinstance(returned, DistributedDataParallel):
        raise InputError(
            f"parallelize wrapped stage {index} in {kind}, whose hooks do not fire under "
            "torch.autograd.grad, which a split backward runs: gradients would be those of one "
            "replica; leave it out, since replicas sum their gradients by themselves, or use "
            'fully_shard(stage, mesh=mesh["dp"])'
        )
    raise InputError(
        f"parallelize returned a {kind} for stage {index}, but the stage must be changed in place; "
        "use fully_shard or parallelize_module, and return the stage"
    )


def _check_hooks(stage: fx.GraphModule, index: int) -> None:
    """Raise InputError if hooks were put where a stage, which is one graph, never calls them."""
    # Paths that the graph calls, or whose parameters it reads.
    called = {str(node.target) for node in stage.graph.nodes if node.op != "call_function"}
    for path, module in stage.named_modules():
        # The stage itself may have hooks: the runtime calls it.
        if not path or path in called or not any(vars(module)[hooks] for hooks in _HOOKS):
            continue
        if path.partition(".")[0] == LOSS and held_loss(stage) is not None:
            raise InputError(
                f"parallelize has put hooks on {path!r}, but the loss is called with whole outputs "
                "and must return a whole loss; divide the modules of the model, and leave the loss"
            )
        raise InputError(
            f"parallelize has put hooks on {path!r} of stage {index}, which would never run: a "
            f"stage is one graph that calls only modules of torch.nn; choose such ones, for "
            f"example from {sorted(called)[:3]}"
        )


def _replacements(
    before: Mapping[int, Mapping[str, Tensor]], stages: Mapping[int, nn.Module]
) -> dict[int, Tensor]:
    """Return the new tensor for each old one, by its id.

    InputError if a name is gone, or if a tensor of several names has become several.
    """
    replaced: dict[int, Tensor] = {}
    for index, stage in stages.items():
        after = dict(named_state(stage))
        for name, old in before[index].items():
            if name not in after:
                raise InputError(
                    f"after parallelize stage {index} has no {name!r} any more: a module that "
                    "holds it was wrapped or replaced; change modules in place, as fully_shard and "
                    "parallelize_module do, or wrap them before the model is compiled"
                )
            # The second name of a tied tensor finds what the first one was replaced by.
            if replaced.setdefault(id(old), after[name]) is not after[name]:
                raise InputError(
                    f"parallelize has made two tensors of the tied parameter {name!r}, of stage "
                    f"{index} and of another name or stage on this rank; leave it whole "
                    "(ignored_params=… of fully_shard), or place these stages on different ranks"
                )
    return replaced


def _replace(model: nn.Module, replaced: Mapping[int, Tensor]) -> None:
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                table[key] = replaced.get(id(tensor), tensor)  # type: ignore[assignment]


def first_holders(model: nn.Module, share: LocalShare, planned: Program) -> frozenset[str]:
    """Return the names of which no earlier process holds the same part as this one.

    InputError, on all processes, if stages of one pipeline hold different parts of a tied one.
    """
    state = model.state_dict()
    own = {name: shard_of(value) for name, value in state.items() if share.holds(name)}
    parts: Sequence[dict[str, Shard]] = world.gather(own)
    for name in planned.ties:
        for pipeline in share.place.pipelines:
            # Sums of tied gradients add part to part, so both ranks must hold the same one.
            shards = {parts[rank][name] for rank in pipeline if name in parts[rank]}
            if len(shards) > 1:
                raise InputError(
                    f"tied parameter {name!r} is divided differently on the stages that hold it, "
                    "so their gradients cannot be summed; let parallelize divide it alike on all "
                    "of them, or leave it whole (ignored_params=… of fully_shard)"
                )
    # Divided over two replicas, rank 0 has part 0 of a weight and rank 1 part 1: each is the
    # first holder of its own part. Left whole, both have all of it, and rank 0 is.
    return frozenset(
        name
        for name, shard in own.items()
        if not any(parts[rank].get(name) == shard for rank in range(world.rank()))
    )
