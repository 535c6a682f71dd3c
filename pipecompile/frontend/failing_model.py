"""Models that fail on real tensors by themselves, so that no graph is to blame."""

from __future__ import annotations

from traceback import walk_tb

import torch
from torch import Tensor, nn

from pipecompile.errors import CaptureError, PipecompileError, reason_of
from pipecompile.frontend.signature import Arguments, InputStructure
from pipecompile.frontend.source import error_line
from pipecompile.frontend.training_step import restored_state
from pipecompile.graph.pytrees import map_tensors

__all__ = ["ModelFailsError", "refuse_failing"]


class ModelFailsError(CaptureError):
    """The model itself, and not its graph, cannot take a training step."""


@torch.enable_grad()
def refuse_failing(model: nn.Module, call: Arguments) -> None:
    """Raise ModelFailsError, with the module and the line, if one forward of `model` itself fails.

    The model and the random state are restored.
    """
    # The forward may write to its inputs, which are the user's.
    args, kwargs = map_tensors(Tensor.clone, (call.args, call.kwargs))
    try:
        with restored_state(model):
            model(*args, **kwargs)
    except PipecompileError:
        raise
    except Exception as error:
        line, reason = error_line(error), reason_of(error)
        where = _failed_in(model, error) + (f" ({line})" if line else "")
        raise ModelFailsError(
            f"{where}: the model itself fails on the sample input: {type(error).__name__}: "
            f"{reason}; give a sample that it takes. It was given the first microbatch, "
            f"{_shapes(model, call)}; if one of these has no batch, give batch_dim={{name: None}}"
        ) from error


def _shapes(model: nn.Module, call: Arguments) -> str:
    """Return the shapes of the input tensors by their names."""
    inputs = InputStructure.of(model, call)
    named = zip(filter(None, inputs.names), inputs.flatten(call), strict=True)
    return ", ".join(f"{name} of {tuple(tensor.shape)}" for name, tensor in named)


def _failed_in(model: nn.Module, error: Exception) -> str:
    """Return the path of the innermost module that ran when `error` was raised."""
    paths = {module: path for path, module in model.named_modules()}
    # Every call of a module goes through a method of torch, whose `self` is the module.
    callers = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    called = [paths[each] for each in callers if isinstance(each, nn.Module) and each in paths]
    return next(reversed(called), "") or type(model).__name__
