"""The costs of settings: a cost graph for each size of microbatch, and what follows from it."""

from __future__ import annotations

from msgspec.structs import replace

from pipecompile.errors import InfeasibleError
from pipecompile.ir.amount import AllocatorName
from pipecompile.ir.graph import CostGraph
from pipecompile.ir.links import Links
from pipecompile.ir.plan import Options
from pipecompile.ir.setting import Setting, SettingStatus
from pipecompile.ir.size import size_text
from pipecompile.memory_model.empty_ranks import empty_rank_bytes, room_of_ranks
from pipecompile.planner.draft import check_stages
from pipecompile.planner.likely_step import LikelyStep, likely_step
from pipecompile.planner.setting_bounds import Work, state_bytes
from pipecompile.planner.setting_space import SettingSpace
from pipecompile.planner.target_costs import Source, TargetCosts
from pipecompile.schedule.named_orders import SPLIT
from pipecompile.schedule.selection import placements

__all__ = ["SettingCosts"]

_Size = tuple[str, int]
"""What a cost graph is of: the kinds of ranks, and in how many parts the minibatch is cut."""


class SettingCosts:
    """The costs of the settings in `space`, as far as they are known; `links` are those of its
    devices.
    """

    def __init__(self, space: SettingSpace, costs: TargetCosts, links: Links) -> None:
        self._space = space
        self._costs = costs
        self._links = links
        self._graphs: dict[_Size, CostGraph] = {}
        self._works: dict[_Size, Work] = {}
        self._states: dict[int, int] = {}
        self._too_many: dict[int, str | None] = {}

    def has(self, setting: Setting) -> bool:
        """Return whether the size of a setting's microbatches is costed."""
        return _size(setting) in self._works

    def graph(self, setting: Setting) -> CostGraph:
        """Return the cost graph of a microbatch of a setting whose size is costed."""
        return self._graphs[_size(setting)]

    def add(self, setting: Setting) -> None:
        """Make the cost graph of a microbatch of a setting, unless its size is costed."""
        if self.has(setting):
            return
        options = replace(self._space.options(setting), microbatches=setting.parts)
        graph = self._costs.graph(options)
        self._graphs[_size(setting)], self._works[_size(setting)] = graph, Work.of(graph)

    def source(self, setting: Setting, options: Options) -> Source:
        """Return what the cost graph of a setting is of, for a plan with these `options`."""
        return self._costs.source(replace(options, microbatches=setting.parts))

    def work(self, setting: Setting) -> Work:
        """Return the work of a setting; of a size that is not costed, the least that it can be."""
        known = self._works.get(_size(setting))
        if known is not None:
            return known
        # The nearest larger microbatch. Its parts may be fewer than a whole number of this one's:
        # rounded up, they are no larger than this one.
        # Of 6 parts with a size of 4 costed: a half of a fourth, which is less than a sixth.
        kinds, parts = _size(setting)
        larger = max(size for size in self._works if size <= (kinds, parts))
        return self._works[larger].of_part(-(-parts // larger[1]))

    def state_bytes(self, setting: Setting) -> int:
        """Return what a replica's parameters and states take at least; counted once."""
        if setting.replicas not in self._states:
            # Parameters are the same whatever the size of a microbatch.
            any_graph = next(iter(self._graphs.values()))
            options = self._space.options(setting)
            self._states[setting.replicas] = state_bytes(any_graph, options)
        return self._states[setting.replicas]

    def room(self, setting: Setting) -> tuple[int, ...] | None:
        """Return what the storages of each rank of a setting may take; None without a cap."""
        options = self._space.options(setting)
        caps = options.caps(setting.ranks)
        return caps and room_of_ranks(caps, placements(options)[0], self._allocator)

    def refusal(self, setting: Setting) -> tuple[SettingStatus, str] | None:
        """Return why a setting cannot be, as far as that is known without planning it."""
        room, needed = self.room(setting), self.state_bytes(setting)
        if room is not None and (min(room) < 0 or needed > sum(room)):
            return "memory", (
                f"parameters, gradients and optimizer states take {size_text(needed)}, and "
                f"{setting.ranks} ranks have {size_text(max(0, sum(room)))} besides up to "
                f"{size_text(max(self._empty_bytes(setting)))} a rank that allocator and "
                "communication library take for any model"
            )
        if setting.schedule in SPLIT and self.work(setting).input_ns is None:
            return "refused", "the costs do not say how long each half of a backward takes"
        return None

    def too_many_stages(self, setting: Setting) -> str | None:
        """Return why the graph of a setting whose size is costed cannot be cut into its stages,
        whatever they may hold; None if it can. It is found out once for each number of stages.
        """
        if setting.k not in self._too_many:
            # Nodes are the same whatever the size of a microbatch.
            try:
                check_stages(self.graph(setting), self._space.options(setting), self.links(setting))
                self._too_many[setting.k] = None
            except InfeasibleError as error:
                self._too_many[setting.k] = error.reason
        return self._too_many[setting.k]

    def links(self, setting: Setting) -> Links:
        """Return the links among the ranks of a setting."""
        return self._space.links(self._links, setting)

    def likely(self, setting: Setting) -> LikelyStep:
        """Return how long a step of a setting likely is, and how full its ranks."""
        options, state = self._space.options(setting), self.state_bytes(setting)
        fixed = sum(self._empty_bytes(setting)) // setting.ranks
        return likely_step(self.work(setting), options, state, fixed, self.links(setting))

    def _empty_bytes(self, setting: Setting) -> tuple[int, ...]:
        """Return what each rank of a setting takes before it holds anything."""
        placement = placements(self._space.options(setting))[0]
        return empty_rank_bytes(placement, setting.ranks, self._allocator)

    @property
    def _allocator(self) -> AllocatorName:
        return next(iter(self._graphs.values())).allocator


def _size(setting: Setting) -> _Size:
    return setting.kinds, setting.parts
