"""Which nodes the two halves of a stage's split backward run: input backward and weight backward.

It mirrors runtime/split_backward.py, by places of nodes. The input backward (I) follows gradients
from the outputs to the inputs. Parameters hang off that way, at once or behind nodes of their own:

    input ──▶ linear ──▶ relu ──▶ linear_1 ──▶ output      on the way: linear, relu, linear_1
                ▲                     ▲
              weight        scale ──▶ weight_norm          aside: weight_norm, which leads to
                                                           parameters only

I holds ("captures") the gradients at linear and linear_1. The weight backward (W) begins with
these: it runs the parameter part of both linears, and all nodes aside. A parameter that hangs off
several places of the way has its gradient made by I already, since W would otherwise have to pass
from one such place through another.

The memory model's stage.py and gradients.py ask which half runs what.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Literal

from pipecompile.ir.graph import GradientStorage
from pipecompile.memory_model.live_ranges import LiveRanges

__all__ = ["SplitBackward"]

Origin = int | Literal["outputs", "input backward"]
"""Where W begins for a parameter: at a place, at the outputs; or not at all, as I makes it."""


@dataclass(frozen=True)
class SplitBackward:
    """The split of one stage, of the places `nodes`; those `before` it are in earlier stages.

    `parameter_readers` are the readers of each parameter that gets a gradient. Later stages give
    gradients for the values of the nodes at `sent`.
    """

    ranges: LiveRanges
    before: frozenset[int]
    nodes: tuple[int, ...]
    parameter_readers: Mapping[str, Collection[int]]
    sent: frozenset[int]

    def capture_places(self, gradient: GradientStorage) -> set[int]:
        """Return the places at which W begins with this gradient."""
        return self._captures.intersection(self.ranges.place[name] for name in gradient.captured_at)

    def last_run_from(self, place: int) -> int:
        """Return the last node that W runs of what it begins at `place`."""
        # A walk from the place over nodes aside. Backwards run from the last node to the first, so
        # the smallest place is the one that runs last.
        reached = waiting = {place}
        while waiting:
            receivers = chain.from_iterable(self.ranges.gradient_receivers[p] for p in waiting)
            waiting = (set(receivers) & self._aside_in_weight_backward) - reached
            reached = reached | waiting
        return min(reached)

    def is_for_parameters_only(self, gradient: GradientStorage) -> bool:
        """Return whether it is made in W alone, since it leads to parameters only."""
        last = self.ranges.place[gradient.last]
        return last in self._aside_in_weight_backward and not self.capture_places(gradient)

    @cached_property
    def input_backward_parameters(self) -> frozenset[str]:
        """The parameters whose gradients I makes; W only adds them to what is there."""
        origins = self._origins.items()
        return frozenset(name for name, origin in origins if origin == "input backward")

    @cached_property
    def weight_backward_places(self) -> set[int]:
        """The nodes of which W runs something."""
        return {*self._captures, *self._aside_in_weight_backward}

    @cached_property
    def weight_backward_reach(self) -> set[int]:
        """The nodes whose saved tensors live until W: where it begins, and all before these.

        PyTorch's graph of autograd nodes hangs together: whoever holds a node holds all nodes that
        it leads to. These are all nodes of the stage if W begins at the outputs.
        """
        if self.begins_at_outputs:
            return set(self.nodes)
        reached = set(self._captures)
        waiting = list(reached)
        while waiting:
            receivers = self.ranges.gradient_receivers[waiting.pop()]
            before = self._inside.intersection(receivers) - reached
            reached |= before
            waiting += before
        return reached

    @property
    def begins_at_outputs(self) -> bool:
        """Whether W begins at the outputs for any parameter."""
        return "outputs" in self._origins.values()

    @cached_property
    def _inside(self) -> frozenset[int]:
        return frozenset(self.nodes)

    @cached_property
    def _on_the_way(self) -> set[int]:
        """The nodes whose gradients lead to inputs of the stage."""
        # In the graph's order receivers come first: a node is on the way if one of them is.
        on_the_way: set[int] = set()
        for place in self.nodes:
            receivers = self.ranges.gradient_receivers[place]
            if any(receiver in self.before or receiver in on_the_way for receiver in receivers):
                on_the_way.add(place)
        return on_the_way

    @cached_property
    def _aside(self) -> set[int]:
        """The nodes whose gradients lead to parameters only."""
        return self._leading_to(set(chain.from_iterable(self.parameter_readers.values())))

    def _leading_to(self, readers: Collection[int]) -> set[int]:
        """Return the nodes whose gradients lead to some of `readers`, and to no inputs."""
        leading: set[int] = set()
        for place in self.nodes:
            receivers = self.ranges.gradient_receivers[place]
            leads = place in readers or not leading.isdisjoint(receivers)
            if leads and place not in self._on_the_way:
                leading.add(place)
        return leading

    @cached_property
    def _attachments(self) -> dict[int, Origin]:
        """Where W's walk to each node aside begins: the node on the way that it hangs off."""
        # In the drawing above weight_norm is read by linear_1 alone, so {weight_norm: linear_1}. If
        # both linears read it, it would have two origins: I then runs it, as `_only` says.
        origins: dict[int, set[Origin]] = {
            place: {"outputs"} if place in self.sent else set() for place in self._aside
        }
        attachments: dict[int, Origin] = {}
        # From the outputs on, so that the readers of a node come before it.
        for place in reversed(self.nodes):
            if place in self._aside:
                attachments[place] = _only(origins[place] or {"outputs"})
            for receiver in self._aside.intersection(self.ranges.gradient_receivers[place]):
                origins[receiver].add(attachments.get(place, place))
        return attachments

    @cached_property
    def _origins(self) -> dict[str, Origin]:
        """Where W's walk to each parameter begins."""
        # In the drawing: weight begins at linear, and scale at linear_1, through weight_norm. A
        # weight that both linears read begins at two places, so I makes its gradient.
        return {
            name: _only({self._origin(name, place) for place in places})
            for name, places in self.parameter_readers.items()
        }

    def _origin(self, name: str, place: int) -> Origin:
        """Return where the walk to the parameter `name`, read at `place`, begins."""
        node = self.ranges.graph.nodes[place]
        # Several autograd nodes of this one node lead to the parameter.
        if name in node.gradients_by_input_backward and place in self._on_the_way:
            return "input backward"
        return self._attachments.get(place, place)

    @cached_property
    def _captures(self) -> set[int]:
        """Where W begins: for parameters that the node reads, or for nodes aside that it reads."""
        for_parameters = {
            place
            for name, places in self.parameter_readers.items()
            for place in places
            if self._origins[name] == place
        }
        return for_parameters | self._captures_for_aside

    @cached_property
    def _captures_for_aside(self) -> set[int]:
        # A node aside that hangs off this place alone is reached from here.
        captures: set[int] = set()
        for place in self._on_the_way:
            receivers = self.ranges.gradient_receivers[place]
            aside = self._aside_in_weight_backward.intersection(receivers)
            if any(self._attachments[receiver] == place for receiver in aside):
                captures.add(place)
        return captures

    @cached_property
    def _aside_in_weight_backward(self) -> set[int]:
        """The nodes aside that W runs; I runs those that lead to its own parameters only."""
        return self._leading_to(
            {
                place
                for name, places in self.parameter_readers.items()
                for place in places
                if name not in self.input_backward_parameters
            }
        )


def _only(origins: Iterable[Origin]) -> Origin:
    """Return the one origin that there is; with several, I makes the gradient."""
    distinct = set(origins)
    return distinct.pop() if len(distinct) == 1 else "input backward"
