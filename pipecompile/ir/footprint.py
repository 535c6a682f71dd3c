"""What one stage holds, as a value. memory_model/stage.py computes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from pipecompile.ir.amount import ZERO, Amount
from pipecompile.ir.serialization import Value

__all__ = [
    "AMOUNT_FIELDS",
    "EMPTY_FOOTPRINT",
    "SINGLE",
    "Footprint",
    "MessageStorage",
    "ReceivedTensor",
    "SharedParameter",
    "WeightCopies",
    "total_size",
]


class WeightCopies(NamedTuple):
    """How many copies of its trained parameters a stage holds at most, the newest included: of its
    own, and of those that an earlier stage reads too, whose versions are that stage's.
    """

    own: int = 1
    of_earlier_stages: int = 1


SINGLE = WeightCopies()


class SharedParameter(Value, frozen=True, kw_only=True):
    """A stage's part of a parameter that other stages read too: a rank has it only once."""

    name: str
    parameters: Amount
    gradients: Amount
    optimizer: Amount


class MessageStorage(Value, frozen=True, kw_only=True):
    """A storage that a stage makes for a neighbour: the tensors `names` lie in it.

    `is_needed_by_weight_backward` tells whether the stage's own weight backward needs it.
    """

    names: tuple[str, ...]
    size: Amount
    is_needed_by_weight_backward: bool


class ReceivedTensor(Value, frozen=True, kw_only=True):
    """A value of one microbatch that a stage gets from the stage before, or a gradient from behind.

    `name` is the tensor's producer. `is_needed_by_weight_backward` tells whether the stage's weight
    backward needs it. `relayed_as` are the names under which it is sent on: its own, and those of
    views that lie in it.
    """

    name: str
    size: Amount
    is_needed_by_weight_backward: bool
    relayed_as: tuple[str, ...] = ()


def total_size(storages: Iterable[MessageStorage | ReceivedTensor]) -> Amount:
    """Return the size of all storages together."""
    return sum((storage.size for storage in storages), ZERO)


class Footprint(Value, frozen=True, kw_only=True):
    """What one stage holds: always, for each microbatch in flight, and at most while it computes.

    Always: `parameters`, `gradients` and `optimizer`; what other stages read too is `shared`. Older
    versions of weights that microbatches in flight read are among `parameters`. The `kv_cache` is
    that of the tokens which a plan for inference reserves.

    For a microbatch: `activations` from its forward to its backward, `sent_outputs` among them.
    Gradients of inputs, which a whole backward makes (`sent_by_backward`) or an input backward
    (`sent_by_input_backward`), are held until the stage before has read them. An input backward
    frees `freed_by_input_backward` of the activations and adds `added_by_input_backward`, which the
    weight backward frees. `inputs` are what the stage reads of the minibatch; `received` and
    `received_gradients` come from its neighbours. `buffer_copies` are copies of buffers that nodes
    write to: a microbatch of which the whole stage is recomputed keeps them.

    While it computes: the peaks, above what was held before. The first backward of a step makes
    the gradients of parameters, later ones add to them. The peaks of a weight backward are
    different where it frees the outputs too (`…_freeing_outputs`).

    With other replicas: `gradient_copies` are held from the last backward of the stage until all
    gradients are summed, `replica_sum_peak` is the most that the sum takes besides, and the rank
    exchanges tensors with `replica_peers` more. Of a sharded stage
    `parameters` are the whole ones and the part that stays between steps, `optimizer` is for that
    part, and `optimizer_workspace` is no less than what gathering takes beyond gradients. Where
    parameters are gathered for each action, they are `gathered` and only their part is among
    `parameters`. Where each backward sums its gradients over replicas, `gradients` are the part
    that it leaves, all backwards have the peaks of the first one, and `backward_sum_peak` is what
    the sum takes with the whole gradients.

    If an update `is_validated_later`, copies of the trained parameters and of the optimizer's state
    are held from the step to the next step's first backward, and so are its gradients. In the
    memory of the `host`, not of the device, is an optimizer that steps there.
    """

    # What is held of one microbatch, whose backward is split, from its forward on:
    #
    #     F ── activations ── I ── activations − freed + added ── W ── nothing
    #
    parameters: Amount
    gradients: Amount
    optimizer: Amount
    optimizer_workspace: Amount
    inputs: Amount
    activations: Amount
    freed_by_input_backward: Amount
    added_by_input_backward: Amount
    forward_peak: Amount
    first_backward_peak: Amount
    backward_peak: Amount
    input_backward_peak: Amount
    first_weight_backward_peak: Amount
    weight_backward_peak: Amount
    first_weight_backward_peak_freeing_outputs: Amount
    weight_backward_peak_freeing_outputs: Amount
    buffer_copies: Amount = ZERO
    kv_cache: Amount = ZERO
    gradient_copies: Amount = ZERO
    replica_sum_peak: Amount = ZERO
    gathered: Amount = ZERO
    backward_sum_peak: Amount = ZERO
    replica_peers: int = 0
    is_validated_later: bool = False
    host: Amount = ZERO
    received: tuple[ReceivedTensor, ...] = ()
    received_gradients: tuple[ReceivedTensor, ...] = ()
    sent_outputs: tuple[MessageStorage, ...] = ()
    sent_by_backward: tuple[MessageStorage, ...] = ()
    sent_by_input_backward: tuple[MessageStorage, ...] = ()
    shared: tuple[SharedParameter, ...] = ()

    @property
    def sums_in_backwards(self) -> bool:
        """Whether each backward makes gradients of parameters, sums them and keeps a part."""
        # No field of its own says it, since only such a sum takes anything within a backward.
        return self.backward_sum_peak.bound > 0

    @property
    def outputs(self) -> Amount:
        """The size of all that is sent to the next stage."""
        return total_size(self.sent_outputs)

    @property
    def outputs_freed_by_input_backward(self) -> Amount:
        """The outputs that W does not need, which an input backward frees."""
        return total_size(
            storage for storage in self.sent_outputs if not storage.is_needed_by_weight_backward
        )


# `field.type` is a type although annotations are strings here: msgspec resolves them.
AMOUNT_FIELDS: tuple[str, ...] = tuple(
    field.name for field in msgspec.structs.fields(Footprint) if field.type is Amount
)
# All other fields have defaults.
EMPTY_FOOTPRINT = Footprint(**dict.fromkeys(AMOUNT_FIELDS, ZERO))  # type: ignore[arg-type]
