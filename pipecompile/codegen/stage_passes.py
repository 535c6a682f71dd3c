"""The passes that finish the graph of a stage, and the bodies of its regions and encoded runs."""

from __future__ import annotations

from pipecompile.passes.autograd_context import EnterContexts
from pipecompile.passes.batch_norm import DeferStatistics
from pipecompile.passes.contract import Pass
from pipecompile.passes.data_dependence import GuardDataDependence
from pipecompile.passes.seed import Seed

__all__ = ["STAGE_PASSES"]

STAGE_PASSES: tuple[Pass, ...] = (
    GuardDataDependence(),
    Seed(),
    EnterContexts(),
    DeferStatistics(),
)
