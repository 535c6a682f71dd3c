"""Where a forward draws its random numbers: only from torch's generator, which is seeded anew for
every random node.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from pipecompile.errors import CaptureError
from pipecompile.frontend.packages import package_of

__all__ = ["require_torch_randomness"]


@contextmanager
def require_torch_randomness(model: nn.Module) -> Iterator[None]:
    """Raise CaptureError if the block draws random numbers that `reseed` would not decide.

    These are draws from Python's and numpy's generators, also from those of the model. On fake
    tensors no operator moves torch's own generator; if it moved, the forward seeded it, or drew
    from it on real tensors. All states are restored.
    """
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_states = [(each, _numpy_state(each)) for each in _numpy_generators(model)]
    try:
        with _refuse_seeding(), _refuse_own_draws():
            yield
    finally:
        # All are compared and restored before any is refused: an error must not leave a generator
        # moved.
        is_torch_moved = not torch.equal(torch.get_rng_state(), torch_state)
        torch.set_rng_state(torch_state)
        is_python_moved = random.getstate() != python_state
        random.setstate(python_state)
        is_numpy_moved = any(_has_moved(each, state) for each, state in numpy_states)
        for generator, state in numpy_states:
            _restore(generator, state)
    if is_torch_moved:
        raise CaptureError(SEEDS)
    if is_python_moved or is_numpy_moved:
        raise CaptureError(DRAWS % f"{'Python' if is_python_moved else 'numpy'}'s random module")


DRAWS = (
    "the forward draws from %s, and one draw would be used for all steps; draw with torch, or "
    "switch it off (layer drop, for example)"
)
OF_SYSTEM = (
    "the system's random numbers (a generator of numpy made without a seed, or as RandomState, "
    "which draws them with a seed too and default_rng(seed) does not; secrets, uuid, urandom)"
)
SEEDS = (
    "the forward seeds torch's generator, or draws from it unseen, but every random node of a "
    "pipeline is seeded by itself; seed outside the model"
)


class _UnseededGenerator:
    """Torch's generator, which refuses to be seeded or set."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        if name in ("manual_seed", "seed", "set_state"):
            raise CaptureError(SEEDS)
        return getattr(self._generator, name)


@contextmanager
def _refuse_seeding() -> Iterator[None]:
    """Raise CaptureError if the block seeds torch's generator, even if it sets it back later."""
    # The states before and after would not tell: `fork_rng` sets it back, and so may the model.
    functions = vars(torch.random)  # the globals of `torch.manual_seed`, `fork_rng` and the like
    generator = functions["default_generator"]
    functions["default_generator"] = _UnseededGenerator(generator)
    try:
        yield
    finally:
        functions["default_generator"] = generator


DRAWING_METHODS = ("random", "getrandbits")
"""All methods of Python's generators draw by one of these."""
DRAWING_PACKAGES = frozenset({"sympy", "torch"})
"""They draw for themselves while a forward is recorded."""
PASSED_ON = frozenset({"random", "secrets", "tempfile", "uuid"})
"""They draw for who calls them."""


@contextmanager
def _refuse_own_draws() -> Iterator[None]:
    """Raise CaptureError if the block draws from a generator of Python of its own, whose state
    nobody else knows, or from the system, from which numpy too seeds a generator that is given no
    seed.
    """
    forward = get_ident()

    def refusing(draw: Callable[..., Any], source: str) -> Callable[..., Any]:
        def refuse(*args: Any) -> Any:
            # Other threads are no part of the forward.
            is_of_forward = get_ident() == forward and _package_that_draws() not in DRAWING_PACKAGES
            if not is_of_forward or _is_importing():
                return draw(*args)
            raise CaptureError(DRAWS % source)

        return refuse

    # They are inherited from a class of C, so they are deleted afterwards.
    for name in DRAWING_METHODS:
        method = getattr(random.Random, name)
        setattr(random.Random, name, refusing(method, "Python's random module"))
    of_system = refusing(os.urandom, OF_SYSTEM)
    try:
        # SystemRandom has it by a name of its own.
        with patch.object(os, "urandom", of_system), patch.object(random, "_urandom", of_system):
            yield
    finally:
        for name in DRAWING_METHODS:
            delattr(random.Random, name)


def _package_that_draws() -> str:
    """Return the package of the code that has called a generator of Python."""
    # 0 is this function, 1 the method that refuses, 2 what has called it. `random.uniform` is
    # code of the module `random` that calls `random`, so its frames are passed over.
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in PASSED_ON:
        frame = frame.f_back
    return "" if frame is None else str(frame.f_globals.get("__name__")).partition(".")[0]


def _is_importing() -> bool:
    """Return whether the forward imports a Python module, which may draw a name or a key."""
    # 0 is this function, 1 the method that refuses; code of this package has called the forward.
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module == "importlib._bootstrap" or package_of(module) == package_of(__name__):
            return module == "importlib._bootstrap"
        frame = frame.f_back
    return False


def _numpy_generators(model: nn.Module) -> list[Any]:
    """Return numpy's generator, and those that modules hold or that their forwards name."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return []
    kinds = (numpy.random.Generator, numpy.random.RandomState)
    held = chain.from_iterable(vars(module).values() for module in model.modules())
    named = chain.from_iterable(map(_named_globals, {type(each) for each in model.modules()}))
    found = {id(each): each for each in (*held, *named) if isinstance(each, kinds)}
    return [numpy.random.mtrand._rand, *found.values()]


def _named_globals(kind: type) -> Iterator[Any]:
    """Yield the globals that the forward of a class of modules names."""
    forward = getattr(kind, "forward", None)
    if isinstance(forward, types.FunctionType):
        for name in forward.__code__.co_names:
            yield forward.__globals__.get(name)


def _numpy_state(generator: Any) -> Any:
    """Return the state of a generator of numpy of either kind."""
    is_legacy = hasattr(generator, "get_state")
    return generator.get_state() if is_legacy else generator.bit_generator.state


def _restore(generator: Any, state: Any) -> None:
    if hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _has_moved(generator: Any, state: Any) -> bool:
    # States may hold arrays, whose elements `==` would compare one by one.
    return pickle.dumps(_numpy_state(generator)) != pickle.dumps(state)
