"""Stages whose parameters are divided over replicas by FSDP2 (`fully_shard`).

FSDP2 gathers parameters before each forward and sums gradients in each backward. Here they are
gathered when a step begins and freed after the last action of their stage, and gradients, whole
until then, are summed once, when the schedule says that they are complete:

    0F0   0F1   0B0   0B1   0REDUCE_GRAD
    gather                  reduce-scatter, free

With `reshard_after_forward=True` parameters are whole only while an action of their stage runs. A
plan's `shard` asks for more: with "gradients" each backward sums its gradients, of which only the
part of this process stays, and with "parameters" these are freed after each action too:

    0F0            0F1            0B0                            0B1
    gather  free   gather  free   gather  reduce-scatter  free   gather  reduce-scatter  free

This is the only module that knows torch's private names of FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from pipecompile.errors import InputError
from pipecompile.ir.plan import ShardLevel
from pipecompile.ir.schedule import COMPUTE, WEIGHT_GRADIENT_KINDS, Action
from pipecompile.runtime.watch import StepWatch

__all__ = ["ShardedStages"]


class ShardedStages:
    """The stages of this process of which FSDP2 manages parameters; an observer of their actions.

    `whole_parameters` are those parameters as forwards and backwards use them, which accumulate
    gradients during a step. `managed` are the same and those that an optimizer steps.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        replicas: tuple[int, ...],
        watch: StepWatch | None,
        shard: ShardLevel | None,
    ) -> None:
        self._watch = watch
        self._sums_in_backwards = shard in ("gradients", "parameters")
        self._modules = {index: _sharded_modules(stage) for index, stage in stages.items()}
        self._whole: set[int] = set()
        self._whole_tables: dict[int, list[_Slot]] = {}
        self.whole_parameters: list[nn.Parameter] = []
        self.managed: set[nn.Parameter] = set()
        for index, modules in self._modules.items():
            for module in modules:
                _take_over(module, replicas)
                # Otherwise a sum would free parameters that the next action needs.
                module.set_reshard_after_backward(not self._sums_in_backwards)
            with self.whole(index):  # which makes the whole parameters
                self._remember(modules)
                self._whole_tables[index] = list(_slots(stages[index]))
        self._freed_after_each = {
            index
            for index, modules in self._modules.items()
            if shard == "parameters" or any(map(_frees_after_forward, modules))
        }

    @contextmanager
    def whole(self, index: int) -> Iterator[None]:
        """Have all of a stage's parameters on this process in the block, and free them after it."""
        self._gather(index)
        try:
            yield
        finally:
            self._free(index)

    @contextmanager
    def named_as_whole(self, index: int) -> Iterator[None]:
        """Have the whole parameters in a stage's modules in the block, without their values.

        Unlike `whole` it needs no other process.
        """
        # FSDP2 has two objects for each parameter, the part and the whole, and puts one of them
        # into the module's table. Here the table is all that changes: no memory is allocated, and
        # nothing is sent.
        own = list(_slots_like(self._whole_tables[index]))
        try:
            _fill(self._whole_tables[index])
            yield
        finally:
            _fill(own)

    def gather(self, *, all_stages: bool = False) -> None:
        """Gather what stays whole during a step, at its beginning: no rank waits for messages then,
        so that all of them gather at the same time.

        With `all_stages` that is everything: replicas may then run different numbers of actions.
        """
        # A gather in the middle of a row makes all replicas wait for the slowest. Where they
        # perform the same row that is only time; where one has fewer microbatches, it would never
        # come.
        freed = set() if all_stages else self._freed_after_each
        for index in sorted(self._modules.keys() - freed):
            self._gather_and_say(index)

    def reduce(self, index: int) -> None:
        """End a stage's step: its gradients are summed over replicas, the part of this process is
        kept, and its parameters are freed.
        """
        if not self._sums_in_backwards:
            self._sum(index)
        self._free(index)

    def _sum(self, index: int) -> None:
        if self._modules[index] and self._watch is not None:
            self._watch.waits_in(f"the sum of stage {index} over replicas")
        for module in self._modules[index]:
            state = _state(module)
            if state._is_root:
                # Of the whole tree: it sums, frees if it may, and waits for both.
                state._root_post_backward_final_callback()

    def free(self) -> None:
        """Free whatever is whole, also after a step that has failed."""
        for index in list(self._whole):
            self._free(index)

    # -- what rank_step.py tells

    def begin(self, action: Action) -> None:
        """`action` is next."""

    def ready(self, action: Action) -> None:
        """`action` needs the parameters."""
        if action.kind not in COMPUTE or action.stage in self._whole:
            return
        self._gather_and_say(action.stage)
        if self._watch is not None:
            self._watch.ready(action)

    def end(self, action: Action) -> None:
        """`action` no longer needs them, and its gradients are there."""
        if self._sums_in_backwards and action.kind in WEIGHT_GRADIENT_KINDS:
            self._sum(action.stage)
        if action.kind in COMPUTE and action.stage in self._freed_after_each:
            self._free(action.stage)

    def _gather_and_say(self, index: int) -> None:
        if self._modules[index] and self._watch is not None:
            self._watch.waits_in(f"the gather of stage {index} over replicas")
        self._gather(index)

    def _gather(self, index: int) -> None:
        for module in self._modules[index]:
            module.unshard()
        self._whole.add(index)

    def _free(self, index: int) -> None:
        for module in self._modules[index]:
            module.reshard()
        self._whole.discard(index)

    def _remember(self, modules: list[FSDPModule]) -> None:
        for module in modules:
            for group in _parameter_groups(module):
                for parameter in group.fsdp_params:
                    pair = parameter.sharded_param, parameter.unsharded_param
                    self.managed.update(pair)
                    self.whole_parameters.append(pair[1])


_Slot = tuple[dict[str, nn.Parameter | None], str, nn.Parameter | None]
"""An entry of a module's table of parameters: the table, the name, the parameter."""


def _slots(stage: nn.Module) -> Iterator[_Slot]:
    for module in stage.modules():
        yield from ((module._parameters, name, p) for name, p in module._parameters.items())


def _slots_like(slots: Iterable[_Slot]) -> Iterator[_Slot]:
    """Yield the same entries with what they hold now."""
    yield from ((table, name, table[name]) for table, name, _ in slots)


def _fill(slots: Iterable[_Slot]) -> None:
    for table, name, parameter in slots:
        table[name] = parameter


def _sharded_modules(stage: nn.Module) -> list[FSDPModule]:
    return [module for module in stage.modules() if isinstance(module, FSDPModule)]


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _parameter_groups(module: FSDPModule) -> list[Any]:
    """Return what FSDP2 gathers together; older releases have one, or none."""
    state = _state(module)
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _take_over(module: FSDPModule, replicas: tuple[int, ...]) -> None:
    """Let the runtime say when parameters are gathered and gradients summed, and not hooks.

    InputError if the module is not divided over all `replicas`, or casts.
    """
    state = _state(module)
    # Otherwise it would be initialised by the first forward's hook, which is about to be removed.
    state._lazy_init()
    for group in _parameter_groups(module):
        _check(group, replicas)
    # These two would gather and free in each forward. They also put the hooks into the autograd
    # graph that gather, sum and free in each backward, so that without them backwards exchange
    # nothing: with M microbatches a stage is summed once and not M times.
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    # The sum, as without FSDP2: the step divides it by the number of microbatches as well.
    # By default it would be divided by the number of replicas.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _check(group: Any, replicas: tuple[int, ...]) -> None:
    ranks = tuple(sorted(group.mesh_info.mesh.mesh.flatten().tolist()))
    if ranks != replicas:
        raise InputError(
            f"fully_shard was given a mesh of the ranks {list(ranks)}, but the replicas of this "
            f'stage are the ranks {list(replicas)}; give it mesh["dp"], or for hybrid sharding the '
            'two dimensions mesh["dp_replicate", "dp_shard"] that make up the replicas'
        )
    policy = group.mp_policy
    if policy.param_dtype is not None or policy.output_dtype is not None:
        raise InputError(
            "fully_shard was given a MixedPrecisionPolicy with param_dtype or output_dtype, but "
            "the types between stages are those of the plan; give pipecompile autocast= instead "
            "(reduce_dtype is possible)"
        )


def _frees_after_forward(module: FSDPModule) -> bool:
    """Return whether the user gave `reshard_after_forward`, which is for the root not the
    default.
    """
    state = _state(module)
    return not state._auto_reshard_after_forward and any(
        group.post_forward_mesh_info is not None for group in _parameter_groups(module)
    )
