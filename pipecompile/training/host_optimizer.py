"""An optimizer whose state, and whose step, are in the host's memory (ZeRO-Offload).

A step of a pipeline leaves parameters and gradients on the device. What an optimizer needs beyond
them lies on the host, where it steps copies (Ren et al., "ZeRO-Offload", arXiv 2101.06840, section
4.1):

    device   gradients ──▶                            ──▶ parameters
    host                   copies of gradients ─ step ─ copies of parameters, state

Unlike there, gradients stay on the device until the step, since microbatches add to them, and the
step is that of the optimizer that is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipecompile.errors import InputError

__all__ = ["HostOptimizer"]

MASTER = "master"
"""The slot with the float32 copy of a parameter of fewer bits."""


class HostOptimizer(torch.optim.Optimizer):
    """The optimizer that `factory` makes of copies of `parameters`, or of groups of them, in the
    host's memory:

        pipeline.train(batches, lambda parameters: HostOptimizer(parameters, torch.optim.AdamW))

    The result is that of the same optimizer on the device. With `master_weights` copies are in
    float32 where parameters have fewer bits, and are a part of the state. Schedulers, checkpoints
    and post-validation take it as any other optimizer. Values that others load into parameters are
    stepped from, unless they are written through `.data`, which torch does not count as a change.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        factory: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        *,
        master_weights: bool = False,
    ) -> None:
        self._master_weights = master_weights
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        # What the parameters were when they were copied: others may load values into them.
        self._versions: dict[nn.Parameter, int] = {}
        self._inner: torch.optim.Optimizer | None = None
        super().__init__(parameters, {})  # adds the groups, one by one
        self._inner = factory([self._on_copies(group) for group in self.param_groups])
        for own, inner in self._pairs_of_groups():
            own.update(_options(inner))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step another group of parameters too, with options of the optimizer unless it has own
        ones.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(isinstance(parameter, DTensor) for parameter in group["params"]):
            raise InputError(
                "HostOptimizer copies whole parameters, and some are divided over ranks; let FSDP2 "
                "move its parts to the host (CPUOffloadPolicy)"
            )
        for parameter in group["params"]:
            self._copies[parameter] = self._copy_of(parameter)
            self._versions[parameter] = parameter._version
        # The groups of the first call are added before there is an optimizer of copies: the
        # factory is then given all of them at once.
        if self._inner is not None:
            self._inner.add_param_group(self._on_copies(group))
            group.update(_options(self._inner.param_groups[-1]))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All copies of gradients are begun before any is waited for, so that they follow each
        # other on the device's stream without the host.
        stepped = [p for p in self._copies if p.grad is not None]
        for parameter in stepped:
            self._give(parameter)
        for parameter, copy in self._copies.items():
            if parameter.grad is None:  # that of an earlier step would be used once more
                copy.grad = None
        _wait_for_copies(stepped)
        groups = self._pairs_of_groups()
        for own, inner in groups:
            inner.update(_options(own))
        self.stepping.step()
        for own, inner in groups:  # some optimizers count there
            own.update(_options(inner))
        for parameter in stepped:
            self._take(parameter)
        _wait_for_copies(stepped)
        return loss

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the options and the state, which stays on the host and in its type."""
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, slots in state_dict["state"].items():
            self.state[parameters[number]] = {
                slot: value.detach().cpu().clone() if isinstance(value, Tensor) else value
                for slot, value in slots.items()
            }

    def _give(self, parameter: nn.Parameter) -> None:
        """Bring gradient and state of a parameter to its copy."""
        copy, slots = self._copies[parameter], dict(self.state.get(parameter, {}))
        master = slots.pop(MASTER, None)
        if master is not None:
            copy.data.copy_(master)
        # Without a master in the state the copy may be that of a step that was rolled back.
        is_known = master is not None and self._is_rounded(parameter)
        if parameter._version != self._versions[parameter] and not is_known:
            copy.data.copy_(parameter)
        if slots:
            self.stepping.state[copy] = slots
        else:  # as before the first step
            self.stepping.state.pop(copy, None)
        assert parameter.grad is not None
        if copy.grad is None:
            copy.grad = _on_host(parameter.grad, copy.dtype)
        copy.grad.copy_(parameter.grad, non_blocking=True)

    def _take(self, parameter: nn.Parameter) -> None:
        """Bring the new value back, and keep the state."""
        copy = self._copies[parameter]
        parameter.copy_(copy, non_blocking=True)
        self._versions[parameter] = parameter._version
        slots = dict(self.stepping.state.get(copy, {}))
        if copy.dtype != parameter.dtype:
            slots[MASTER] = copy.data
        self.state[parameter] = slots

    def _is_rounded(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter is what its copy rounds to."""
        # A master of 1.001 is 1.0 in bfloat16. A parameter of 1.0 is what it was rounded to, and
        # the master stays; one of 2.0 was loaded by somebody, and the master is made of it.
        rounded = self._copies[parameter].to(parameter.dtype)
        return torch.equal(rounded, parameter.detach().cpu())

    def _copy_of(self, parameter: nn.Parameter) -> nn.Parameter:
        is_short = parameter.is_floating_point() and parameter.element_size() < 4
        dtype = torch.float32 if self._master_weights and is_short else parameter.dtype
        copy = _on_host(parameter, dtype)
        copy.copy_(parameter.detach())
        return nn.Parameter(copy)

    def _on_copies(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return a group with the copies of its parameters in their place."""
        return {**group, "params": [self._copies[parameter] for parameter in group["params"]]}

    @property
    def stepping(self) -> torch.optim.Optimizer:
        """The optimizer of the copies."""
        assert self._inner is not None, "it is made with the first groups"
        return self._inner

    def _pairs_of_groups(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return the own groups, each with that of the copies."""
        return list(zip(self.param_groups, self.stepping.param_groups, strict=True))


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _on_host(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return memory of the host for `tensor`, pinned where that lets copies run by themselves."""
    return torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)


def _wait_for_copies(parameters: Iterable[Tensor]) -> None:
    """Wait until copies between the devices of these parameters and the host are done."""
    for device in {parameter.device for parameter in parameters if parameter.is_cuda}:
        torch.cuda.current_stream(device).synchronize()
