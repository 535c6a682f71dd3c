"""Encodings of saved tensors by name, and the uses that they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from pipecompile.ir.amount import AllocatorName

__all__ = ["CHUNK_ELEMENTS", "ELEMENT_BYTES", "ENCODINGS", "ENCODING_OF", "Encoding", "Use"]

Encoding = Literal["mask", "relu", "pool", "offload", "half"]
# In the order in which they are tried; half is the only one that is not exact.
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)
Use = Literal["relu", "pool input", "pool indices", "other"]
ENCODING_OF: Mapping[Use, Encoding] = {"relu": "relu", "pool input": "pool", "pool indices": "pool"}
CHUNK_ELEMENTS: Mapping[AllocatorName, int] = {"cpu": 1 << 16, "cuda": 1 << 22}
"""How many elements are packed into bits, or unpacked, at a time; a multiple of 8."""

# By torch's name without `torch.`, so that planners need no PyTorch.
ELEMENT_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16"), 2),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float64", "int64", "complex64"), 8),
    "complex128": 16,
}
