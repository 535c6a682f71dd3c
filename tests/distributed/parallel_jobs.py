"""What workers do in tests of `parallelize=`: each function runs on every rank."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import InputError
from pipecompile.frontend.signature import arguments_of
from pipecompile.frontend.target import Target
from pipecompile.ir.plan import ShardLevel
from pipecompile.runtime.rank_step import RankStep
from pipecompile.runtime.shards import local_part, whole
from pipecompile.training.pipeline import Pipeline
from tests.device import DEVICE
from tests.distributed.materialisation_jobs import Tied, tokens_of
from tests.distributed.training_jobs import Run, mixture, run_of, run_on, token_loss

Parallelize = Callable[[nn.Module, DeviceMesh], object]
# What FSDP2 gathers and sums with; releases of torch name it differently.
_IS_RENAMED = hasattr(dist, "all_gather_single")
GATHER = "all_gather_single" if _IS_RENAMED else "all_gather_into_tensor"
SCATTER = "reduce_scatter_single" if _IS_RENAMED else "reduce_scatter_tensor"


def mesh_of(**sizes: int) -> DeviceMesh:
    """A mesh of these dimensions."""
    return init_device_mesh(DEVICE.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def sharding(ranks: int, replicas: int, reshard: bool | None = None) -> dict[str, Any]:
    """The options that shard each stage over replicas."""

    def parallelize(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=reshard)

    return {"mesh": mesh_of(dp=replicas, pp=ranks), "parallelize": parallelize}


# -- what plans count


def counted_replicas() -> tuple[int, list[str]]:
    """The replicas that the plan of two pipelines counts, and the warnings of four pipelines: that
    one, its plan with FSDP2, one of a plan for one replica, and one whose table is not sharded.
    """

    def whole_table(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        table = {p for name, p in stage.named_parameters() if name.startswith("table")}
        return fully_shard(stage, mesh=mesh["dp"], ignored_params=table)

    def compiled(**options: Any) -> Pipeline:
        target = mixture(16)
        return pipecompile(
            target.model,
            target.call.args[0],
            ranks=2,
            microbatches=2,
            loss_fn=token_loss,
            costs="flops",
            self_check=False,
            **options,
        )

    with collected_warnings() as warnings:
        plan = compiled().plan
        compiled(**sharding(2, 2))
        compiled(replicas=1)
        compiled(**{**sharding(2, 2), "shard": "optimizer", "parallelize": whole_table})
        compiled(**sharding(2, 2), shard="optimizer")
    return plan.replicas, [text for text in warnings if "running averages" not in text]


@contextmanager
def collected_warnings() -> Iterator[list[str]]:
    """Collect what the package warns of in the block."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pipecompile")
    logger.addHandler(handler)
    try:
        yield texts
    finally:
        logger.removeHandler(handler)


# -- FSDP2


def sharded_step(
    ranks: int, replicas: int, schedule: str, reshard: bool | None, shard: ShardLevel | None = None
) -> tuple[tuple[float, ...], tuple[int, int]]:
    """How far gradients, loss, norm and clipped gradients of a second step are from those of the
    unsplit model, and how many gathers and sums over replicas that step makes.
    """
    options = {"schedule": schedule, "shard": shard, **sharding(ranks, replicas, reshard)}
    run = run_of(ranks, replicas, **options)
    run.step()
    run.pipeline.zero_grad()
    wanted = run.unsplit_step()
    with (
        patch.object(dist, GATHER, wraps=getattr(dist, GATHER)) as gather,
        patch.object(dist, SCATTER, wraps=getattr(dist, SCATTER)) as reduce,
    ):
        loss = run.step(everywhere=True)
        exchanges = gather.call_count, reduce.call_count
    return (run.distance(), abs(loss.item() - wanted.item()), *clipped(run)), exchanges


def clipped(run: Run) -> tuple[float, float]:
    """How far the norm and clipped gradients are from those of the unsplit model."""
    parameters = [p for p in run.reference.model.parameters() if p.grad is not None]
    wanted = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
    norm = run.pipeline.clip_grad_norm_(0.01)
    return abs(norm.item() / wanted.item() - 1), run.distance()


def accumulated(shard: ShardLevel) -> float:
    """The distance of gradients after two steps that accumulate and one that does not."""
    run = run_of(2, 2, schedule="zb-h1", shard=shard, **sharding(2, 2))
    wanted: dict[str, Tensor] = {}
    for step in range(3):
        run.pipeline.steps = step
        run.unsplit_step()
        for name, gradient in run.unsplit_gradients().items():
            wanted[name] = wanted.get(name, torch.zeros_like(gradient)) + gradient
    run.pipeline.steps = 0
    with patch.object(dist, SCATTER, wraps=getattr(dist, SCATTER)) as reduce:
        run.step(accumulate=True)
        run.step(accumulate=True)
        # Gradients stay aside, or their parts do.
        assert reduce.call_count == (0 if shard == "optimizer" else 2 * 4)
    assert all(parameter.grad is None for parameter in run.pipeline.parameters())
    run.step()
    return run.distance(wanted)


def overflowed() -> tuple[float, bool]:
    """The scale after an infinity on one rank of one replica, and whether weights moved."""
    run = run_of(2, 2, schedule="1f1b", **sharding(2, 2))
    optimizer = torch.optim.SGD(run.pipeline.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=8.0)
    before = [local_part(parameter).clone() for parameter in run.pipeline.parameters()]
    backward = RankStep._backward

    def planted(rank_step: RankStep, index: int, microbatch: int) -> None:
        backward(rank_step, index, microbatch)
        if (index, microbatch, dist.get_rank()) == (1, 2, 3):
            gradients = [p.grad for p in rank_step._stages[1].module.parameters()]
            gradients[0].view(-1)[3] = torch.inf

    with patch.object(RankStep, "_backward", planted):
        run.step(scaler=scaler)
    scaler.step(optimizer)
    scaler.update()
    moved = any(
        not torch.equal(old, local_part(new))
        for old, new in zip(before, run.pipeline.parameters(), strict=True)
    )
    return scaler.get_scale(), moved


def evaluated(file: str) -> tuple[float, float, float]:
    """How far outputs of 13 samples and the loss of all are from those of the unsplit model, and
    gradients of a smaller batch, with weights from a safetensors file that the pipeline wrote.
    """
    run = run_of(2, 2, schedule="1f1b", batch_norm="minibatch", **sharding(2, 2))
    run.pipeline.save_safetensors(file)
    for parameter in run.pipeline.parameters():
        local_part(parameter).detach().zero_()
    run.pipeline.load_safetensors(file)
    tokens, targets = run.whole.call.args[0], run.whole.targets
    model = run.reference.model.eval()
    rows = run.part(tokens)
    output = run.pipeline.evaluate(rows[:13])
    loss = run.pipeline.evaluate(rows, run.part(targets))
    far = 0.0
    if output is not None:
        far = (output - model(rows[:13])).abs().max().item()
        far = max(far, (loss - token_loss(model(tokens), targets)).abs().item())
    model.train()
    run.pipeline.step(rows[:12], run.part(targets)[:12])
    parts = [torch.cat([part[:12] for part in each.chunk(2)]) for each in (tokens, targets)]
    smaller = Target(model, arguments_of(model, parts[0]), token_loss, parts[1])
    run.reference.step(smaller, 6, seed=run.pipeline.seed, step=0)
    return far, run.distance(), clipped(run)[0]


def evaluated_unequally(reshard: bool | None) -> float:
    """How far an evaluation's loss is from the unsplit one, if one replica has a remainder."""
    run = run_of(2, 2, batch_norm="minibatch", **sharding(2, 2, reshard))
    tokens, targets = run.whole.call.args[0], run.whole.targets
    parts = [slice(0, 10), slice(16, 32)]
    own = parts[run.replica]
    loss = run.pipeline.evaluate(tokens[own], targets[own])
    rows = torch.cat([torch.arange(32)[part] for part in parts])
    model = run.reference.model.eval()
    wanted = token_loss(model(tokens[rows]), targets[rows])
    return 0.0 if loss is None else (loss - wanted).abs().item()


def stepped_unequally() -> str:
    """What a rank says if the second step of one sharded replica has fewer samples."""
    run = run_of(2, 2, step_timeout=20, **sharding(2, 2))
    run.step()
    tokens, targets = run.part(run.whole.call.args[0]), run.part(run.whole.targets)
    count = len(tokens) - 2 * (run.replica == 1)
    try:
        run.pipeline.step(tokens[:count], targets[:count])
    except InputError as error:
        return str(error)
    return ""


def from_meta() -> float:
    """How far gradients of a sharded model that was built on the meta device are from those of the
    same model without shards.
    """

    def gradients(**options: Any) -> dict[str, Tensor]:
        with torch.device("meta"):
            model = Tied().double()
        tokens = tokens_of(32).chunk(2)[dist.get_rank() // 2]
        pipeline = pipecompile(
            model,
            tokens,
            ranks=2,
            microbatches=2,
            costs="flops",
            loss_fn=token_loss,
            seed=3,
            **options,
        )
        pipeline.step(tokens, tokens)
        return {name: whole(p.grad) for name, p in pipeline.named_parameters()}

    wanted, got = gradients(), gradients(**sharding(2, 2))
    assert wanted.keys() == got.keys()
    return max((got[name] - wanted[name]).abs().max().item() for name in wanted)


def partly_sharded() -> tuple[float, ...]:
    """How far gradients and norms are if layers are groups of their own, and the tied table is on
    each replica.
    """

    def parallelize(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        table = {p for name, p in stage.named_parameters() if name.startswith("table")}
        for module in stage.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh["dp"])
        return fully_shard(stage, mesh=mesh["dp"], ignored_params=table)

    mesh = mesh_of(dp=2, pp=2)
    run = run_of(2, 2, schedule="zb-h1", mesh=mesh, parallelize=parallelize)
    run.unsplit_step()
    run.step()
    return run.distance(), *clipped(run)


def of_two_shapes() -> float:
    """How far gradients are from those of the unsplit model, in a step of a second shape."""
    torch.manual_seed(0)
    with DEVICE:
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
        long, short = (torch.randn(16, size, 8, dtype=torch.float64) for size in (5, 3))
    unsplit = copy.deepcopy(model)
    part = dist.get_rank() // 2
    pipeline = pipecompile(
        model,
        long.chunk(2)[part],
        ranks=2,
        microbatches=2,
        costs="flops",
        loss_fn=functional.mse_loss,
        sample_target=long.chunk(2)[part],
        shapes=[short.chunk(2)[part]],
        **sharding(2, 2),
    )
    for rows in (long, short):
        pipeline.zero_grad()
        pipeline.step(rows.chunk(2)[part], rows.chunk(2)[part])
    functional.mse_loss(unsplit(short), short).backward()
    wanted = dict(unsplit.named_parameters())
    named = pipeline.named_parameters()
    return max((whole(p.grad) - wanted[name].grad).abs().max().item() for name, p in named)


def hybrid() -> tuple[float, ...]:
    """How far gradients and norms are with hybrid sharding."""

    def parallelize(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return fully_shard(stage, mesh=mesh["dp_replicate", "dp_shard"])

    mesh = mesh_of(dp_replicate=2, dp_shard=2, pp=1)
    run = run_of(1, 4, schedule="1f1b", mesh=mesh, parallelize=parallelize)
    run.unsplit_step()
    run.step()
    return run.distance(), *clipped(run)


# -- tensor parallelism


class FeedForward(nn.Module):
    """A layer of Megatron's: `up` is divided by columns and `down` by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.dropout = nn.Dropout(0.25)

    def forward(self, value: Tensor) -> Tensor:
        """Features of shape (N, 8) to the same."""
        return value + self.dropout(self.down(functional.gelu(self.up(self.norm(value)))))


class DroppedBetween(FeedForward):
    """The same, but dropout draws for what `up` has computed."""

    def forward(self, value: Tensor) -> Tensor:
        """Features of shape (N, 8) to the same."""
        return value + self.down(self.dropout(self.up(value)))


class NormalisedBetween(FeedForward):
    """The same, but what `up` has computed is normalised over all columns."""

    def forward(self, value: Tensor) -> Tensor:
        """Features of shape (N, 8) to the same."""
        return value + self.down(self.up(value).softmax(-1))


class Attention(nn.Module):
    """Attention with two heads, whose number is in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        """Features of shape (N, 8) to the same, as one sequence of N."""
        query, key, content = self.up(value).view(-1, 2, 3, 4).permute(2, 1, 0, 3)
        weights = (query @ key.mT / 2).softmax(-1)
        return value + self.down((weights @ content).transpose(0, 1).reshape(-1, 8))


def layers(kind: type[nn.Module], samples: int) -> Target:
    """Four layers in float64, and a minibatch."""
    torch.manual_seed(0)
    with DEVICE:
        model = nn.Sequential(*[kind() for _ in range(4)]).double()
        rows = torch.randn(samples, 8, dtype=torch.float64)
    return Target(model, arguments_of(model, rows), functional.mse_loss, rows.flip(0))


def megatron(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide each layer by columns and rows, and shard over replicas if there are any."""
    parallelize_module(stage, mesh["tp"], {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()})
    return fully_shard(stage, mesh=mesh["dp"]) if "dp" in mesh.mesh_dim_names else stage


def tensor_parallel(sizes: dict[str, int], schedule: str, path: str) -> tuple[float, ...]:
    """How far gradients, loss, norms and outputs are from those of the unsplit model, on a mesh of
    these sizes; and the state that another pipeline, without them, loads from a checkpoint.
    """
    replicas = sizes.get("dp", 1)
    mesh = mesh_of(**sizes)
    replica = mesh.get_local_rank("dp") if replicas > 1 else 0
    target = layers(FeedForward, 16 * replicas)
    run = run_on(
        target,
        sizes["pp"],
        replica,
        replicas,
        schedule=schedule,
        mesh=mesh,
        parallelize=megatron,
    )
    wanted = run.unsplit_step()
    loss = run.step(everywhere=True)
    far = [run.distance(), abs(loss.item() - wanted.item()), *clipped(run)]
    rows = run.part(target.call.args[0])[:11]
    output = run.pipeline.evaluate(rows)
    if output is not None:
        far.append((output - run.reference.model.eval()(rows)).abs().max().item())
    run.pipeline.zero_grad()
    run.pipeline.checkpoint().save(path)
    other = run_on(layers(FeedForward, 16), 4, 0, 1, schedule="1f1b").pipeline
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.checkpoint().load(path)
    state, loaded = run.pipeline.full_state_dict(), other.full_state_dict()
    if state is not None and loaded is not None:
        far += [(loaded[name] - state[name]).abs().max().item() for name in state]
        far.append((state["0.up.weight"] - target.model[0].up.weight).abs().max().item())
    return tuple(far)


def other_batches_along_tp() -> str:
    """What a rank says if ranks that divide a layer among them are given other batches."""
    mesh = mesh_of(pp=2, tp=2)
    run = run_on(layers(FeedForward, 16), 2, 0, 1, mesh=mesh, parallelize=megatron)
    rows = run.part(run.whole.call.args[0])
    try:
        run.pipeline.step(rows + mesh.get_local_rank("tp"), rows)
    except InputError as error:
        return str(error)
    return ""


def divided_heads() -> float:
    """How far gradients are if heads of attention are on several ranks."""

    def parallelize(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        up = ColwiseParallel(use_local_output=False)
        return parallelize_module(stage, mesh["tp"], {"*.up": up, "*.down": RowwiseParallel()})

    options = {"mesh": mesh_of(pp=2, tp=2), "parallelize": parallelize, "schedule": "zb-h1"}
    run = run_on(layers(Attention, 16), 2, 0, 1, **options)
    run.unsplit_step()
    run.step()
    return run.distance()


# -- what is refused


def refusals() -> dict[str, str]:
    """The message for each mistake."""
    mesh = mesh_of(dp=2, pp=2)

    def for_mixture(parallelize: Parallelize) -> str:
        return error_of(lambda: run_of(2, 2, mesh=mesh, parallelize=parallelize))

    def half(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return stage if mesh.get_local_rank("pp") else fully_shard(stage, mesh=mesh["dp"])

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    tensor_mesh = mesh_of(pp=2, tp=2)

    def on_tensor_mesh(kind: type[nn.Module], parallelize: Parallelize | None) -> str:
        options = {"mesh": tensor_mesh, "parallelize": parallelize, "schedule": "1f1b"}
        return error_of(lambda: run_on(layers(kind, 16), 2, 0, 1, **options))

    def hooked(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for path, module in stage.named_modules():
            if path == "0":
                module.register_forward_hook(print)
        return stage

    def wrapped(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, layer in list(stage.named_children()):
            setattr(stage, name, nn.Sequential(layer))
        return stage

    return {
        "ddp": for_mixture(
            lambda stage, mesh: DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
        ),
        "mesh": for_mixture(lambda stage, mesh: fully_shard(stage, mesh=mesh["pp"])),
        "types": for_mixture(
            lambda stage, mesh: fully_shard(stage, mesh=mesh["dp"], mp_policy=policy)
        ),
        "tie": for_mixture(half),
        "no mesh": error_of(lambda: run_of(4, 1, parallelize=half)),
        "no parallelize": on_tensor_mesh(FeedForward, None),
        "dropout": on_tensor_mesh(DroppedBetween, megatron),
        "softmax": on_tensor_mesh(NormalisedBetween, megatron),
        "hooks": on_tensor_mesh(FeedForward, hooked),
        "wrapped": on_tensor_mesh(FeedForward, wrapped),
    }


def two_copies_on_a_rank() -> str:
    """The message if two stages of a rank hold a tied parameter."""
    target = mixture(32)
    part = target.call.args[0].chunk(2)[dist.get_rank() // 2]
    return error_of(
        lambda: pipecompile(
            target.model,
            part,
            schedule="zb-v",
            k=4,
            microbatches=4,
            costs="flops",
            loss_fn=token_loss,
            sample_target=part,
            **sharding(2, 2),
        )
    )


def error_of(compiling: Callable[[], object]) -> str:
    """The message of the InputError that every rank raises."""
    try:
        compiling()
    except InputError as error:
        return str(error)
    return ""
