"""All models of the zoo by name; the command line's target is `tests.zoo.models:NAME`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .custom_layers import CUSTOM_LAYERS
from .decoders import DECODERS
from .diffusion import DIFFUSION
from .effects import EFFECTS
from .language import LANGUAGE
from .modules import MODULES
from .vision import VISION

MODELS: dict[str, Callable[[], Any]] = {
    **MODULES,
    **CUSTOM_LAYERS,
    **EFFECTS,
    **LANGUAGE,
    **DECODERS,
    **VISION,
    **DIFFUSION,
}

globals().update(MODELS)  # The command line looks a factory up as an attribute of this module.
