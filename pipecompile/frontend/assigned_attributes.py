"""Attributes that a forward assigns to modules: state that a graph does not keep.

They are allowed only if they have no effect outside the forward that sets them. To find out, a
second forward is recorded, which finds what the first one left:

    forward 1 ──▶ self.mask = …  ──▶ forward 2    the same graph and the same attributes: allowed
    forward 1 ──▶ self.calls = 1 ──▶ forward 2 ──▶ self.calls = 2        another value: refused
    forward 1 ──▶ self.cos = …   ──▶ forward 2    reads what forward 1 made: refused
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pipecompile.errors import CaptureError
from pipecompile.frontend.recorded_forward import RecordedForward
from pipecompile.frontend.refusals import COMPUTED_WITH, LOOKED_AT, UnsupportedError
from pipecompile.graph.attributes import REGISTERED_TABLES, ModuleAttributes

__all__ = ["Attribute", "changed_attributes", "refuse_lasting_state"]

Attribute = tuple[nn.Module, str]
ONCE = "run the model once before it is compiled, or make it in __init__"


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
    before: ModuleAttributes,
    changed: Sequence[Attribute],
    first: RecordedForward,
    record: Callable[[], RecordedForward],
) -> None:
    """Raise CaptureError unless the `changed` attributes matter to the forward only.

    `first` is the forward that changed them since `before`; `record` records another one. The
    modules are still as the first forward left them.
    """
    # Before the second forward, which may change them again.
    after_first = ModuleAttributes.of(model)
    for module, table in (each for each in changed if each[1] in REGISTERED_TABLES):
        known = before.registered(module, table)
        # One that is taken away and put back has another place among them.
        names = {*known} ^ {*after_first.registered(module, table)} or known
        raise CaptureError(
            f"{_attribute_text(first, (module, min(names)))}: the forward makes or removes this "
            f"{REGISTERED_TABLES[table]}, and stages have what is there before it; {ONCE}"
        )
    try:
        # The modules are not restored before it: a forward that goes by what the last one left
        # does so now.
        second = record()
    except UnsupportedError as error:
        place = str(error).partition(": ")[0]
        raise _other_forward(model, first, changed, place) from error
    after_second = ModuleAttributes.of(model)
    for attribute in changed:
        where = _attribute_text(first, attribute)
        # As text: the tensors of two forwards are two objects, but of the same shape and type.
        left, left_second = after_first.described(*attribute), after_second.described(*attribute)
        if left != left_second:
            raise CaptureError(
                f"{where}: the forward sets it to {left}, and a second forward to "
                f"{left_second}; a graph keeps no such state: what the forward computes "
                f"with, {COMPUTED_WITH}; {LOOKED_AT}"
            )
        _refuse_unused_gradient(where, attribute, second)
    # Last, since an attribute that has another value says more than that the graphs differ.
    if first.text != second.text:
        raise _other_forward(model, first, changed)


def _other_forward(
    model: nn.Module, first: RecordedForward, changed: Sequence[Attribute], place: str = ""
) -> CaptureError:
    """Return the refusal of a model whose second forward is another one, or fails at a `place`, a
    module and a line. It names the first of the `changed` attributes in that module, if it has any.
    """
    path = place.partition(" ")[0]
    named = {module: name for name, module in model.named_modules()}
    attribute = next((each for each in changed if named.get(each[0]) == path), changed[0])
    return CaptureError(
        f"{_attribute_text(first, attribute)}: the forward sets it, and a second forward, which "
        f"begins with that value, computes something else{place and f' in {place}'}; if something "
        f"is made once and kept, {ONCE}; what each forward sets to something else, {COMPUTED_WITH}"
    )


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
