"""Where this process is: among the ranks of its pipeline, and among the pipelines.

A mesh has a dimension "pp". Those named "dp" or "dp_…" are replicas, which are given different
data. The ranks along any other one, such as "tp", are given the same data and divide its work:

    mesh (dp 2, pp 2, tp 2)         pipelines              replica
    rank 0 1   rank 4 5             0 2   1 3              0
         2 3        6 7             4 6   5 7              1
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipecompile.errors import InputError, StalePlanError
from pipecompile.ir.plan import Plan
from pipecompile.runtime import world

__all__ = [
    "RankPlace",
    "check_world",
    "device_of_this_rank",
    "running_replicas",
]

logger = logging.getLogger("pipecompile.runtime")
# The names that torch's own recipes give the dimensions of a mesh.
PIPELINE, REPLICAS = "pp", "dp"


@dataclass(frozen=True)
class RankPlace:
    """The place of this process.

    `rank` counts the ranks of a pipeline, and `replica` those pipelines that have different data.
    `pipelines` are the global ranks of each pipeline, replica by replica, and `pipeline` is the
    index of the own one. `pipeline_group` are its processes, None for all there are. Those that
    hold the same stages are `stage_group`, and those of them with other data `replica_group`, each
    None if nobody else does. `mesh` has all of them.
    """

    rank: int = 0
    replica: int = 0
    replicas: int = 1
    pipelines: tuple[tuple[int, ...], ...] = ((0,),)
    pipeline: int = 0
    pipeline_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    stage_group: dist.ProcessGroup | None = None
    mesh: DeviceMesh | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return sum(map(len, self.pipelines)) > 1

    @property
    def divides_work(self) -> bool:
        """Whether several processes are given the same data for the same stages."""
        return len(self.pipelines) > self.replicas

    @property
    def is_first(self) -> bool:
        """Whether the own pipeline is the first one, whose values are those that are saved."""
        return self.pipeline == 0

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The processes of the own pipeline."""
        return self.pipelines[self.pipeline]

    @classmethod
    def of(cls, ranks: int, mesh: DeviceMesh | None = None) -> RankPlace:
        """Return the place in `mesh`, whose dimension "pp" has `ranks` ranks.

        Without a mesh all processes are one pipeline of `ranks`, or several. InputError if the mesh
        has no such dimension. Every process must call this, since it may create process groups.
        """
        processes = world.size()
        if mesh is None and processes == 1:
            return cls()
        if mesh is None and processes == ranks:
            return cls(dist.get_rank(), pipelines=(tuple(range(ranks)),))
        if mesh is None:
            replicas = processes // ranks
            if not dist.get_rank():
                # A warning, since gradients now are means over what all replicas are given.
                logger.warning(
                    "%d processes are %d replicas of a pipeline of %d ranks: each replica is to be "
                    "given its own share of the batch (mesh=… says the same without this warning)",
                    processes,
                    replicas,
                    ranks,
                )
            # Neighbours in a pipeline get neighbouring ranks, which are likely on one node.
            kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
            mesh = init_device_mesh(kind, (replicas, ranks), mesh_dim_names=(REPLICAS, PIPELINE))
        return cls._in_mesh(ranks, mesh)

    @classmethod
    def _in_mesh(cls, ranks: int, mesh: DeviceMesh) -> RankPlace:
        names = mesh.mesh_dim_names or ()
        if PIPELINE not in names or mesh[PIPELINE].size() != ranks:
            sizes = dict(zip(names, mesh.shape, strict=False)) or tuple(mesh.shape)
            raise InputError(
                f"the mesh has the dimensions {sizes}, but the plan is for {ranks} ranks; make it "
                f'with init_device_mesh(…, (n, {ranks}), mesh_dim_names=("dp", "pp"))'
            )
        if sorted(mesh.mesh.flatten().tolist()) != list(range(world.size())):
            raise InputError(
                f"the mesh {names} has {mesh.size()} of the {world.size()} processes, and the "
                "others would train a model of their own; give the whole mesh (mesh=mesh), not a "
                "part of it"
            )
        # In the drawing above data is ["dp"] and others are ["tp"]. Pipelines are listed replica
        # by replica, so with four of them and two replicas 0 and 1 belong to replica 0, and 2 and
        # 3 to replica 1.
        data = [name for name in names if _has_own_data(name)]
        others = [name for name in names if name != PIPELINE and not _has_own_data(name)]
        pipelines = _rows(mesh, [PIPELINE])
        pipeline = next(index for index, row in enumerate(pipelines) if dist.get_rank() in row)
        replicas = running_replicas(ranks, mesh)
        return cls(
            mesh.get_local_rank(PIPELINE),
            pipeline // (len(pipelines) // replicas),
            replicas,
            pipelines,
            pipeline,
            mesh.get_group(PIPELINE),
            _group(mesh, data),
            _group(mesh, data + others),
            mesh,
        )


def running_replicas(ranks: int, mesh: DeviceMesh | None) -> int:
    """Return how many replicas of a pipeline of `ranks` run, 0 if the processes do not make up one;
    they are the dimensions of `mesh` that have own data.
    """
    if mesh is None:
        return world.size() // ranks
    return prod(mesh[name].size() for name in mesh.mesh_dim_names or () if _has_own_data(name))


def _has_own_data(name: str) -> bool:
    """Return whether the ranks along a dimension of a mesh are given different data."""
    return name == REPLICAS or name.startswith(f"{REPLICAS}_")


def _rows(mesh: DeviceMesh, dimensions: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the global ranks along `dimensions` for each place in the others, replicas first."""
    names = mesh.mesh_dim_names or ()
    rest = [name for name in names if name not in dimensions]
    rest.sort(key=lambda name: not _has_own_data(name))
    # Dimensions (dp, pp, tp) along "pp": permuted to (dp, tp, pp), each row is one pipeline.
    order = [names.index(name) for name in (*rest, *dimensions)]
    size = prod(mesh[name].size() for name in dimensions)
    return tuple(map(tuple, mesh.mesh.permute(order).reshape(-1, size).tolist()))


def _group(mesh: DeviceMesh, dimensions: Sequence[str]) -> dist.ProcessGroup | None:
    """Return the processes along `dimensions` of a mesh; None if that is this one only."""
    several = [name for name in dimensions if mesh[name].size() > 1]
    if len(several) < 2:
        return mesh.get_group(several[0]) if several else None
    own = dist.get_rank()
    # Every process makes every group, since ranks create process groups together.
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {
        row: dist.new_group(list(row)) for row in _rows(mesh, several)
    }
    return next(group for row, group in groups.items() if own in row)


def device_of_this_rank() -> torch.device | None:
    """Return the GPU of this process under NCCL; None where the model's device is used."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return None


def check_world(plan: Plan) -> None:
    """Raise StalePlanError unless the processes make up pipelines of the plan's ranks."""
    processes = world.size()
    if processes == 1 or processes % plan.ranks == 0:
        return
    several = ""
    if plan.stages_per_rank > 1:
        name, each = plan.schedule.name, plan.stages_per_rank
        several = f" (schedule {name!r} places k={plan.k} stages {each} on a rank)"
    raise StalePlanError(
        f"the plan is for {plan.ranks} ranks{several}, but {processes} processes run; launch "
        f"torchrun --nproc-per-node {plan.ranks}, or a multiple for replicas, or plan with "
        f"ranks={processes}, which is k={processes * plan.stages_per_rank}"
    )
