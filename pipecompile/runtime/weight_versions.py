"""The weights of a stage in every version that microbatches in flight still read.

Version 0 are the weights that training begins with, and each step of the optimizer makes the next
one. The parameters are always the newest. Before a step they move to new memory if microbatches
still read what they have, so that nothing is copied that nobody reads:

    version 1    old memory ◀── forwards and backwards of microbatches in flight
                     │ clone
    version 2    new memory ◀── parameter.data, which the optimizer steps in place

A microbatch runs on leaves of its own that lie in the memory of its version. What autograd has
saved is therefore never written to, and gradients of microbatches do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn

__all__ = ["WeightVersions"]


class WeightVersions:
    """The versions of `parameters`; `version_of(microbatch)` is the one that a microbatch reads.

    `version_of` never falls.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], version_of: Callable[[int], int], newest: int = 0
    ) -> None:
        self.parameters = tuple(parameters)
        self.newest = newest
        self._version_of = version_of
        self._values = {newest: self._current()}

    @property
    def live(self) -> Mapping[int, tuple[Tensor, ...]]:
        """The values of the parameters by version; those of the newest are the parameters' own."""
        return self._values

    def leaves(self, microbatch: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield each parameter with a leaf of autograd of the value that a microbatch reads."""
        values = self._values[self._version_of(microbatch)]
        for parameter, value in zip(self.parameters, values, strict=True):
            yield parameter, value.detach().requires_grad_()

    def step(self, step: Callable[[], object], unfinished: int) -> None:
        """Let `step` make the next version of the parameters, in place.

        Versions that no microbatch from `unfinished` on reads are dropped before, so that there are
        never more than the rule needs.
        """
        # PipeDream on two ranks. On rank 0 microbatch j reads version max(0, j − 1): at STEP0@1
        # microbatch 1, still in flight, reads version 0, which is kept. On rank 1 it reads
        # version j, so nobody needs version 0 any more, and the optimizer steps in the memory
        # that there is.
        oldest = self._version_of(unfinished)
        self._values = {version: v for version, v in self._values.items() if version >= oldest}
        if self.newest in self._values:
            for parameter in self.parameters:
                # The parameters move and the old memory stays. To copy the old values elsewhere
                # and step in place would be wrong without an error: autograd has saved this
                # memory, and does not see what is written through `.data`.
                parameter.data = parameter.data.clone()
        step()
        self.newest += 1
        self._values[self.newest] = self._current()

    def restore(self, older: Mapping[int, tuple[Tensor, ...]], newest: int) -> None:
        """Let the parameters be version `newest`, with `older` ones before it."""
        self.newest = newest
        self._values = {**older, newest: self._current()}

    def forget_older(self) -> None:
        """Keep the newest version only: no microbatch is in flight, and none will follow."""
        self._values = {self.newest: self._current()}

    def _current(self) -> tuple[Tensor, ...]:
        return tuple(parameter.data for parameter in self.parameters)
