"""What lives while a stage's backward sums gradients of several readers.

Where a value has several readers, autograd adds up their gradients as they come. For a moment the
summands and the sum live together, and that moment may be the peak of a backward. stage.py asks for
these bytes by node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from operator import add

from pipecompile.ir.graph import GradientStorage, Parameter
from pipecompile.memory_model.gradients import GradientFlow

__all__ = ["GradientSums"]


class GradientSums:
    """The sums in the backward of one stage, whose gradients are those of `flow`."""

    def __init__(self, flow: GradientFlow) -> None:
        self.flow, self.stage = flow, flow.stage

    def summands(self, *, is_input_backward: bool = False) -> dict[int, int]:
        """Return by node the bytes of summands that live beside the new sums when it is done.

        Autograd adds in place where it may: not to what came from a later stage, nor to what an
        input backward holds. Elsewhere both summands and the sum live for a moment:

            a  ├──────────┤
            b       ├─────┤
            a + b         ├──────        there a and b count here, the sum in `GradientFlow`
        """
        sums: dict[int, int] = defaultdict(int)
        held = {id(gradient) for gradient, _ in self.flow.captured} if is_input_backward else set()
        returned = map(id, self.flow.return_storages(is_input_backward=is_input_backward))
        stay = held.union(returned, (id(storage) for _, storage in self.flow.parts))
        # Sums that cannot be in place: both the first summand and the sum live.
        new_sums = [gradient for gradient in self.flow.own if gradient.is_sum]
        for gradient in new_sums:
            if not self._is_in_place(gradient, held):
                sums[self.flow.place[gradient.producer]] += gradient.bytes
        # Sums that begin in memory of their own: the summands that end there are freed only then.
        own_memory = {
            self.flow.place[gradient.producer]: gradient.bytes
            for gradient in new_sums
            if gradient.continues is None
        }
        freed_here = self.flow.own_ids - stay
        for place, size in own_memory.items():
            for summand in self.stage.ranges.summands.get(place, ()):
                # It is larger than the sum if only a part of it is added.
                if id(summand) in freed_here and summand.bytes >= size:
                    sums[place] += summand.bytes
        pairs = self.stage.trained_parameters
        if is_input_backward:
            pairs = self.flow.input_backward_parameters
        # Gradients of parameters whose first gradient is a view.
        for place, size in self._view_summands(pairs):
            sums[place] += size
        return sums

    def weight_backward_summands(self) -> dict[int, int]:
        """Return the same for W, which makes only gradients of parameters."""
        sums = defaultdict[int, int](int)
        made_before = {parameter.name for parameter, _ in self.flow.input_backward_parameters}
        pairs = (pair for pair in self.stage.trained_parameters if pair[0].name not in made_before)
        for place, size in self._view_summands(pairs):
            sums[place] += size
        return sums

    def summands_and_parts(
        self, *, is_input_backward: bool = False, freed_bytes: int = 0
    ) -> dict[int, int]:
        """Return `summands`, and at the end what lives while parts of gradients are returned.

        An input backward copies the parts one after the other, and frees each larger storage with
        its last part; `freed_bytes` of saved tensors are gone by then. With parts of 10 and 20
        bytes of one storage of 30:

            copies made      10     30
            storage           30     30            most above the copies: 30 + 30 − 30 = 30
        """
        sums, parts = self.summands(is_input_backward=is_input_backward), self.flow.parts
        if not parts:
            return sums
        end, held = self.flow.nodes[0], set[int]()
        if is_input_backward:
            held = {id(gradient) for gradient, _ in self.flow.held_between}
        returned = map(id, self.flow.return_storages(is_input_backward=is_input_backward))
        freed_here = self.flow.own_ids - held.union(returned)
        remaining = []  # bytes of larger storages that live while part i is copied
        for index in range(len(parts)):
            storages = {id(storage): storage.bytes for _, storage in parts[index:]}
            remaining.append(sum(size for key, size in storages.items() if key in freed_here))
        sizes = (tensor.gradient_bytes if is_input_backward else 0 for tensor, _ in parts)
        copied = list(accumulate(sizes))
        # What lives before the first copy, and the most while copies are made.
        before = sums.get(end, 0) + remaining[0]
        meanwhile = max(map(add, remaining, copied)) - freed_bytes
        sums[end] = max(0, max(before, meanwhile) - copied[-1])
        return sums

    def _is_in_place(self, gradient: GradientStorage, held: Collection[int]) -> bool:
        """Return whether a sum lies in the memory of its first summand, which none of `held`
        may.
        """
        if gradient.continues is None:
            return False
        summand = self.stage.graph.gradients[gradient.continues]
        is_received = self.stage.is_later(self.flow.place[summand.producer])
        return not is_received and id(summand) not in held

    def _view_summands(
        self, pairs: Iterable[tuple[Parameter, list[int]]]
    ) -> Iterator[tuple[int, int]]:
        """Yield where a gradient of a parameter is added to a view, and the bytes of both summands.

        Nothing is added to a view in place, so the sum is new.
        """
        for parameter, places in pairs:
            last_reader = self.stage.graph.nodes[places[-1]]
            if len(places) > 1 and parameter.name in last_reader.view_gradients:
                yield places[-2], 2 * parameter.bytes
