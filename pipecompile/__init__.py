"""Cuts one PyTorch model into pipeline stages, proves the plan, and runs its training step.

Importing the package is cheap: what needs torch brings it in when it is first asked for.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipecompile.errors import (
    CaptureError,
    FormatError,
    InfeasibleError,
    InputError,
    PipecompileError,
    RankFaultError,
    ScheduleError,
    StalePlanError,
    StaleProfileError,
)
from pipecompile.torch_versions import check_torch

if TYPE_CHECKING:
    from pipecompile.api.choices import Choices
    from pipecompile.api.compilation import pipecompile
    from pipecompile.api.diff import diff
    from pipecompile.api.explain import explain
    from pipecompile.ir.encodings import Encoding
    from pipecompile.ir.explanation import Explanation
    from pipecompile.ir.option_names import Objective, OptimizerName, PlacementShape, ScheduleName
    from pipecompile.ir.plan import BatchNormUpdate, Granularity, Plan, Recompute, ShardLevel
    from pipecompile.ir.recorded_run import RecordedRun
    from pipecompile.report.plan_diff import PlanChange, PlanDiff
    from pipecompile.training.checkpoint import Checkpoint
    from pipecompile.training.host_optimizer import HostOptimizer
    from pipecompile.training.pipeline import Pipeline

__all__ = [
    "BatchNormUpdate",
    "CaptureError",
    "Checkpoint",
    "Choices",
    "Encoding",
    "Explanation",
    "FormatError",
    "Granularity",
    "HostOptimizer",
    "InfeasibleError",
    "InputError",
    "Objective",
    "OptimizerName",
    "PipecompileError",
    "Pipeline",
    "PlacementShape",
    "Plan",
    "PlanChange",
    "PlanDiff",
    "RankFaultError",
    "Recompute",
    "RecordedRun",
    "ScheduleError",
    "ScheduleName",
    "ShardLevel",
    "StalePlanError",
    "StaleProfileError",
    "__version__",
    "diff",
    "explain",
    "pipecompile",
]

__version__ = "0.1.0.dev0"

check_torch()

# Each public name with the module that it comes from, which is imported when the name is first
# used.
_MODULES = {
    "BatchNormUpdate": "pipecompile.ir.plan",
    "Checkpoint": "pipecompile.training.checkpoint",
    "Choices": "pipecompile.api.choices",
    "Granularity": "pipecompile.ir.plan",
    "HostOptimizer": "pipecompile.training.host_optimizer",
    "Objective": "pipecompile.ir.option_names",
    "OptimizerName": "pipecompile.ir.option_names",
    "Pipeline": "pipecompile.training.pipeline",
    "PlacementShape": "pipecompile.ir.option_names",
    "Plan": "pipecompile.ir.plan",
    "PlanChange": "pipecompile.report.plan_diff",
    "PlanDiff": "pipecompile.report.plan_diff",
    "Encoding": "pipecompile.ir.encodings",
    "Explanation": "pipecompile.ir.explanation",
    "Recompute": "pipecompile.ir.plan",
    "RecordedRun": "pipecompile.ir.recorded_run",
    "ScheduleName": "pipecompile.ir.option_names",
    "ShardLevel": "pipecompile.ir.plan",
    "diff": "pipecompile.api.diff",
    "explain": "pipecompile.api.explain",
    "pipecompile": "pipecompile.api.compilation",
}

# Installed, `passes` and `cost_models` are subfolders of this one; in a checkout they lie beside
# it, at the root.
_package = Path(__file__).resolve().parent
if not (_package / "passes").is_dir() and (_package.parent / "passes" / "__init__.py").is_file():
    __path__.append(str(_package.parent))


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
