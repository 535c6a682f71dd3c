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
    ScheduleError,
    StalePlanError,
    StaleProfileError,
)

if TYPE_CHECKING:
    from pipecompile.api.compile import pipecompile
    from pipecompile.api.options import Choices
    from pipecompile.api.pipeline import Pipeline

__all__ = [
    "CaptureError",
    "Choices",
    "FormatError",
    "InfeasibleError",
    "InputError",
    "PipecompileError",
    "Pipeline",
    "ScheduleError",
    "StalePlanError",
    "StaleProfileError",
    "__version__",
    "pipecompile",
]

__version__ = "0.1.0.dev0"

# What needs torch is loaded when it is first asked for.
_HOMES = {
    "Choices": "pipecompile.api.options",
    "Pipeline": "pipecompile.api.pipeline",
    "pipecompile": "pipecompile.api.compile",
}

# Installed, `passes` and `cost_models` are subfolders of this one; in a checkout they lie beside it, at the root.
_package = Path(__file__).resolve().parent
if not (_package / "passes").is_dir() and (_package.parent / "passes" / "__init__.py").is_file():
    __path__.append(str(_package.parent))


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
