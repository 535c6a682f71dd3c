"""All models of the zoo by name; the command line's target is `tests.zoo.models:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .effects import EFFECTS
from .language import LANGUAGE
from .modules import MODULES
from .vision import VISION

MODELS: dict[str, Callable[[], Any]] = {**MODULES, **EFFECTS, **LANGUAGE, **VISION}

globals().update(MODELS)  # a target names an attribute
