"""A device measured and fitted, for the command line and for programs."""

from __future__ import annotations

from pipecompile.profiling.calibration import Calibration, calibrate, calibration_text

__all__ = ["Calibration", "calibrate", "calibration_text"]
