"""Models that were built on the meta device: each rank gives values to its own stages only.

    with torch.device("meta"):
        model = Transformer(…)                        no memory anywhere
    pipecompile(model, batch, plan="plan.json")       each rank: memory of its stages, then values

Values come from files, or from the modules' own `reset_parameters`, seeded by the name of the
module: so any cut begins with the same weights. Until all values are there, a tensor is full of
NaN (a count of the smallest number), which tells what nothing has set.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipecompile.errors import InputError
from pipecompile.graph.model_state import (
    has_values,
    named_state,
    swapped_state,
    without_values,
)
from pipecompile.runtime import world
from pipecompile.runtime.local_share import LocalShare

__all__ = ["allocate", "bind", "check_all_set", "initialise", "lacks_values", "move", "on_meta"]


def lacks_values(model: nn.Module) -> bool:
    """Return whether parameters or buffers of the model are on the meta device or fake, or divided
    over processes.
    """
    return not all(
        has_values(tensor) and not isinstance(tensor, DTensor) for _, tensor in named_state(model)
    )


def on_meta(model: nn.Module) -> AbstractContextManager[object]:
    """Have all of a model on the meta device in the block, if a part of it is."""
    if not lacks_values(model):
        return nullcontext()
    present = [tensor for _, tensor in named_state(model) if has_values(tensor)]
    return swapped_state(model, {id(tensor): without_values(tensor) for tensor in present})


def allocate(model: nn.Module, share: LocalShare, device: torch.device) -> None:
    """Give memory on `device` to what this rank holds, and nothing else, without values."""
    # By identity: a tied tensor gets memory once, under all its names.
    made: dict[int, Tensor] = {}
    for name, tensor in list(named_state(model)):
        if not share.holds(name):
            continue
        if id(tensor) not in made:
            made[id(tensor)] = (
                _moved(tensor, device) if has_values(tensor) else _unset(tensor, device)
            )
        _put(model, name, made[id(tensor)])


def bind(stage: nn.Module, model: nn.Module) -> None:
    """Let a stage that was cut on the meta device have the model's own tensors."""
    own = dict(named_state(model))
    for name, _ in list(named_state(stage)):
        if name in own:
            _put(stage, name, own[name])


def move(stages: Iterable[nn.Module], model: nn.Module, device: torch.device) -> None:
    """Move stages of a model to a device. Buffers become other objects there, which the model then
    gets.
    """
    own = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for stage in stages:
        stage.to(device)
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            path, _, last = name.rpartition(".")
            # Only what the model has: a stage holds constants of the graph besides.
            if name in own:
                model.get_submodule(path)._buffers[last] = buffer


def initialise(model: nn.Module, share: LocalShare, seed: int) -> None:
    """Let the modules of this rank set their own parameters and buffers, on the CPU.

    A tied parameter is set by the module that has it first. A module draws all that it and its
    parts have, even if some of it is on another rank, so that the cut does not change the numbers.
    """
    firsts = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    for path, module in _resettable("", model):
        names = (f"{path}.{name}".lstrip(".") for name, _ in named_state(module))
        held = [name for name in names if name in firsts and share.holds(name)]
        if held:
            _reset(path, module, held, seed)


def check_all_set(model: nn.Module, share: LocalShare, read: Container[str] = ()) -> None:
    """InputError, on every rank, if a parameter or buffer that one holds has no value yet; those
    that were `read` from a file have one, whatever it is.
    """
    own = [
        name
        for name, tensor in named_state(model)
        if share.holds(name) and name not in read and _is_unset(tensor)
    ]
    # Other ranks would wait for one that raises alone.
    left = sorted({name for names in world.gather(own) for name in names})
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        raise InputError(
            f"the model was built on the meta device, and nothing sets {', '.join(left[:3])}{more};"
            " give a file that has it (weights=), a module with `reset_parameters`, or build the "
            "model with that in memory"
        )


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):  # as those of a loss that was not built on the meta device
        return nn.Parameter(moved, requires_grad=tensor.requires_grad)
    return moved


def _unset(tensor: Tensor, device: torch.device) -> Tensor:
    result = without_values(tensor, device)
    with torch.no_grad():
        result.fill_(_marker(result))
    return result


def _marker(tensor: Tensor) -> float | int | bool:
    """Return what marks an element that nothing has set; boolean tensors have no such value."""
    if tensor.is_floating_point() or tensor.is_complex():
        return float("nan")
    return False if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).min


def _is_unset(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        # Any element, since a module may set only a part of a tensor.
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == _marker(tensor)).any())


def _put(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    for table in (owner._parameters, owner._buffers):
        if last in table:
            table[last] = tensor  # type: ignore[assignment]


def _resettable(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that set parameters, with their paths."""
    if _reset_of(module) is not None:
        yield path, module
        return
    for name, part in module.named_children():
        yield from _resettable(f"{path}.{name}".lstrip("."), part)


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method that sets the parameters of a module, None if it has none."""
    # torch's attention has it under the second name.
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    return None


def _reset(path: str, module: nn.Module, held: list[str], seed: int) -> None:
    """Let a module and its parts set what they have, and keep what is `held` here.

    A function of its own: in a loop what one module drew would live until the next one has drawn.
    """
    own = dict(named_state(module))
    cpu = torch.device("cpu")
    # Drawn on the CPU whatever the device, whose generator would draw other numbers; and whole,
    # because what a module draws second depends on how much it has drawn first.
    whole = {id(tensor): _unset(tensor, cpu) for tensor in own.values()}
    with swapped_state(module, whole), torch.random.fork_rng(devices=()):
        # Parts first, as in constructors: what has them may change what they have set.
        for below, part in reversed(list(module.named_modules(prefix=path))):
            reset = _reset_of(part)
            if reset is not None:
                # The seed is of the path, not of an order: other ranks do not draw for all modules.
                torch.manual_seed(_seed_of(seed, below))
                reset()
    with torch.no_grad():
        for name in held:
            value = own[name.removeprefix(path).lstrip(".")]
            # A buffer that was in memory keeps its value: no reset of another may replace it.
            if _is_unset(value):
                value.copy_(whole[id(value)])


def _seed_of(seed: int, path: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
