"""The options of a plan as a user gave them, and what was left open. Needs no PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from pipecompile.api.choices import open_options, requested_options
from pipecompile.cost_models.device import devices_of
from pipecompile.cost_models.measured_sizes import sizes_to_measure
from pipecompile.ir.plan import Options
from pipecompile.ir.setting import Setting
from pipecompile.planner.setting_space import POLICIES, SCHEDULES, SettingSpace
from pipecompile.schedule.named_orders import ASYNCHRONOUS
from pipecompile.schedule.selection import placements

__all__ = ["PlanRequest", "plan_request"]

OPEN = ("microbatches", "schedule", "recompute", "stages_per_rank")
# Under these no rank holds more microbatches than the fullest one does under 1f1b. Without a cap
# nobody has said that there is room for more. In bytes it may be more: gradients that wait for a
# weight backward are held too.
SPARING = ("1f1b", "zb-h1", "v-min", "v-half", "zb-v")
MOST_ROUNDS = 4  # microbatches for each stage: the bubble is then small (GPipe, section 2.3)


@dataclass(frozen=True)
class PlanRequest:
    """The options of a plan; those that are `left_open` have their plain defaults: k microbatches,
    1f1b, no recompute and one stage on each rank.
    """

    options: Options
    left_open: frozenset[str]

    def for_batch(self, samples: int) -> PlanRequest:
        """Return the request for a minibatch: an open number of microbatches divides it.

        It is k, or the nearest number that can be had.
        """
        if "microbatches" not in self.left_open:
            return self
        # Before the search, and for the plain defaults too: 30 samples cannot be 4 equal
        # microbatches, and an error for a number that nobody gave would be no help.
        number = _nearest_number(samples, self.options.microbatches)
        return PlanRequest(replace(self.options, microbatches=number), self.left_open)

    @property
    def has_choice(self) -> bool:
        """Whether something is open that a joint search chooses: steps of equal ranks that end with
        a flush.
        """
        options = self.options
        is_synchronous = not options.is_inference and options.schedule not in ASYNCHRONOUS
        kind, _, text = options.costs.partition(":")
        is_equal = kind != "roofline" or len(set(devices_of(text))) == 1
        # Without a cap recompute costs time and gives nothing.
        useless = set() if self._is_capped else {"recompute"}
        one_rank_a_stage = options.stage_replicas is None and self._ranks > 1
        return is_synchronous and is_equal and one_rank_a_stage and bool(self.left_open - useless)

    def space(self, samples: int, *, may_change_sizes: bool = True) -> SettingSpace:
        """Return the settings that are tried for replicas of so many samples each; the number of
        microbatches is that of the plain defaults unless their sizes may be others.
        """
        options, ranks = self.options, self._ranks
        # What is fixed has one value each; what is open has a few. With k=4, 32 samples and a cap
        # that is 3 numbers of microbatches × 2 schedules × 2 policies: 12 settings.
        fixed = {name: getattr(options, name) for name in OPEN if name not in self.left_open}
        fixed |= {"replicas": options.replicas, "objective": options.objective}
        if "stages_per_rank" not in self.left_open:
            fixed["stages_per_rank"] = options.k // ranks
        return SettingSpace(
            devices=ranks * options.replicas,
            samples=samples * options.replicas,
            base=replace(options, microbatches=1),
            fixed=fixed,
            offered={
                "microbatches": self._numbers(samples)
                if may_change_sizes
                else (self.options.microbatches,),
                "schedule": self._schedules,
                "recompute": POLICIES if self._is_capped else POLICIES[:1],
            },
        )

    @property
    def setting(self) -> Setting:
        """The setting of the plain defaults."""
        options = self.options
        return Setting(
            ranks=self._ranks,
            stages_per_rank=options.k // self._ranks,
            replicas=options.replicas,
            microbatches=options.microbatches,
            schedule=options.schedule,
            recompute=options.recompute,
        )

    @property
    def _schedules(self) -> tuple[str, ...]:
        """The schedules that are tried: without a cap those that hold hardly more than 1f1b."""
        if self._is_capped:
            return SCHEDULES
        # Who asks for several stages on a rank asks for a shorter bubble. Of 12 stages on 4 ranks
        # the first rank holds 15 forwards under interleaved-1f1b, and 12 under 1f1b.
        has_several = "stages_per_rank" not in self.left_open and self.options.k > self._ranks
        return (*SPARING, "interleaved-1f1b") if has_several else SPARING

    def _numbers(self, samples: int) -> tuple[int, ...]:
        """Return the numbers of microbatches that are tried, three at most: the plain default, the
        largest one up to 4 × k, and one between.
        """
        least = self.options.microbatches
        # Costs in a table are of microbatches of one size.
        most = least if self.options.costs.startswith("table:") else MOST_ROUNDS * self.options.k
        # k=4 and 60 samples: from 4 up to 16 the numbers 4, 5, 6, 10, 12 and 15 divide them, with
        # microbatches of 15, 12, 10, 6, 5 and 4 samples. Of these sizes 15, 6 and 4 are tried (the
        # ends, and the one nearest to the geometric mean), which are 4, 10 and 15 microbatches.
        numbers = range(least, max(least, most) + 1)
        sizes = {samples // number for number in numbers if samples % number == 0}
        return tuple(samples // size for size in sorted(sizes_to_measure(sizes), reverse=True))

    @property
    def _is_capped(self) -> bool:
        return self.options.memory_bytes is not None

    @property
    def _ranks(self) -> int:
        return max(placements(self.options)[0]) + 1


def plan_request(**choices: Any) -> PlanRequest:
    """Return what a user asks for and leaves open; `choices` and errors are those of
    `requested_options`.

    Who gives the number of microbatches plans by hand: then nothing is left open. k is the number
    of stages, one on each rank; how many lie on each is open where only the ranks are given.
    """
    given = open_options(**choices)
    is_open = given["microbatches"] is None
    left_open = {name for name in OPEN if is_open and given[name] is None}
    # Pins and layouts speak of numbered stages.
    counts_stages = given["k"] is not None or given["layout"] is not None or bool(given["pin"])
    if given["ranks"] is None or counts_stages:
        left_open.discard("stages_per_rank")
    return PlanRequest(requested_options(**choices), frozenset(left_open))


def _nearest_number(samples: int, wanted: int) -> int:
    """Return the wanted number if it divides the batch, or else the next larger one up to 4 × as
    many that does, the next smaller one above 1, or the least above 1.
    """
    # wanted = 4:  32 samples → 4,  30 → 5 (the next larger),  34 → 2 (17 is beyond 4 × 4),
    #              37 → 37 (a prime: microbatches of one sample are still a pipeline, 1 is none)
    divisors = [each for each in range(1, samples + 1) if samples % each == 0]
    larger = [each for each in divisors if wanted <= each <= MOST_ROUNDS * wanted]
    smaller = [each for each in divisors if 1 < each < wanted]
    return larger[0] if larger else smaller[-1] if smaller else divisors[:2][-1]
