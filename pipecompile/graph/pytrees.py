"""Dataclasses in the arguments and results of models."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.utils._pytree as pytree

__all__ = ["know_dataclasses"]


def know_dataclasses(value: Any) -> None:
    """Tells torch's pytrees of every dataclass in nested tuples, lists, dicts and dataclasses.

    Otherwise one that torch does not know would be a leaf, and the tensors in it would not be seen.
    """
    if isinstance(value, (tuple, list)):
        items = list(value)
    elif isinstance(value, dict):
        items = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value) not in pytree.SUPPORTED_NODES:
            pytree.register_dataclass(type(value))
        items = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return
    for item in items:
        know_dataclasses(item)
