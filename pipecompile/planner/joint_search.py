"""The best plan for given devices: settings and cuts searched together. Needs no PyTorch.

    settings ──▶ refused by memory (state_bytes)
        │
        │  first what is likely to fit, and of that the shortest on equal stages (likely_step)
        ▼
    costed once per size of microbatch, bounded again ──▶ ruled out (least_step_ns, extra_ns)
        │
        ▼
    cut and scheduled by a quick search, unless it is not likely to be shorter
        │
        ▼
    those close to the best, again by a thorough search ──▶ the plan, a lower bound, all results

Sizes of microbatches are captured and costed when they are first wanted. Until then the bound of a
smaller one comes from the largest (`Work.of_part`). By `effort`, the number of plans, the answer
is the same on every machine; a time limit may end it before.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from msgspec.structs import replace

from pipecompile.errors import InfeasibleError, InputError
from pipecompile.ir.duration import time_with_unit
from pipecompile.ir.links import Links
from pipecompile.ir.options import DEFAULT_EFFORT, DEFAULT_TOP
from pipecompile.ir.plan import Options, Plan
from pipecompile.ir.setting import Setting, SettingResult, SettingStatus
from pipecompile.partition.budget import ONE_OF_SEVERAL, QUICK, CutEffort
from pipecompile.planner.draft import draft, node_times
from pipecompile.planner.finished_plans import FinishedPlan, answer_of
from pipecompile.planner.least_memory import LeastMemory, larger_caps, least_memory
from pipecompile.planner.likely_order import LikelyOrder
from pipecompile.planner.search_objectives import last_objectives, quick_objective
from pipecompile.planner.setting_bounds import extra_ns, least_step_ns
from pipecompile.planner.setting_costs import SettingCosts
from pipecompile.planner.setting_results import in_order, joint_search_of, planned, why_none
from pipecompile.planner.setting_space import SettingSpace, effort_of
from pipecompile.planner.target_costs import TargetCosts
from pipecompile.planner.what_would_fit import has_fitting_cut
from pipecompile.profiling.progress import progress

__all__ = ["JointLimits", "joint_plan"]

logger = logging.getLogger("pipecompile.planner")

RESCUES = 8  # settings that are tried beyond the effort while nothing fits
RESCUES_EACH = 2  # of them with each number of replicas
LONGER_SEARCHES = 2  # for settings without a cut, if no setting has a plan
EXPLAINED = QUICK._replace(is_explained=True, is_advised=False)
FINAL_SHARE = 1.02  # of the best step: up to this a setting is planned again thoroughly


@dataclass(frozen=True)
class JointLimits:
    """How much is searched: at most `effort` quick plans, of which one with very many actions
    counts as several, and none begun after `seconds`. The plan lists the `top` best settings, and
    those that hold less than any shorter one. The answer is at most as long as the thorough plan
    of `reference`; under noise it may be 2 % longer.
    """

    effort: int = DEFAULT_EFFORT
    seconds: float = inf
    top: int = DEFAULT_TOP
    reference: Setting | None = None


def joint_plan(
    space: SettingSpace,
    costs: TargetCosts,
    links: Links,
    devices: str,
    limits: JointLimits = JointLimits(),
) -> Plan:
    """Return the plan with the shortest step that is found in `space`, with a bound on all of it.

    `costs` are those of the whole minibatch: its microbatches are those of all replicas. `devices`
    names them for people. InfeasibleError if no setting has a plan; it says what was in the way.
    """
    # Without devices nobody asked for a search, and what it tries is no news to the user.
    level = logging.INFO if devices else logging.DEBUG
    known = SettingCosts(space, costs, links)
    search = _SettingSearch(space, known, limits, level, began=time.monotonic())
    search.run()
    return search.answer(devices)


@dataclass
class _SettingSearch:
    """A search under way: what is known of each setting, and the plans so far.

    `finished` are the plans that a thorough search made: planning again gives the same ones.
    `spent` is how much of the effort was spent, and `is_rescued` whether what holds the least was
    tried since nothing fitted.
    """

    space: SettingSpace
    costs: SettingCosts
    limits: JointLimits
    log_level: int
    began: float
    results: dict[Setting, SettingResult] = field(default_factory=dict)
    plans: dict[Setting, Plan] = field(default_factory=dict)
    finished: list[FinishedPlan] = field(default_factory=list)
    spent: int = 0
    is_rescued: bool = False

    @cached_property
    def order(self) -> LikelyOrder:
        """What is likely of settings, by the plans so far."""
        return LikelyOrder(self.costs, self.plans.keys())

    def run(self) -> None:
        """Plan settings until the effort or the time is spent, or none is likely to be shorter."""
        settings = self.space.settings()
        for kinds in dict.fromkeys(setting.kinds for setting in settings):
            alike = [setting for setting in settings if setting.kinds == kinds]
            self.costs.add(min(alike, key=lambda each: each.parts))
        fitting = [setting for setting in settings if not self._is_refused(setting)]
        logger.log(
            self.log_level,
            "%s settings, of which %s fit by their parameters and optimizer states",
            *(len(settings), len(fitting)),
        )
        if len(fitting) > 1:
            with progress("settings planned", self.limits.effort) as advance:
                for setting in self._likeliest(fitting):
                    self.spent += effort_of(setting)
                    self._plan(setting, QUICK)
                    advance()
            if not self.plans and not self.is_rescued:
                self._plan_emptiest(fitting)
        self._finish(fitting)
        self._judge_rest(fitting)

    # -- what cannot be

    def _is_refused(self, setting: Setting) -> bool:
        """Return whether a setting cannot be, by what is known without planning it."""
        refusal = self.costs.refusal(setting)
        if refusal is not None:
            status, reason = refusal
            self._note(setting, status, 0, reason)
        return refusal is not None

    # -- what to plan

    def _likeliest(self, settings: Sequence[Setting]) -> Iterator[Setting]:
        """Yield what to plan: first what is likely to fit, then what may, and of these first stages
        alone on their ranks, whose cuts are found sooner, then the shortest likely step.

        What is not likely to fit is tried only if nothing else does.
        """
        queue = [(self.order.key(setting), index) for index, setting in enumerate(settings)]
        heapify(queue)
        while queue:
            key, index = heappop(queue)
            setting = settings[index]
            if key.doubt == 2 and not self._go_on_with_doubtful(settings):
                return
            # By what a step takes without messages: the cut may send less than was guessed.
            if key.free_ns >= self._best_ns:
                continue
            # The first one is tried however long its size takes to be costed.
            if not (self.costs.has(setting) or self._has_time or not self.spent):
                return
            self.costs.add(setting)
            if self.order.key(setting) != key:
                # Its size was costed since, or one like it was planned or did not fit.
                heappush(queue, (self.order.key(setting), index))
            elif not self.order.needs_no_recompute(setting) and not self._rule_out(setting):
                if not self._may_plan:
                    return
                yield setting
                if self._status(setting) == "no cut":
                    self.order.note_failed(setting)

    def _go_on_with_doubtful(self, settings: Sequence[Setting]) -> bool:
        """Return whether to plan what is not likely to fit: if nothing else has a plan, and what
        is likely to hold the least of all does fit.
        """
        if not self.is_rescued and not self.plans:
            self._plan_emptiest(settings)
            return bool(self.plans)
        return self.is_rescued

    def _plan_emptiest(self, settings: Sequence[Setting]) -> None:
        """Plan what is likely to hold the least until something fits: what was tried did not.

        With each number of replicas in turn, since few replicas may lack nodes for their ranks,
        and many the memory for their states.
        """
        self.is_rescued = True
        tries, most = 0, RESCUES_EACH * len({each.replicas for each in settings})
        for setting in self._emptiest(settings):
            if self.plans or tries == min(RESCUES, most) or not self._has_time:
                return
            self.costs.add(setting)
            if not self._rule_out(setting):
                self._plan(setting, QUICK)
                tries += 1

    def _emptiest(self, settings: Sequence[Setting]) -> list[Setting]:
        """Return what was not tried: of each number of replicas what holds the least, then what
        holds the next least. Stages alone on their ranks come first: their cuts are found sooner.
        """
        places: dict[int, Iterator[int]] = defaultdict(count)
        untried = [each for each in settings if self._status(each) in (None, "not tried")]
        untried.sort(key=self.order.emptiness)
        ranked = [(next(places[each.replicas]), each.replicas, each) for each in untried]
        return [setting for *_, setting in sorted(ranked, key=lambda entry: entry[:2])]

    def _rule_out(self, setting: Setting) -> bool:
        """Return whether a setting whose size is costed cannot have a plan, or no shorter one."""
        options = self.space.options(setting)
        too_many = self.costs.too_many_stages(setting)
        if too_many is not None:
            self._note(setting, "refused", 0, too_many)
            return True
        extra = extra_ns(self.costs.graph(setting), options)
        if extra is None:
            text = "what its stages must keep is more than their ranks may hold"
            self._note(setting, "memory", 0, text)
            return True
        bound = least_step_ns(self.costs.work(setting), setting, extra)
        self._note(setting, "bound" if bound >= self._best_ns else "not tried", bound)
        return bound >= self._best_ns

    # -- plans

    def _finish(self, settings: Sequence[Setting]) -> None:
        """Plan the best settings again by a thorough search, by which `check` makes a plan too.

        These are all whose step is close to the best: so the plan for options that are left open
        has no longer step than for given ones, unless a thorough search gains more on a quick one.
        Without any plan yet the first settings for which no cut was found get a longer search.
        """
        if len(settings) == 1 and not self._rule_out(settings[0]):
            self._plan_thoroughly(settings[0])
        elif not self.plans:
            self._search_longer(settings)
        for setting in self._finalists():
            if not self._is_finished(setting) and (self._has_time or not self.finished):
                self._plan_thoroughly(setting)
        self._compare_with_reference(settings)
        if self.finished and self._has_time and "objective" not in self.space.fixed:
            best = min(self.finished, key=lambda each: each.plan.prediction.step_ns).setting
            # The answer for one setting must be as good as a plan with its options. With very many
            # actions one more plan takes longer than all quick ones together.
            given = self.space.base.objective
            if (len(settings) == 1 or effort_of(best) == 1) and not self._is_finished(best, given):
                self._plan(best, ONE_OF_SEVERAL, given)

    def _plan_thoroughly(self, setting: Setting) -> None:
        """Plan a setting by a thorough search, whose answer `check` can make again."""
        for objective in last_objectives(self.space, setting):
            if not self._is_finished(setting):
                self._plan(setting, ONE_OF_SEVERAL, objective)

    def _search_longer(self, settings: Sequence[Setting]) -> None:
        """Plan by a longer search what is likely to hold the least of all for which no cut was
        found, where a cap that is a little larger would do; else say what is in its way.
        """
        failed = [each for each in settings if self._status(each) == "no cut"]
        failed.sort(key=self.order.emptiness)
        cap, least = self.space.base.memory_bytes, self._least_memory
        is_near = least is None or not isinstance(cap, int) or least.bytes <= next(larger_caps(cap))
        for setting in failed[: LONGER_SEARCHES if is_near else 1]:
            if self._has_time and is_near:
                self._plan_thoroughly(setting)
            elif self._has_time:
                self._plan(setting, EXPLAINED, self.space.base.objective)

    def _finalists(self) -> Iterator[Setting]:
        """Yield the settings whose plans are close to the best finished one, the shortest first."""
        steps = {each: plan.prediction.step_ns for each, plan in self.plans.items()}
        for setting in sorted(steps, key=steps.__getitem__):
            # A thorough search may end with a longer step than a quick one by chance: then more
            # settings are close.
            if self._is_close(steps[setting]):
                yield setting

    def _is_finished(self, setting: Setting, objective: str = "") -> bool:
        return any(
            each.setting == setting and objective in ("", each.plan.options.objective)
            for each in self.finished
        )

    def _is_close(self, step_ns: int) -> bool:
        finished = (each.plan.prediction.step_ns for each in self.finished)
        return step_ns <= FINAL_SHARE * min(finished, default=inf)

    def _compare_with_reference(self, settings: Sequence[Setting]) -> None:
        """Plan the reference thoroughly too, unless its bound rules it out."""
        reference = self.limits.reference
        if reference is None or reference not in settings or self._is_finished(reference):
            return
        self.costs.add(reference)
        if not self._rule_out(reference):
            self._plan_thoroughly(reference)

    def _plan(self, setting: Setting, effort: CutEffort, objective: str = "") -> None:
        """Plan a setting, and keep the plan if it is the best one of the setting."""
        objective = objective or quick_objective(self.space, setting)
        options = replace(self.space.options(setting), objective=objective)
        if effort == QUICK:
            # What is compared later need not be robust yet, which takes longer.
            options = replace(options, noise=None)
        bound = self.results[setting].bound_ns
        try:
            plan = self._drafted(setting, options, effort)
        except (InfeasibleError, InputError) as error:
            if setting not in self.plans:
                status: SettingStatus = "refused" if isinstance(error, InputError) else "no cut"
                is_reason = status == "refused" or effort.is_explained
                reason = error.reason if isinstance(error, InfeasibleError) else str(error)
                self._note(setting, status, bound, reason if is_reason else "")
            return
        before, step_ns = self._best_ns, plan.prediction.step_ns
        if setting not in self.plans or step_ns < self.plans[setting].prediction.step_ns:
            self.plans[setting] = plan
        if effort == ONE_OF_SEVERAL:
            times = node_times(self.costs.graph(setting))
            self.finished.append(FinishedPlan(setting, plan, times))
        self.results[setting] = planned(setting, bound, self.plans[setting])
        if step_ns < before:
            step = time_with_unit(plan.prediction.step_ns, plan.time_unit)
            logger.log(self.log_level, "best so far: %s, %s", step, setting)

    def _drafted(self, setting: Setting, options: Options, effort: CutEffort) -> Plan:
        return draft(
            self.costs.graph(setting),
            options,
            **self.costs.source(setting, options)._asdict(),
            links=self.costs.links(setting),
            effort=effort,
        )

    # -- the answer

    def answer(self, devices: str) -> Plan:
        """Return the best plan, with what the search found; InfeasibleError if there is none. It
        says with how much memory there is one, if no cut was found that fits.
        """
        if not self.finished:
            reason = why_none(devices, in_order(self.results.values()))
            raise InfeasibleError(reason, str(self._least_memory or ""))
        answer = answer_of(self.finished, self.space.base.noise)
        chosen, plan, _ = answer
        # A thorough search may end with a longer step than a quick one by chance.
        self.results[chosen] = planned(chosen, self.results[chosen].bound_ns, plan)
        results = in_order(self.results.values())
        return replace(plan, joint=joint_search_of(results, answer, devices, self.limits.top))

    @cached_property
    def _least_memory(self) -> LeastMemory | None:
        """With how much memory there is a plan, of what is likely to hold the least; None where
        sums say already that nothing fits, caps are not all the same, or time is up.
        """
        cap = self.space.base.memory_bytes
        possible = [
            each
            for each in self.results
            if self.costs.has(each) and self.costs.refusal(each) is None
        ]
        if not possible or not isinstance(cap, int) or self.space.unequal or not self._has_time:
            return None

        def options(setting: Setting, larger: int) -> Options:
            return replace(self.space.options(setting), memory_bytes=larger, noise=None)

        def planned(setting: Setting, larger: int) -> Plan:
            return self._drafted(setting, options(setting, larger), QUICK)

        def fits(setting: Setting, larger: int) -> bool:
            graph, links = self.costs.graph(setting), self.costs.links(setting)
            return has_fitting_cut(graph, options(setting, larger), links)

        emptiest = min(possible, key=self.order.emptiness)
        auto = (each for each in possible if each == replace(emptiest, recompute="auto"))
        return least_memory(list(dict.fromkeys((emptiest, *auto))), cap, planned, fits)

    def _judge_rest(self, settings: Iterable[Setting]) -> None:
        """Note of each setting without a plan whether its bound or a guess rules it out."""
        for setting in settings:
            if self._status(setting) not in (None, "not tried"):
                continue
            known = self.results.get(setting)
            bound = known.bound_ns if known else least_step_ns(self.costs.work(setting), setting)
            status: SettingStatus = "bound" if bound >= self._best_ns else "not tried"
            if status == "not tried" and self._is_unlikely(setting):
                status = "unlikely"
            self._note(setting, status, bound)

    def _is_unlikely(self, setting: Setting) -> bool:
        """Return whether more effort would not be spent on a setting either."""
        key = self.order.key(setting)
        is_longer = key.free_ns >= self._best_ns
        return key.doubt == 2 or is_longer or self.order.needs_no_recompute(setting)

    @property
    def _best_ns(self) -> float:
        return min((plan.prediction.step_ns for plan in self.plans.values()), default=inf)

    @property
    def _may_plan(self) -> bool:
        """Whether one more quick plan may be made; the first one always may."""
        return self.spent < self.limits.effort and (self._has_time or not self.spent)

    @property
    def _has_time(self) -> bool:
        return time.monotonic() - self.began < self.limits.seconds

    def _status(self, setting: Setting) -> SettingStatus | None:
        known = self.results.get(setting)
        return None if known is None else known.status

    def _note(self, setting: Setting, status: SettingStatus, bound: int, reason: str = "") -> None:
        self.results[setting] = SettingResult(
            setting=setting, status=status, bound_ns=bound, reason=reason
        )
