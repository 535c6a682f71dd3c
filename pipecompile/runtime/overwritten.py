"""What a backward finds overwritten: autograd says its shape and version, and this says its name.

Several microbatches are in flight. A forward that branches on data may write to what the backward
of an earlier one needs, although it did not on the sample that the model was proven by.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

from torch import nn

from pipecompile.errors import InputError
from pipecompile.graph.model_state import named_state

__all__ = ["naming_overwritten"]

# "modified by an inplace operation: [torch.FloatTensor [8, 6]] is at version 3; expected …"
OVERWRITTEN = re.compile(
    r"modified by an inplace operation: \[\S+ \[([\d, ]*)\]\].* version (\d+);"
)


@contextmanager
def naming_overwritten(module: nn.Module) -> Iterator[None]:
    """Raise InputError, with the name, if a backward in the block needs what was written to.

    The name is that of a parameter or buffer of the stage's `module`.
    """
    try:
        yield
    except RuntimeError as error:
        found = OVERWRITTEN.search(str(error))
        if found is None:
            raise
        sizes, version = found.groups()
        elements = prod(int(size) for size in sizes.split(",") if size.strip())
        # A layer saves a view of its weight: the version is the same, the shape may not be.
        names = [
            name
            for name, tensor in named_state(module)
            if (tensor.numel(), tensor._version) == (elements, int(version))
        ]
        what = " or ".join(dict.fromkeys(names)) or f"a tensor of shape [{sizes}]"
        raise InputError(
            f"the forward has written in place to {what} after that was used, and the backward of "
            "an earlier microbatch, or its own, needs it as it was; compute with a copy of it "
            "(clone), or write to it between steps"
        ) from error
