"""The self-check with two microbatches in flight, as a pipeline has them.

    the model     F0 B0 F1 B1
    the graph     F0 F1 B0 B1

If they differ, something has come from one microbatch to the other: by a tensor that is written
to, or by something that code of the user keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, fx, nn

from pipecompile.errors import CaptureError, reason_of
from pipecompile.frontend.callable_state import callable_restored
from pipecompile.frontend.captured_graph import Capture
from pipecompile.frontend.data_probe import cuda_devices
from pipecompile.frontend.failing_model import ModelFailsError
from pipecompile.frontend.hook_calls import RecordedHooks, recorded_hooks, replay_differs
from pipecompile.frontend.kept_state import holders_of_user, places_of_kept_state
from pipecompile.frontend.kernel_noise import is_within_noise
from pipecompile.frontend.lockstep import can_run_in_lockstep, forwards_in_lockstep
from pipecompile.frontend.other_data import enlarged, other_data
from pipecompile.frontend.self_check import (
    KINDS,
    first_difference,
    with_autograd_contexts,
)
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.training_step import SEED, TrainingStep, training_steps

__all__ = ["check_in_flight", "may_disturb"]

SHOWN = 3  # places in a message


def check_in_flight(capture: Capture, module: fx.GraphModule, call: Arguments) -> None:
    """Raise CaptureError if the graph differs from the model with two microbatches in flight."""
    # The second microbatch has other data, so that what it takes from the first shows.
    tensors = capture.inputs.flatten(call)
    dims = capture.inputs.batch_dims
    others = other_data(tensors, dims)
    # Larger numbers too, or a running maximum would stay that of the first.
    for second in (enlarged(others, dims), others):
        apart = _TwoMicrobatches(capture, module, (tensors, second))
        with suppress(ModelFailsError):
            if apart.difference_in_flight is None:
                return
            if apart.difference_in_turn is None:
                raise apart.error()
    # The model may not take the other data, and its graph may not be right for them: now both
    # microbatches have the same data.
    alike = _TwoMicrobatches(capture, module, (tensors, tensors))
    if alike.difference_in_flight is not None:
        raise alike.error()


@dataclass(frozen=True)
class _TwoMicrobatches:
    """Two microbatches of a model and of its graph `module`."""

    capture: Capture
    module: fx.GraphModule
    batches: tuple[Sequence[Tensor], Sequence[Tensor]]

    def error(self) -> CaptureError:
        """Return an error that says what differs in flight, and what may be the reason."""
        writers = list(_writers(self.module))
        places = list(dict.fromkeys(places_of_kept_state(self.module)))
        reasons: list[str] = []
        if writers:
            reasons.append(
                "the forward of the second writes to what the backward of the first needs, in "
                f"{', '.join(writers)}; compute with a copy of what is written to (clone)"
            )
        elif self.steps[0].writes_in_backward or not places:
            reasons.append(
                "the backward of the first writes to a buffer that the forward of the second "
                "reads; write to it between steps"
            )
        if places:
            more = ["…"] if len(places) > SHOWN else []
            shown = ", ".join([*places[:SHOWN], *more])
            reasons.append(
                "what a hook, a Function or a module keeps of one microbatch (on a module, in a "
                f"class or a container) is used by another one, at {shown}; let it go with the "
                "tensors: save it in the ctx of a Function, let a hook on the tensor itself "
                "enclose it, or return it and give it to what needs it as an argument"
            )
        return CaptureError(
            "with two microbatches in flight the model would train otherwise "
            f"({self.difference_in_flight}): {'; or '.join(reasons)}"
        )

    @cached_property
    def steps(self) -> list[TrainingStep]:
        """The steps of the model itself, one after the other; ModelFailsError if one fails."""
        calls = map(self.capture.inputs.unflatten, self.batches)
        model = self.capture.model
        try:
            return self._taken([partial(model, *call.args, **call.kwargs) for call in calls])
        except Exception as error:
            reason = reason_of(error)
            raise ModelFailsError(
                f"a second training step of the model itself fails: {type(error).__name__}: "
                f"{reason}; let a step leave nothing that stands in the way of the next one"
            ) from error

    @cached_property
    def difference_in_flight(self) -> str | None:
        """What differs if both forwards of the graph come before the backwards; None if nothing."""
        wanted = self.steps  # whose hooks are not recorded
        with recorded_hooks(self.module) as recorded:
            difference = self._difference(wanted, self._forwards_in_flight, in_flight=True)
        if difference is None and self._hooks_differ(recorded):
            return "what a backward hook returns differs"
        return difference

    def _hooks_differ(self, recorded: RecordedHooks) -> bool:
        """Return whether backward hooks that run for both microbatches before the next hook runs
        return something else than in `recorded`.
        """
        if len({call.number for call in recorded.calls}) < 2:
            return False
        is_different = False

        def replay() -> tuple[()]:
            nonlocal is_different
            is_different = replay_differs(recorded.calls, again.hooks)
            return ()

        with recorded_hooks(self.module) as again:
            self._taken([*self._forwards_in_flight, replay], in_flight=True)
        return is_different

    @cached_property
    def difference_in_turn(self) -> str | None:
        """What differs if the graph takes one step after the other; None if nothing does."""
        return self._difference(self.steps, self._forwards)

    @cached_property
    def _runnable(self) -> fx.GraphModule:
        return with_autograd_contexts(self.module)

    @property
    def _forwards_in_flight(self) -> list[Callable[[], Any]]:
        """The forwards of the graph, node by node where that is possible."""
        if not can_run_in_lockstep(self.module.graph):
            return self._forwards
        outputs = forwards_in_lockstep(self._runnable, self.batches, SEED)
        return [partial(next, outputs)] * 2

    @property
    def _forwards(self) -> list[Callable[[], Any]]:
        return [partial(self._runnable, *tensors) for tensors in self.batches]

    def _taken(
        self, forwards: Sequence[Callable[[], Any]], *, in_flight: bool = False
    ) -> list[TrainingStep]:
        fills_zeros = not self.capture.value_reads
        model = self.capture.model
        # Each begins with what hooks keep now, and not with what the run before has left.
        with callable_restored(*holders_of_user(model)):
            return training_steps(model, forwards, in_flight=in_flight, fills_zeros=fills_zeros)

    def _difference(
        self,
        wanted: Sequence[TrainingStep],
        forwards: Sequence[Callable[[], Any]],
        *,
        in_flight: bool = False,
    ) -> str | None:
        try:
            found = self._taken(forwards, in_flight=in_flight)
        except Exception as error:
            # Autograd notices some writes, and code of the user may miss what it has kept.
            return reason_of(error) or type(error).__name__
        for kind in KINDS:
            for index, (one, other) in enumerate(zip(wanted, found, strict=True)):
                name = first_difference(getattr(one, kind), getattr(other, kind))
                if name is not None and not self._is_noise(index, kind, other):
                    return f"{name} differs"
        return None

    def _is_noise(self, index: int, kind: str, found: TrainingStep) -> bool:
        """Return whether steps of the model itself differ by as much on this GPU."""
        if not cuda_devices(self.capture.model):
            return False
        repeats = [
            self,
            *(_TwoMicrobatches(self.capture, self.module, self.batches) for _ in range(2)),
        ]
        tensors = [getattr(each.steps[index], kind) for each in repeats]
        return is_within_noise(tensors, getattr(found, kind))


def may_disturb(module: fx.GraphModule, node: fx.Node) -> bool:
    """Return whether a node writes to something that an earlier backward may need."""
    if node.op == "call_module" and isinstance(
        module.get_submodule(str(node.target)), nn.modules.batchnorm._BatchNorm
    ):
        # There are many of them, and a backward reads the statistics of its own microbatch.
        return False
    return bool(node.meta["mutates"])


def _writers(module: fx.GraphModule) -> Iterator[str]:
    """Yield the modules and lines that write to something, each once."""
    seen: set[str] = set()
    for node in module.graph.nodes:
        # A layer that writes in ten places is one thing to mend: its first line is enough.
        path = node.meta["module"] or "the forward"
        line = f" ({node.meta['source']})" if node.meta["source"] else ""
        if may_disturb(module, node) and path not in seen:
            seen.add(path)
            yield f"{path}{line}"
