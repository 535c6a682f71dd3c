"""The ways to record a forward, best first; capture.py tries them in turn."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["INPUTS_READ", "IN_SIGHT", "METHODS", "RecordingMethod"]


@dataclass(frozen=True)
class RecordingMethod:
    """A way to record: its name in plans, and what it allows."""

    name: str
    exporting: bool
    symbolic: bool
    allows_data: bool
    hides_fakes: bool = False
    reads_inputs: bool = False

    @property
    def variants(self) -> tuple[RecordingMethod, ...]:
        """The method, and with it the one where fakes are in sight, if both are to be compared."""
        if not (self.allows_data and self.hides_fakes):
            return (self,)
        name = self.name.replace("recorded", "recorded with fakes in sight")
        return self, replace(self, name=name, hides_fakes=False)


IN_SIGHT = RecordingMethod(
    "recorded with fakes in sight", exporting=False, symbolic=True, allows_data=False
)
INPUTS_READ = RecordingMethod(
    "recorded, inputs read",
    exporting=False,
    symbolic=True,
    allows_data=False,
    hides_fakes=True,
    reads_inputs=True,
)
METHODS = (
    RecordingMethod(
        "recorded", exporting=False, symbolic=True, allows_data=False, hides_fakes=True
    ),
    IN_SIGHT,
    RecordingMethod("recorded as for export", exporting=True, symbolic=True, allows_data=False),
    RecordingMethod(
        "recorded, data probed", exporting=False, symbolic=True, allows_data=True, hides_fakes=True
    ),
    RecordingMethod(
        "recorded as for export, data probed", exporting=True, symbolic=True, allows_data=True
    ),
    INPUTS_READ,
    RecordingMethod(
        "recorded for one batch size",
        exporting=False,
        symbolic=False,
        allows_data=True,
        hides_fakes=True,
    ),
    RecordingMethod(
        "recorded as for export, for one batch size",
        exporting=True,
        symbolic=False,
        allows_data=True,
    ),
)
