"""Where this process is: among the ranks of its pipeline, and among the pipelines."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipecompile.errors import InputError, StalePlanError
from pipecompile.ir.plan import Plan
from pipecompile.runtime import world

__all__ = ["RankPlace", "check_world", "device_of_this_rank"]

logger = logging.getLogger("pipecompile.runtime")
PIPELINE, REPLICAS = "pp", "dp"  # the names that torch's own recipes give the dimensions of a mesh


@dataclass(frozen=True)
class RankPlace:
    """The place of this process.

    `rank` counts the ranks of a pipeline, `replica` the pipelines. `pipelines` are the global ranks
    of each pipeline. `pipeline_group` are the processes of the own pipeline, None for all there
    are; `replica_group` are those that hold the same stages, None if nobody else does.
    """

    rank: int = 0
    replica: int = 0
    pipelines: tuple[tuple[int, ...], ...] = ((0,),)
    pipeline_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return sum(map(len, self.pipelines)) > 1

    @property
    def replicas(self) -> int:
        """How many pipelines train the same model."""
        return len(self.pipelines)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The processes of the own pipeline."""
        return self.pipelines[self.replica]

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
            return cls(dist.get_rank(), 0, (tuple(range(ranks)),))
        if mesh is None:
            replicas = processes // ranks
            logger.info("%d processes are %d replicas of %d ranks", processes, replicas, ranks)
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
        unknown = [name for name in names if name not in (PIPELINE, REPLICAS)]
        if unknown:
            raise InputError(
                f"the mesh has a dimension {unknown[0]!r}; pipelines have ranks (pp) and replicas "
                "(dp) only"
            )
        ranks_last = mesh.mesh.movedim(names.index(PIPELINE), -1).reshape(-1, ranks)
        pipelines = tuple(tuple(row) for row in ranks_last.tolist())
        replica = mesh.get_local_rank(REPLICAS) if REPLICAS in names else 0
        several = len(pipelines) > 1
        return cls(
            mesh.get_local_rank(PIPELINE),
            replica,
            pipelines,
            mesh.get_group(PIPELINE),
            mesh.get_group(REPLICAS) if several else None,
        )


def device_of_this_rank() -> torch.device | None:
    """Return the GPU of this process under NCCL; None where the model's device is used."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return None


def check_world(plan: Plan) -> None:
    """StalePlanError unless the processes are one pipeline of the plan's ranks, or several."""
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
