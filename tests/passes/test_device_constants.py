from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import arguments_of
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.device_constants import LeaveMeta


class Positions(nn.Module):
    """Makes tensors where its input is, as models of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1], device=x.device).to(x.device)


def test_a_graph_of_the_meta_device_runs_elsewhere() -> None:
    model, x = Positions(), torch.randn(4, 5)
    call = arguments_of(model, x.to("meta"))
    module = capture(model, call).instantiate(call)
    with pytest.raises(RuntimeError, match="meta"):
        module(x)
    apply_passes(module.graph, [LeaveMeta(torch.device("cpu"))])
    module.recompile()
    assert torch.equal(module(x)[0], model(x))
