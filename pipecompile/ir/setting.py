"""The settings of a joint search: what is chosen for given devices, and its outcome."""

from __future__ import annotations

from typing import Literal

from pipecompile.ir.plurals import counted
from pipecompile.ir.robustness import Robustness
from pipecompile.ir.serialization import NonNegative, Positive, Value

__all__ = ["JointSearch", "OtherSettings", "Setting", "SettingResult", "SettingStatus"]

SettingStatus = Literal["planned", "memory", "bound", "no cut", "refused", "unlikely", "not tried"]
"""What came of a setting: it has a plan; no cut of it can fit the memory; its bound is not below
the best step; no cut was found that fits, which is no proof; what the user asks for is not possible
under it; by a guess it is not shorter than the best step or does not fit; or the search ended
before it.
"""


class Setting(Value, frozen=True, kw_only=True):
    """What a plan has besides its cut; each of `replicas` has `ranks` and `microbatches`.

    Of devices of several kinds each replica has those that `kinds` lists, one for each rank:
    2xh100,2xa100. It is "" where all are equal.
    """

    # 2 replicas × 4 ranks with 2 stages each are 8 devices and k = 8; with 16 microbatches each
    # the whole minibatch is cut into 32 parts.
    ranks: Positive
    stages_per_rank: Positive
    replicas: Positive
    microbatches: Positive
    schedule: str
    recompute: str
    kinds: str = ""

    @property
    def k(self) -> int:
        """The number of stages."""
        return self.ranks * self.stages_per_rank

    @property
    def parts(self) -> int:
        """The number of microbatches in which the whole minibatch is cut, over all replicas."""
        return self.replicas * self.microbatches

    def __str__(self) -> str:
        """The setting for people: 2 replicas × 4 ranks, 32 microbatches, zb-h1, recompute none."""
        each = f" of {self.stages_per_rank} stages" if self.stages_per_rank > 1 else ""
        each += f" ({self.kinds})" if self.kinds else ""
        return (
            f"{counted(self.replicas, 'replica')} × {counted(self.ranks, 'rank')}{each}, "
            f"{counted(self.microbatches, 'microbatch')}, {self.schedule}, "
            f"recompute {self.recompute}"
        )


class SettingResult(Value, frozen=True, kw_only=True):
    """What a joint search knows of a setting.

    No plan of it has a step shorter than `bound_ns`. One that is planned has the step and the
    bubble of its plan, and what the fullest rank may need; any other has a `reason` where more can
    be said than the status does.
    """

    # While the best step is 100 ms, a setting with a bound of 101 ms need not be planned: its
    # status is "bound", and its step stays None.
    setting: Setting
    status: SettingStatus
    bound_ns: NonNegative
    step_ns: NonNegative | None = None
    memory_bytes: NonNegative | None = None
    bubble: float | None = None
    reason: str = ""


class OtherSettings(Value, frozen=True, kw_only=True, omit_defaults=True):
    """Settings that differ only in their number of `microbatches`, and have the same outcome.

    No plan of the one with `microbatches[i]` has a step shorter than `bounds_ns[i]`. The other
    fields are those of `Setting` and `SettingResult`.
    """

    status: SettingStatus
    ranks: Positive
    stages_per_rank: Positive
    replicas: Positive
    schedule: str
    recompute: str
    microbatches: tuple[Positive, ...]
    bounds_ns: tuple[NonNegative, ...]
    kinds: str = ""
    reason: str = ""


class JointSearch(Value, frozen=True, kw_only=True):
    """How a plan was chosen among `settings` for `devices`, and how good it can be at most.

    `devices` is empty where the user gave the number of stages instead: the minibatch is then the
    share of one replica.

    No plan of any of these settings has a step shorter than `bound_ns`; `gap` is what the plan's
    step is above that, as a share of the step, both by the costs of the search: where whole stages
    are measured after it, the plan's own step is another. `counts` has the number of settings by
    status, and `best` the settings with the shortest steps, the plan's first, with all on the
    Pareto front of step and memory. `others` are all other settings, with what ruled them out.
    """

    devices: str
    settings: Positive
    bound_ns: NonNegative
    gap: float
    counts: dict[SettingStatus, int]
    best: tuple[SettingResult, ...] = ()
    others: tuple[OtherSettings, ...] = ()
    robustness: Robustness | None = None

    def __post_init__(self) -> None:
        # So nothing is left unsaid of any setting: also those that were not tried are counted.
        if sum(self.counts.values()) != self.settings:
            raise ValueError(f"the counts must add up to the {self.settings} settings")
