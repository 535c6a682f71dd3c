"""One forward on fake tensors: what each node returns, what its backward keeps, what it reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipecompile.cost_models.protocol import Call, size_bytes, tensors
from pipecompile.passes.propagate import named_state
from pipecompile.profiling.caller import Caller
from pipecompile.profiling.workload import Workload

__all__ = ["Facts", "Observation", "observe"]


@dataclass(frozen=True)
class Facts:
    """One node: its value, and the storages (indices into `Observation.storages`) that its backward keeps.

    `bytes` and `gradient_bytes` count the elements of the value and of its differentiable part; `storages` are the
    ones it lies in. `saved` is in order of first use. Storages of parameters and buffers appear nowhere.
    `parameters` are the canonical names of what it reads; `differentiable` and `mutates` are as in `Call`.
    """

    operator: str
    bytes: int
    gradient_bytes: int
    storages: tuple[int, ...]
    saved: tuple[int, ...]
    workspace_bytes: int
    parameters: tuple[str, ...]
    differentiable: tuple[bool, ...]
    mutates: bool


@dataclass(frozen=True)
class Observation:
    """The facts of every node but `get_attr`, by name, and the bytes of the storages they speak of."""

    nodes: dict[str, Facts]
    storages: tuple[int, ...]


def observe(workload: Workload) -> Observation:
    """Runs `workload`, which is fake, once; no real memory is touched."""
    observer = _Observer(workload)
    with torch.enable_grad():
        observer.interpret()
    return Observation(observer.facts, observer.storages.sizes)


class _Observer(Caller):
    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self.facts: dict[str, Facts] = {}
        self.storages = _Storages(value for _, value in named_state(workload.module))

    def perform(self, call: Call) -> Any:
        saved: list[Tensor] = []
        versions = [argument._version for argument in call.arguments]
        with saved_tensors_hooks(saved.append, _never):
            value = super().perform(call)
        outputs = tensors(value)
        differentiable = [output for output in outputs if output.requires_grad]
        self.facts[call.node.name] = Facts(
            operator=call.operator,
            bytes=size_bytes(outputs),
            gradient_bytes=size_bytes(differentiable),
            storages=self.storages.of(outputs),
            saved=self.storages.of(saved),
            workspace_bytes=size_bytes(outputs) + size_bytes(call.inputs),
            parameters=tuple(self.workload.names[id(parameter)] for parameter in call.parameters),
            differentiable=call.differentiable,
            mutates=versions != [argument._version for argument in call.arguments],
        )
        return value


class _Storages:
    """Numbers storages as they are met; it holds on to them, so that no address is used twice."""

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {value.untyped_storage()._cdata for value in excluded}
        self._indices: dict[int, int] = {}
        self._held: list[Any] = []

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(storage.nbytes() for storage in self._held)

    def of(self, values: Iterable[Tensor]) -> tuple[int, ...]:
        """The distinct storages of `values`, in order, without the excluded ones."""
        storages = [value.untyped_storage() for value in values]
        known = (storage for storage in storages if storage._cdata not in self._excluded)
        return tuple(dict.fromkeys(map(self._index, known)))

    def _index(self, storage: Any) -> int:
        if storage._cdata not in self._indices:
            self._indices[storage._cdata] = len(self._held)
            self._held.append(storage)
        return self._indices[storage._cdata]


def _never(packed: None) -> Tensor:
    raise AssertionError("nothing is differentiated while a graph is observed")
