"""What nearly every test imports, and that the garbage collector need not look at again.

An import of PyTorch leaves some 300,000 objects that stay. Each full collection went through them,
and each capture, which looks for the caches of functions. Caches of these packages hold no tensors
(`IGNORED_PACKAGES` in pipecompile/frontend/caches.py), so captures miss nothing. A package that
models come from, such as transformers, must not be here.
"""

from __future__ import annotations

import gc
from importlib import import_module

MODULES = (
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch.distributed.tensor",
    "torch.fx.experimental.symbolic_shapes",
    "pipecompile.api.compilation",
    "pipecompile.planner.partition",
    "pipecompile.training.pipeline",
)

for name in MODULES:
    import_module(name)
gc.collect()
gc.freeze()
