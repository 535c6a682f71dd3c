"""Attributes that a forward assigns to modules: state that a graph does not keep.

They are allowed only if they have no effect outside the forward that sets them. To find out, a
second forward is recorded, which finds what the first one left:

    forward 1 ──▶ self.mask = …  ──▶ forward 2    the same graph and the same attributes: allowed
    forward 1 ──▶ self.calls = 1 ──▶ forward 2 ──▶ self.calls = 2        another value: refused
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pipecompile.errors import CaptureError
from pipecompile.frontend.recorded_forward import RecordedForward
from pipecompile.frontend.refusals import UnsupportedError
from pipecompile.graph.attributes import REGISTERED_TABLES, ModuleAttributes

__all__ = ["Attribute", "changed_attributes", "refuse_lasting_state"]

Attribute = tuple[nn.Module, str]


def changed_attributes(before: ModuleAttributes, after: ModuleAttributes) -> list[Attribute]:
    """Return the attributes that changed, except for those of torch's own modules.

    Torch's own modules are nodes that run as they always do.
    """
    return [
        (module, name) for module, name in before.changed(after) if not _is_torch_module(module)
    ]


def _is_torch_module(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules.")


def refuse_lasting_state(
    model: nn.Module,
    changed: Sequence[Attribute],
    first: RecordedForward,
    record: Callable[[], RecordedForward],
) -> None:
    """Raise CaptureError unless the `changed` attributes matter to the forward only.

    `first` is the forward that changed them; `record` records another one. The modules are still as
    the first forward left them.
    """
    after_first = ModuleAttributes.of(model)
    second = _record_second(first, record, changed)
    after_second = ModuleAttributes.of(model)
    for attribute in changed:
        where = _attribute_text(first, attribute)
        # As text: the tensors of two forwards are two objects, but of the same shape and type.
        left, left_again = after_first.described(*attribute), after_second.described(*attribute)
        if left != left_again:
            raise CaptureError(
                f"{where}: the forward sets it to {left}, and a second forward to {left_again}; a "
                "graph cannot keep such state, so make it a buffer and write to it in place"
            )
        _refuse_unused_gradient(where, attribute, second)
    if first.text != second.text:
        raise CaptureError(
            f"{_attribute_text(first, changed[0])}: the forward sets it, and a second forward, "
            "which begins with that value, computes something else; run the model once before it "
            "is compiled, or keep such state in buffers"
        )


def _record_second(
    first: RecordedForward, record: Callable[[], RecordedForward], changed: Sequence[Attribute]
) -> RecordedForward:
    """Record a second forward; attributes have the values that the first forward has set."""
    registered = [(module, name) for module, name in changed if name in REGISTERED_TABLES]
    if registered:
        raise CaptureError(
            f"{_attribute_text(first, registered[0])}: the forward registers a parameter, buffer "
            "or module; run the model once before it is compiled, so that it is there"
        )
    try:
        return record()
    except UnsupportedError as error:
        raise CaptureError(
            f"{_attribute_text(first, changed[0])}: the forward sets it, and a second forward, "
            "which begins with that value, cannot be recorded; keep such state in buffers "
            f"({error})"
        ) from error


def _refuse_unused_gradient(where: str, attribute: Attribute, second: RecordedForward) -> None:
    """Raise CaptureError for a tensor with a gradient that no output uses.

    A loss may read such an attribute, an auxiliary loss for example, but stages would not train by
    it.
    """
    module, name = attribute
    value = vars(module).get(name)
    if not isinstance(value, Tensor) or not value.requires_grad:
        return
    if not second.recorder.recording.is_used(value):
        raise CaptureError(
            f"{where} is set by the forward to a tensor with a gradient that no output uses: a "
            "loss that reads it would not train the model; return it with the output"
        )


def _attribute_text(forward: RecordedForward, attribute: Attribute) -> str:
    """Return the path of an attribute, with the line that set it if that is known."""
    line = forward.recorder.assignments.get(attribute)
    return forward.attribute_path(*attribute) + (f" ({line})" if line else "")
