"""Models that look whether they are captured take the path that they take outside of a capture."""

from __future__ import annotations

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
