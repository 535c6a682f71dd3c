"""The settings that a joint search chooses from. Needs no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replace_fields
from itertools import product
from typing import Any

from msgspec.structs import replace

from pipecompile.errors import InputError
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options
from pipecompile.ir.setting import Setting
from pipecompile.planner.option_conflicts import check_together
from pipecompile.planner.unequal_devices import UnequalDevices
from pipecompile.schedule.named_orders import fitting_names, required_placement
from pipecompile.schedule.placement import place

__all__ = ["JOINT_CHOICES", "POLICIES", "SCHEDULES", "SettingSpace", "effort_of"]

JOINT_CHOICES = (
    "k",
    "ranks",
    "stages_per_rank",
    "replicas",
    "microbatches",
    "schedule",
    "recompute",
    "objective",
)
"""The options that a joint search chooses unless they are given."""
# By the memory that they take, so that of equally short orders the one that holds less comes first.
SCHEDULES = (
    "1f1b",
    "zb-h1",
    "v-min",
    "v-half",
    "zb-v",
    "interleaved-1f1b",
    "dualpipe-v",
    "zb-h2",
    "gpipe",
    "looped-bfs",
)
STAGES_PER_RANK = (2,)  # of schedules that take any number around a loop
POLICIES = ("none", "auto", "stage")
EFFORT_ACTIONS = 8192  # computations in an order that take an effort of 1 more to plan


@dataclass(frozen=True)
class SettingSpace:
    """The settings under which so many `devices` train a minibatch of `samples` samples.

    `base` has all options that are not chosen, and `fixed` those of `JOINT_CHOICES` that the user
    gave; `offered` has the values of others that are tried, where these are not all that there are.
    Devices of several kinds are `unequal`; a rank of theirs has one stage. All devices are used,
    and microbatches have one size. InputError if what is fixed leaves no setting.
    """

    devices: int
    samples: int
    base: Options
    fixed: Mapping[str, Any] = field(default_factory=dict)
    unequal: UnequalDevices | None = None
    offered: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def settings(self) -> tuple[Setting, ...]:
        """Return all settings: numbers of replicas first, the fewest first, recompute last."""
        possible = tuple(self._all())
        found = tuple(filter(self._allowed, possible))
        if possible and not found:
            # What was given cannot be together, whatever is chosen: this says why.
            check_together(self.options(possible[0]))
        if not found:
            given = ", ".join(f"{name}={value}" for name, value in self.fixed.items())
            removable = " or ".join(filter(self._has_settings_without, self.fixed))
            raise InputError(
                f"no setting of {self.devices} devices and a batch of {self.samples} has "
                f"{given or 'one microbatch for each replica'}; "
                f"{f'leave out {removable}: ' if removable else ''}ranks × replicas must be the "
                "number of devices, k is ranks × stages per rank, replicas × microbatches must "
                "divide the batch, and a schedule may ask for stages on each rank of its own"
            )
        return found

    def _has_settings_without(self, name: str) -> bool:
        """Return whether there are settings if one choice of the user is left open."""
        fixed = {other: value for other, value in self.fixed.items() if other != name}
        space = replace_fields(self, fixed=fixed)
        return any(map(space._allowed, space._all()))

    def options(self, setting: Setting) -> Options:
        """Return the options of a plan under a setting."""
        base = self.base
        if self.unequal is not None:
            base = self.unequal.options(base, setting.kinds)
        return replace(
            base,
            k=setting.k,
            stages_per_rank=setting.stages_per_rank,
            replicas=setting.replicas,
            microbatches=setting.microbatches,
            schedule=setting.schedule,
            recompute=setting.recompute,
        )

    def links(self, links: Links, setting: Setting) -> Links:
        """Return links among the devices as those among the ranks of a setting."""
        if self.unequal is None:
            return links
        return self.unequal.links(links, setting.kinds, setting.replicas)

    def _allowed(self, setting: Setting) -> bool:
        """Return whether the options of a setting may be given together."""
        try:
            check_together(self.options(setting))
        except InputError:
            return False
        return True

    def _all(self) -> Iterator[Setting]:
        for replicas in self._values("replicas", _divisors(self.devices)):
            if self.devices % replicas == 0 and self.samples % replicas == 0:
                yield from self._of_replica(self.devices // replicas, replicas)

    def _of_replica(self, ranks: int, replicas: int) -> Iterator[Setting]:
        """Yield the settings of replicas on so many ranks."""
        samples = self.samples // replicas
        # Ranks follow from the devices and the replicas, and k from
        # ranks and stages: a number that is given only filters them.
        if self.fixed.get("ranks", ranks) != ranks:
            return
        # 8 devices and 24 samples on 2 replicas: 4 ranks, and 1, 2, 3, 4, 6 or 12 microbatches.
        for microbatches in self._values("microbatches", _divisors(samples)):
            if samples % microbatches:
                continue
            for schedule, each in self._orders(ranks, microbatches):
                if self.fixed.get("k", ranks * each) == ranks * each:
                    for kinds, recompute in product(self._kinds(replicas), self._policies()):
                        yield Setting(
                            ranks=ranks,
                            stages_per_rank=each,
                            replicas=replicas,
                            microbatches=microbatches,
                            schedule=schedule,
                            recompute=recompute,
                            kinds=kinds,
                        )

    def _orders(self, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
        """Yield schedules with the stages that they have on each rank."""
        # On one rank all schedules are the same order of the same stage.
        schedules = SCHEDULES if ranks > 1 else SCHEDULES[:1]
        for schedule in self._values("schedule", schedules):
            shape, needed = ("any", 1) if schedule == "search" else required_placement(schedule)
            several = STAGES_PER_RANK if shape == "loop" else (1,)
            for each in self._values("stages_per_rank", (needed,) if needed else several):
                placement = place(self.base.placement or _default(shape), ranks, each)
                # A schedule may need more microbatches than there
                # are, or another placement than the one asked for.
                known = (*fitting_names(placement, microbatches), "search")
                # Around a loop of one stage each lies the order of another name.
                is_other_name = shape == "loop" and each == 1 and "schedule" not in self.fixed
                if schedule in known and not is_other_name:
                    yield schedule, each

    def _kinds(self, replicas: int) -> tuple[str, ...]:
        return ("",) if self.unequal is None else tuple(self.unequal.orders(replicas))

    def _policies(self) -> tuple[str, ...]:
        # Without a cap recompute costs time and gives nothing.
        has_cap = self.base.memory_bytes is not None
        return self._values("recompute", POLICIES if has_cap else POLICIES[:1])

    def _values(self, name: str, choices: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in self.fixed:
            return (self.fixed[name],)
        return self.offered.get(name, choices)


def _default(shape: str) -> str:
    return "linear" if shape == "any" else shape


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def effort_of(setting: Setting) -> int:
    """Return how many quick plans of usual orders take as long as one of a setting."""
    return 1 + setting.k * setting.microbatches * 2 // EFFORT_ACTIONS
