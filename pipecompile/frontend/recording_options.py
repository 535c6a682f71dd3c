"""How a forward is recorded."""

from __future__ import annotations

from dataclasses import dataclass

from pipecompile.frontend.data_probe import ProbedAnswers

__all__ = ["RecordingOptions"]


@dataclass(frozen=True)
class RecordingOptions:
    """How a forward is recorded.

    `exporting` sets the flags by which models learn that they are captured; many then avoid
    shortcuts that depend on data. `leaves` are the paths of modules that become one node, besides
    those of torch.nn. `answers` are those of a data probe; without them a data-dependent module is
    an error. With `hiding` the forward does not see that its tensors are fakes. With `reads_inputs`
    what the forward reads out of inputs of whole numbers is that of the sample. `lengths` are the
    dimensions of each input whose sizes are symbols, besides the batch.
    """

    exporting: bool
    hiding: bool
    leaves: frozenset[str] = frozenset()
    answers: ProbedAnswers | None = None
    reads_inputs: bool = False
    lengths: tuple[frozenset[int], ...] = ()
