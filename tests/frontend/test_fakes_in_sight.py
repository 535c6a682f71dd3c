"""Models that look whether they are captured take the path that they take outside of a capture."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers.utils.import_utils import is_torchdynamo_compiling, is_tracing
from traps import WIDTH, X
from zoo import called

from pipecompile.errors import CaptureError
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments


class Looking(nn.Module):
    """Runs a layer, unless what it sees says that it is captured."""

    def __init__(self, sees: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.sees = nn.Linear(WIDTH, WIDTH), sees

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return x.cos() if self.sees(x) else self.layer(x)


HIDDEN: dict[str, Callable[[Tensor], bool]] = {
    "transformers": is_tracing,
    "transformers, of dynamo": lambda x: is_torchdynamo_compiling(),
    "the class of fakes": lambda x: isinstance(x, torch._subclasses.FakeTensor),
    "torch.compiler": lambda x: torch.compiler.is_compiling(),
    "an export": lambda x: torch.compiler.is_exporting(),
    "torch.jit": lambda x: torch.jit.is_tracing() or torch.jit.is_scripting(),
    "a proxy of torch.fx": lambda x: isinstance(x, torch.fx.Proxy),
    "the meta device": lambda x: x.is_meta or x.device.type == "meta",
    "functorch": lambda x: torch._C._functorch.is_functorch_wrapped_tensor(x),
    "a subclass": lambda x: not isinstance(x, Tensor),
}
SEEN: dict[str, Callable[[Tensor], bool]] = {
    "the exact type": lambda x: type(x) is not Tensor,
    "an attribute of fakes": lambda x: hasattr(x, "fake_mode"),
    "a dispatch mode": lambda x: _get_current_dispatch_mode() is not None,
    "a function mode": lambda x: torch._C._len_torch_function_stack() > 0,
    "a symbolic size": lambda x: isinstance(x.shape[0], torch.SymInt),
    "the type's name": lambda x: type(x).__name__ == "FakeTensor",
}
"""What no capture can hide: a model that looks there is refused, or captured in another way."""
CALL = Arguments((X[:4].clone(),), {})


@pytest.mark.parametrize("sees", HIDDEN.values(), ids=HIDDEN)
def test_the_path_is_that_outside_of_a_capture(sees: Callable[[Tensor], bool]) -> None:
    found, module, _ = proven_capture(Looking(sees), CALL)
    assert found.method == "recorded"
    assert called(module.graph) == ["layer"]


@pytest.mark.parametrize("sees", SEEN.values(), ids=SEEN)
def test_a_model_that_sees_the_capture_all_the_same_is_right_or_refused(
    sees: Callable[[Tensor], bool],
) -> None:
    try:
        _, module, _ = proven_capture(Looking(sees), CALL)
    except CaptureError as error:
        message = str(error)
        assert "\n" not in message
    else:
        message = "the exact type"
        assert called(module.graph) == ["layer"]
    assert "the exact type" in message


class Scaled(nn.Module):
    """Reads a number out of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """A value of any shape to the same shape."""
        return x * x.detach().abs().max().item()


class Asking(nn.Module):
    """Layers around a module that reads a number; `sees` chooses among paths, as in `Looking`."""

    def __init__(self, sees: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.scaled, self.looking = Scaled(), Looking(sees)

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.looking(self.scaled(x))


@pytest.mark.parametrize("sees", HIDDEN.values(), ids=HIDDEN)
def test_so_it_is_beside_a_module_that_asks_for_data(sees: Callable[[Tensor], bool]) -> None:
    found, module, _ = proven_capture(Asking(sees), CALL)
    assert found.method == "recorded, data probed"
    assert called(module.graph) == ["scaled", "looking.layer"]


class OfOneSize(Looking):
    """What it computes with is the sample's batch size."""

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return super().forward(x) * math.log2(int(x.shape[0]))


@pytest.mark.parametrize("sees", HIDDEN.values(), ids=HIDDEN)
def test_so_it_is_in_a_recording_for_one_batch_size(sees: Callable[[Tensor], bool]) -> None:
    _, module, _ = proven_capture(OfOneSize(sees), CALL)
    assert "layer" in called(module.graph)


class Masked(nn.Module):
    """As models with masks do: it looks whether the mask masks nothing, unless it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.layer = Scaled(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        mask = (x > 0).float()
        if not is_tracing(x) and mask.all():
            return self.layer(self.scaled(x))
        return self.layer(self.scaled(x) * mask)


def test_a_path_that_makes_the_whole_model_one_node_is_not_taken() -> None:
    found, module, _ = proven_capture(Masked(), CALL)
    assert found.method == "recorded with fakes in sight, data probed"
    assert {"scaled", "layer"} <= set(called(module.graph))


class Padded(nn.Module):
    """Sees fakes, as models with masks do; reads one attribute on each path, and not `step`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.shift, self.step = nn.Linear(WIDTH, WIDTH), 2.0, 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        mask = (x < torch.inf).float()
        if is_tracing(x) or not mask.all():
            return self.layer(x) * self.scale * mask
        return self.layer(x) * (self.scale + 0 * self.shift)


def test_what_a_model_reads_is_known_where_it_sees_fakes_too() -> None:
    found, _, _ = proven_capture(Padded(), CALL)
    assert found.method == "recorded with fakes in sight"
    assert [found.may_read("", name) for name in ("scale", "shift", "step")] == [True, True, False]
