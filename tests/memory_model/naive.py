"""What a rank holds, found the long way: a set of live storages, followed node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.schedule import BACKWARDS, COMPUTE, Action, Kind
from pipecompile.memory_model.snapshots import ALL_UNREAD
from pipecompile.memory_model.unread_gradients import UnreadGradients
from tests.memory_model.naive_encodings import EncodedNames, Key
from tests.memory_model.naive_forward import NaiveForward
from tests.memory_model.naive_recompute import LiveBytes
from tests.memory_model.naive_stage import NaiveStage

__all__ = ["highest"]

RECEIVES = (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)
NONE: Mapping[int, Sequence[Sequence[str]]] = {}
NO_ENCODINGS: Mapping[int, Sequence[EncodedNames]] = {}


@dataclass
class _Rank(NaiveForward):
    """A rank at work; keys are (stage, microbatch, what, …)."""

    stages: dict[int, NaiveStage] = field(default_factory=dict)
    recomputed: set[tuple[int, int]] = field(default_factory=set)
    trains: bool = True
    unread: UnreadGradients = field(default_factory=dict)
    returned: dict[int, list[int]] = field(default_factory=dict)
    read: set[tuple[int, int]] = field(default_factory=set)
    with_gradients: set[int] = field(default_factory=set)
    between: set[tuple[int, int]] = field(default_factory=set)
    split: set[tuple[int, int]] = field(default_factory=set)
    done: set[tuple[int, int]] = field(default_factory=set)

    def backward(self, stage: NaiveStage, microbatch: int, kind: Kind) -> None:
        """Run a backward, or one half of it; a stage without input gradients has it all in W."""
        is_whole = kind is Kind.BACKWARD or not stage.has_input_backward
        is_weights = kind is not Kind.BACKWARD_INPUT
        makes_inputs = is_weights if is_whole else kind is Kind.BACKWARD_INPUT
        for node in reversed(stage.nodes if makes_inputs or is_weights else []):
            self._begin_node(stage, microbatch, node, kind)
            self._work(self._rise(stage, node, is_whole, kind), node.workspace_bytes)
            if makes_inputs:
                self._run_gradients(stage, microbatch, node.name, is_input_backward=not is_whole)
            else:
                self._free_captured(stage, microbatch, node.name)
            if is_weights:
                self._make_parameter_gradients(stage, node, whole=is_whole)
                self._free_saved(stage, microbatch, node.name, kind)
            else:
                self._hold_parameter_gradients(stage, microbatch, node.name)
            self._sum_gradients(stage, node.name, makes_inputs=makes_inputs, is_whole=is_whole)
        if kind is Kind.BACKWARD_INPUT:
            self._free_saved_for_inputs(stage, microbatch)
        if makes_inputs:
            self._return(stage, microbatch, is_input_backward=not is_whole)
        if kind is Kind.BACKWARD_INPUT:
            self._free_outputs(stage, microbatch)
        self.live.drop(stage.index, microbatch, "outputs only")
        if is_weights:
            self.done.add((stage.index, microbatch))
            self.between.discard((stage.index, microbatch))
            self._finish(stage, microbatch)
        else:
            self.between.add((stage.index, microbatch))
            self.split.add((stage.index, microbatch))
        self._free_around(stage, microbatch)
        if kind is not Kind.BACKWARD_WEIGHT:
            self._send_gradients(stage, microbatch)

    def _free_around(self, stage: NaiveStage, microbatch: int) -> None:
        """Free what neither a stage nor one beside it holds any more of a microbatch."""
        self._hand_over(stage.index, microbatch)
        self._hand_over(stage.index - 1, microbatch)
        for index in (stage.index - 1, stage.index, stage.index + 1):
            if {(index, microbatch)} & (self.between | self.done):
                self._free_received(self.stages[index], microbatch)
        here = stage.index, microbatch
        if here in self.read and stage.index - 1 not in self.stages:
            for home in stage.returned(is_input_backward=here in self.split):
                if not (here in self.between and stage.holds_returned(home)):
                    self.live.drop(*here, "returned", home)

    def _send_gradients(self, stage: NaiveStage, microbatch: int) -> None:
        """Send a message of gradients; of more than may be unread the first ones were read."""
        sent = self.returned.setdefault(stage.index, [])
        sent.append(microbatch)
        while len(sent) > self.unread.get((stage.index, microbatch), len(sent)):
            self.read.add((stage.index, sent[0]))
            self._free_around(stage, sent.pop(0))

    def receive(self, stage: NaiveStage, microbatch: int, kind: Kind) -> None:
        """Make the buffers of a message."""
        for tensor in stage.graph.tensors:
            if kind is Kind.RECEIVE_FORWARD and stage.arrives(tensor.producer, tensor.consumers):
                key = (stage.index, microbatch, "received", tensor.producer)
                self.live.hold(key, tensor.bytes)
            if kind is Kind.RECEIVE_BACKWARD and stage.leaves(tensor.producer, tensor.consumers):
                if not stage.is_later(tensor.consumers_with_gradient):
                    continue  # nothing is sent
                key = (stage.index, microbatch, "received gradient", tensor.producer)
                self.live.hold(key, tensor.gradient_bytes)

    def _free_received(self, stage: NaiveStage, microbatch: int) -> None:
        """Free what came from other ranks, unless a message or a backward to come holds it."""
        is_half = (stage.index, microbatch) in self.between
        for name in [tensor.producer for tensor in stage.graph.tensors]:
            is_held = is_half and stage.needs_for_weight_backward(name)
            behind = self.stages.get(stage.index + 1) if self.trains else None
            names = stage.leaves_as(name)
            if behind is None:
                is_relayed = bool(names) and not self.trains
            else:
                is_relayed = self._is_held_behind(names, behind, microbatch)
            if not (is_held or is_relayed):
                self.live.drop(stage.index, microbatch, "received", name)
            is_held = is_half and stage.holds_received_gradient(name)
            if not (is_held or self._is_held_before(stage, stage.returns_as(name), microbatch)):
                self.live.drop(stage.index, microbatch, "received gradient", name)

    def _is_held_behind(self, names: Sequence[str], behind: NaiveStage, microbatch: int) -> bool:
        """Whether the next stage holds a value that it got under these names."""
        is_half = (behind.index, microbatch) in self.between
        waits = behind.index + 1 in self.stages
        return any(
            (waits and behind.relays_input(name))
            or (is_half and behind.needs_for_weight_backward(name))
            for name in names
        )

    def _is_held_before(self, stage: NaiveStage, names: Sequence[str], microbatch: int) -> bool:
        """Whether the stage before, or a message to it, holds a gradient that it got for these."""
        there = stage.index - 1, microbatch
        before = self.stages.get(stage.index - 1)
        if before is None:
            return bool(names) and (stage.index, microbatch) not in self.read
        if not {there} & (self.between | self.done):
            return bool(names)
        return any(
            (before.relays_gradient(name) and there not in self.read & self.done)
            or (there in self.between and before.holds_received_gradient(name))
            for name in names
        )

    def _begin_node(self, stage: NaiveStage, microbatch: int, node: Node, kind: Kind) -> None:
        """Recompute the region of a node, and decode what it saved."""
        if node.saves_at != "never":
            self._recompute(stage, microbatch, stage.innermost_region(node.name))
        for key, encoding in stage.own_encodings() if kind is Kind.BACKWARD else ():
            if encoding.decoded_at == node.name:
                size = stage.graph.storages[encoding.storage]
                self.live.hold((stage.index, microbatch, "copy", *key), size)
                self.live.need(encoding.workspace)

    def _hold_parameter_gradients(self, stage: NaiveStage, microbatch: int, node: str) -> None:
        """Hold the gradients of parameters that an input backward makes."""
        for name in stage.input_backward_parameters():
            if stage.trained_parameters()[name][-1] == node:
                key = (stage.index, microbatch, "input backward", name)
                self.live.sizes[key] = stage.size(name)

    def _free_saved(self, stage: NaiveStage, microbatch: int, node: str, kind: Kind) -> None:
        """Free what no backward before this node's needs: outputs too in W, if no stage of the rank
        has the same.
        """
        # The first forward's outputs are handed over as they are.
        is_own = (stage.index, microbatch) in self.recomputed or stage.index + 1 not in self.stages
        frees_outputs = kind is Kind.BACKWARD_WEIGHT and is_own
        for storage in stage.own_storages():
            is_freed = frees_outputs or not stage.is_sent(storage)
            if is_freed and stage.holders(storage)[:1] == [node]:
                self.live.drop(stage.index, microbatch, "kept", storage)
        for copy in stage.strided_copies:
            if (frees_outputs or not copy.is_sent) and copy.holders[:1] == [node]:
                self.live.drop(stage.index, microbatch, "kept", *copy.key)
        for key, encoding in stage.own_encodings():
            if encoding.savers[0] == node:
                self.live.drop(stage.index, microbatch, "encoding", *key)
                self.live.drop(stage.index, microbatch, "copy", *key)
        for index in stage.regions_beginning(node):
            self.live.drop(stage.index, microbatch, "region's copies", index)
        self._use_saved(stage, microbatch, stage.innermost_region(node), ("node", node))

    def _sum_gradients(
        self, stage: NaiveStage, node: str, *, makes_inputs: bool, is_whole: bool
    ) -> None:
        """Need the summands beside new sums when a node is done."""
        if makes_inputs:
            self.live.need(stage.summand_bytes(node, is_input_backward=not is_whole))
            return
        made_before = stage.input_backward_parameters()
        late = [name for name in stage.trained_parameters() if name not in made_before]
        self.live.need(sum(2 * stage.size(name) for name in late if stage.adds_to_view(name, node)))

    def _rise(self, stage: NaiveStage, node: Node, whole: bool, kind: Kind) -> int:
        if whole:
            return node.backward_peak_bytes
        if kind is Kind.BACKWARD_INPUT:
            later = set(node.parameters) - set(stage.input_backward_parameters())
            return max(
                0, node.backward_peak_bytes - sum(stage.size(name, trained=True) for name in later)
            )
        own = (g for g in stage.graph.gradients if g.producer == node.name and not g.is_sum)
        fresh = (g for g in own if g.last not in stage.aside or stage.capture_places(g))
        made = sum(gradient.bytes for gradient in fresh)
        made += sum(
            stage.size(parameter)
            for parameter in stage.input_backward_parameters()
            if parameter in node.parameters
        )
        runs = stage.begins(node.name) or node.name in stage.aside
        return max(0, node.backward_peak_bytes - made) if runs else 0

    def _run_gradients(
        self, stage: NaiveStage, microbatch: int, node: str, *, is_input_backward: bool
    ) -> None:
        flows = list(stage.gradient_lives(is_input_backward=is_input_backward))
        for key, size, maker, _ in flows:
            if maker == node:
                self.live.sizes[(stage.index, microbatch, *key)] = size
        for key, _, _, last in flows:
            if last == node and not (is_input_backward and stage.freed_in_weight_backward(key)):
                self.live.drop(stage.index, microbatch, *key)

    def _free_captured(self, stage: NaiveStage, microbatch: int, node: str) -> None:
        for key, _, _, _ in stage.gradient_lives(is_input_backward=True):
            if stage.freed_in_weight_backward(key) == node:
                self.live.drop(stage.index, microbatch, *key)
        collected = [(number, g) for number, g in stage.gradients() if g.last in stage.aside]
        aside = [(number, g) for number, g in collected if not stage.capture_places(g)]
        for number, gradient in aside:
            if gradient.producer == node:
                self.live.sizes[stage.index, microbatch, "aside", number] = gradient.bytes
        for number, gradient in aside:
            if gradient.last == node:
                self.live.drop(stage.index, microbatch, "aside", number)

    def _make_parameter_gradients(self, stage: NaiveStage, node: Node, *, whole: bool) -> None:
        """Make gradients of parameters: those of the first backward stay, others are added.

        Those that an input backward made are copied, or added, when all else is done.
        """
        early = () if whole else stage.input_backward_parameters()
        for name in (
            early if stage.index not in self.with_gradients and node is stage.nodes[0] else ()
        ):
            self.live.sizes[stage.index, "gradient", name] = stage.size(name)
        for name, readers in stage.trained_parameters().items():
            if name in early:
                continue
            key = (
                stage.index,
                "gradient" if stage.index not in self.with_gradients else "added",
                name,
            )
            if readers[-1] == node.name and (key[1] == "gradient" or len(readers) > 1):
                self.live.sizes[key] = stage.size(name)
            if readers[0] == node.name and key[1] == "added":
                self.live.drop(*key)

    def _free_saved_for_inputs(self, stage: NaiveStage, microbatch: int) -> None:
        """Free what only nodes saved that no weight backward leads through."""
        for storage in stage.own_storages():
            savers = stage.savers(storage)
            if savers and not stage.is_sent(storage) and not self._is_reached(stage, savers):
                self.live.drop(stage.index, microbatch, "kept", storage)
        for copy in stage.strided_copies:
            if copy.savers and not copy.is_sent and not self._is_reached(stage, copy.savers):
                self.live.drop(stage.index, microbatch, "kept", *copy.key)

    def _free_outputs(self, stage: NaiveStage, microbatch: int) -> None:
        """Free outputs that no weight backward needs.

        A next stage on the same rank may need handed ones longer, and holds them itself.
        """
        for storage in filter(stage.is_sent, stage.own_storages()):
            if not self._is_reached(stage, stage.savers(storage)):
                self.live.drop(stage.index, microbatch, "kept", storage)
        for copy in stage.strided_copies:
            if copy.is_sent and not self._is_reached(stage, copy.savers):
                self.live.drop(stage.index, microbatch, "kept", *copy.key)
        for key in stage.sent_copies:
            self.live.drop(stage.index, microbatch, "kept", *key)

    @staticmethod
    def _is_reached(stage: NaiveStage, savers: Sequence[str]) -> bool:
        at_outputs = stage.begins_at_outputs or not stage.has_input_backward
        return bool(savers) and (
            at_outputs or any(saver in stage.weight_backward_reach for saver in savers)
        )

    def _is_needed_behind(self, stage: NaiveStage, microbatch: int, key: Key) -> bool:
        """Whether the next stage relays an output, or needs it in its weight backward."""
        behind = self.stages[stage.index + 1]
        return self._is_held_behind(stage.names_in(key), behind, microbatch)

    def _return(self, stage: NaiveStage, microbatch: int, *, is_input_backward: bool) -> None:
        """Return the gradients of inputs; those of inputs that are only relayed were received."""
        parts = stage.parts if is_input_backward else {}
        sizes = {tensor.producer: tensor.gradient_bytes for tensor in stage.graph.tensors}
        for index, (name, number) in enumerate(parts.items()):
            self.live.hold((stage.index, microbatch, "part", name), sizes[name])
            self.live.need(0)
            if number not in [
                *list(parts.values())[index + 1 :],
                *stage.return_storages(is_input_backward=is_input_backward).values(),
            ]:
                self.live.drop(stage.index, microbatch, "complete", number)
        self.live.drop(stage.index, microbatch, "part")
        self.live.drop(stage.index, microbatch, "complete")
        for home, (size, _) in stage.returned(is_input_backward=is_input_backward).items():
            self.live.sizes[stage.index, microbatch, "returned", home] = size
        self.live.need(0)

    def _hand_over(self, index: int, microbatch: int) -> None:
        """Keep only what one of two neighbouring stages of the rank still needs."""
        here, there = (index, microbatch), (index + 1, microbatch)
        before, behind = self.stages.get(index), self.stages.get(index + 1)
        if before is None or behind is None or not {here} & (self.between | self.done):
            return
        for key, size in before.messages.items():
            is_own = (*here, "kept", *key) in self.live.sizes and here not in self.recomputed
            self.live.drop(*here, "handed", *key)
            if self._is_needed_behind(before, microbatch, key) and not is_own:
                self.live.hold((*here, "handed", *key), size)
        for home, (_, names) in behind.returned(is_input_backward=there in self.split).items():
            is_read = here in self.read & self.done
            relayed = any(before.relays_gradient(name) for name in names) and not is_read
            retained = here in self.between and any(map(before.holds_received_gradient, names))
            if not (relayed or retained or (there in self.between and behind.holds_returned(home))):
                self.live.drop(*there, "returned", home)

    def _finish(self, stage: NaiveStage, microbatch: int) -> None:
        """End a microbatch: only its messages may stay."""
        for node in stage.nodes if stage.index not in self.with_gradients else []:
            if not node.parameters:
                self.live.hold((stage.index, "gradient", node.name), node.parameter_bytes)
        assert not any(
            self.saved_in.pop(key)
            for key in list(self.saved_in)
            if key[:2] == (stage.index, microbatch)
        )
        for name in stage.trained_parameters() if stage.index not in self.with_gradients else ():
            if any(
                name in self.stages[other].trained_parameters()
                for other in self.with_gradients - {stage.index}
            ):
                self.live.drop(
                    stage.index, "gradient", name
                )  # it was added to what others of the rank have
        self.with_gradients.add(stage.index)
        self.live.drop(stage.index, microbatch, "kept")
        self.live.drop(stage.index, microbatch, "input backward")
        self.live.drop(stage.index, microbatch, "stage's copies")

    def perform(self, action: Action) -> None:
        stage, microbatch = self.stages[action.stage], action.microbatch
        assert microbatch is not None
        match action.kind:
            case Kind.FORWARD:
                if (action.stage, microbatch) in self.recomputed:
                    everything = stage.buffer_copy_bytes(node.name for node in stage.nodes)
                    self.live.hold((stage.index, microbatch, "stage's copies"), everything)
                self.forward(stage, microbatch, "kept")
                if (action.stage, microbatch) in self.recomputed:
                    self.keep_outputs_only(stage, microbatch)
                if not self.trains:
                    self._free_received(stage, microbatch)
            case Kind.RECEIVE_FORWARD | Kind.RECEIVE_BACKWARD:
                self.receive(stage, microbatch, action.kind)
            case Kind.RECOMPUTE:
                self.forward(stage, microbatch, "kept")
            case _:
                self.backward(stage, microbatch, action.kind)
        self.live.need(0)


def highest(
    graph: CostGraph,
    cut: Sequence[Sequence[str]],
    row: Sequence[Action],
    microbatches: int,
    regions: Mapping[int, Sequence[Sequence[str]]] = NONE,
    encoded_runs: Mapping[int, Sequence[EncodedNames]] = NO_ENCODINGS,
    unread: UnreadGradients = ALL_UNREAD,
) -> int:
    """Return the most bytes that the rank of `row` holds, without an optimizer.

    `regions` and `encoded_runs` are by stage. So many gradients are `unread` as one is
    sent. A row without receives has received all messages when it begins.
    """
    receives = [action for action in row if action.kind in RECEIVES]
    row = [action for action in row if action.kind in (*COMPUTE, *RECEIVES)]
    stages = {
        index: NaiveStage(graph, cut, index, regions.get(index, ()), encoded_runs.get(index, ()))
        for index in sorted({action.stage for action in row})
    }
    recomputed = {
        (a.stage, a.microbatch)
        for a in row
        if a.kind is Kind.RECOMPUTE and a.microbatch is not None
    }
    trains = any(action.kind in BACKWARDS for action in row)
    rank = _Rank(stages=stages, recomputed=recomputed, trains=trains, unread=unread)
    for stage in stages.values():
        _hold_always(rank.live, stage, microbatches)
        for microbatch in range(0 if receives else microbatches):
            if stage.index - 1 not in stages:
                rank.receive(stage, microbatch, Kind.RECEIVE_FORWARD)
            if stage.index + 1 not in stages and trains:
                rank.receive(stage, microbatch, Kind.RECEIVE_BACKWARD)
    for action in row:
        rank.perform(action)
    return rank.live.highest


def _hold_always(live: LiveBytes, stage: NaiveStage, microbatches: int) -> None:
    """Hold what is there all the time: parameters, and the minibatch.

    All stages of the rank that read a parameter share one.
    """
    for name in {name for node in stage.nodes for name in node.parameters}:
        live.sizes["parameter", name] = stage.size(name)
    for node in stage.nodes:
        if not node.parameters:
            live.hold(("anonymous", stage.index, node.name), node.parameter_bytes)
        live.hold(("input", stage.index, node.name), node.input_bytes * microbatches)
