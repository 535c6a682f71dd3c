"""Everything that measured costs depend on, by which the cache keeps them."""

from __future__ import annotations

import logging
from operator import attrgetter

import torch

from pipecompile import __version__
from pipecompile.cost_models.clock import device_name
from pipecompile.cost_models.measured import VERSION, Measured
from pipecompile.frontend.settings import describe, qualified_name
from pipecompile.frontend.target import Target
from pipecompile.frontend.target_capture import Captured
from pipecompile.graph.autograd_context import current_context

__all__ = ["conditions_of"]

logger = logging.getLogger("pipecompile.api")
# Where torch.backends says whether TF32 or bfloat16 may stand in for float32: other kernels, other
# times, and the same graph.
FLOAT32 = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def conditions_of(
    model: Measured, target: Target, microbatches: int, captured: Captured
) -> dict[str, str] | None:
    """Return the conditions of a measurement by name; None, which the log explains, if the loss
    cannot be described.

    Two measurements under equal conditions differ only by noise, so that one can stand for the
    other.
    """
    try:
        loss = _described_loss(target, microbatches)
    except LookupError as error:
        logger.info(
            "measured costs are not cached: the loss uses %s, which may change", error.args[0]
        )
        return None
    return {
        "graph": captured.digest,
        "loss": loss,
        "device": f"{model.device.type} {device_name(model.device)}",
        "threads": str(torch.get_num_threads()),
        "autocast": str(current_context().autocast),
        "backends": str(_backends()),
        "torch": str(torch.__version__),
        "pipecompile": __version__,
        "measured": str(VERSION),
    }


def _described_loss(target: Target, microbatches: int) -> str:
    """Return the loss and the targets of a microbatch as text, as far as they change costs.

    Raise LookupError if the loss uses an object whose behaviour has no description.
    """

    # Better no cache than a wrong one: costs of another loss would be taken without a word.
    def refuse(value: object) -> str:
        raise LookupError(f"an object of {qualified_name(type(value))}")

    if target.loss_fn is None or target.targets is None:
        return ""
    # The code of a function counts, and not its name: an edited loss of the same name costs
    # another time.
    return describe((target.loss_fn, target.cut_targets(microbatches)[0]), refuse, code=True)


def _backends() -> dict[str, object]:
    """Return the switches by which PyTorch chooses kernels."""
    cudnn, mkldnn = torch.backends.cudnn, torch.backends.mkldnn
    return {
        **{name: attrgetter(f"{name}.fp32_precision")(torch.backends) for name in FLOAT32},
        "cudnn": (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        "mkldnn": (mkldnn.enabled, mkldnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
