"""A loss that is a module with parameters or buffers: it is a part of the last stage.

A graph's module holds it as `loss_fn`, and the output node names it, as if it called it:

    x ── layers ── output, meta["loss"] = "loss_fn"      reads loss_fn.scale

So whatever asks which node reads a parameter, and which stage that node lies in, finds those of the
loss. It is not recorded: the last stage calls it as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, fx, nn

from pipecompile.errors import InputError

__all__ = [
    "LOSS",
    "called_path",
    "held_loss",
    "hold_loss",
    "in_eval_mode",
    "joined_modules",
    "state_names",
    "versioned_buffers",
]

LOSS = "loss_fn"
"""Where modules hold the loss: the names of its parameters and buffers begin with it."""


def hold_loss(module: fx.GraphModule, loss: nn.Module | None) -> None:
    """Let `module` hold the loss, and its output node name it; nothing for None."""
    if loss is not None:
        module.add_submodule(LOSS, loss)
        module.graph.output_node().meta["loss"] = LOSS


def held_loss(module: fx.GraphModule) -> nn.Module | None:
    """Return the loss that `module` holds; None if it holds none."""
    path = module.graph.output_node().meta.get("loss")
    return None if path is None else module.get_submodule(path)


def called_path(node: fx.Node) -> str | None:
    """Return the path of the module that `node` calls, of the output node the loss; None if it
    calls none.
    """
    return str(node.target) if node.op == "call_module" else node.meta.get("loss")


def joined_modules(model: nn.Module, loss: nn.Module | None) -> nn.Module:
    """Return a twin of `model` that has the same tables and modules, and `loss` as one module more.

    Its state and parameters are those of both, under the names that they have in a pipeline.
    """
    if loss is None:
        return model
    # It is not initialised, since the class may want arguments, and shares the tables of the
    # model: what is put into these later, as by `parallelize`, is in both.
    twin: nn.Module = object.__new__(type(model))
    vars(twin).update(vars(model), _modules={**model._modules, LOSS: loss})
    return twin


def state_names(loss: nn.Module | None) -> frozenset[str]:
    """Return the names that the state of a loss has in a pipeline."""
    return frozenset() if loss is None else frozenset(loss.state_dict(prefix=f"{LOSS}."))


@contextmanager
def in_eval_mode(loss: nn.Module) -> Iterator[None]:
    """Put a loss into eval mode for the block."""
    flags = {module: module.training for module in loss.modules()}
    loss.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


@contextmanager
def versioned_buffers(loss: nn.Module) -> Iterator[None]:
    """Let the block work on copies of the buffers, and write to them what it leaves.

    The backward of a microbatch needs buffers as its forward saw them, and the forwards of others
    may come before. InputError if the block leaves tensors of other shapes or types.
    """
    slots = [
        (module._buffers, name, buffer)
        for module in loss.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and not _repeats_elements(buffer)
    ]
    # With F0 F1 B0 B1, B0 needs what F0 has seen, although F1 has written since: each forward
    # works on a copy of its own, which its saved tensors refer to, and the buffer has what the
    # last one left.
    copies = {id(buffer): buffer.clone() for _, _, buffer in slots}
    left = dict[int, Tensor | None]()
    try:
        for table, name, buffer in slots:
            table[name] = copies[id(buffer)]
        yield
        left = {id(buffer): table.get(name) for table, name, buffer in slots}
    finally:
        for table, name, buffer in slots:
            table[name] = buffer
    for _, name, buffer in slots:
        # Always: kernels of batch norms write without raising the version of a tensor.
        _write(name, buffer, left[id(buffer)])


def _repeats_elements(buffer: Tensor) -> bool:
    """Return whether a buffer is expanded, which refuses any write."""
    return any(
        size > 1 and not step for size, step in zip(buffer.shape, buffer.stride(), strict=True)
    )


@torch.no_grad()
def _write(name: str, buffer: Tensor, value: Tensor | None) -> None:
    """Write to a buffer what a forward has left in its place."""
    if value is None or (value.shape, value.dtype) != (buffer.shape, buffer.dtype):
        left = "nothing" if value is None else f"{value.dtype} of shape {tuple(value.shape)}"
        raise InputError(
            f"loss_fn leaves {left} in the place of its buffer {name!r}, which is {buffer.dtype} "
            f"of shape {tuple(buffer.shape)}; let it keep shape and type"
        )
    buffer.copy_(value)
