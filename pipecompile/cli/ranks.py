"""The rank of this process, where torchrun started several."""

from __future__ import annotations

import os

__all__ = ["is_first_rank"]


def is_first_rank() -> bool:
    """Return whether this process speaks for all that torchrun started."""
    # torchrun sets RANK. To ask torch.distributed would import PyTorch.
    return os.environ.get("RANK", "0") == "0"
