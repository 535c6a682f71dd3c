"""What a rank holds, found the long way: a set of live storages, followed node by node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipecompile.ir.graph import CostGraph, Node
from pipecompile.ir.schedule import COMPUTE, Action, Kind
from tests.memory_model.naive_encodings import EncodedNames, EncodedStorage, Key
from tests.memory_model.naive_recompute import LiveBytes, NaiveRecompute
from tests.memory_model.naive_stage import NaiveStage

__all__ = ["highest"]

NONE: Mapping[int, Sequence[Sequence[str]]] = {}
NO_ENCODINGS: Mapping[int, Sequence[EncodedNames]] = {}


@dataclass
class _Rank(NaiveRecompute):
    """A rank at work; keys are (stage, microbatch, what, …)."""

    stages: dict[int, NaiveStage] = field(default_factory=dict)
    recomputed: set[tuple[int, int]] = field(default_factory=set)
    with_gradients: set[int] = field(default_factory=set)
    between: set[tuple[int, int]] = field(default_factory=set)
    split: set[tuple[int, int]] = field(default_factory=set)
    done: set[tuple[int, int]] = field(default_factory=set)

    def forward(self, stage: NaiveStage, microbatch: int, run: str) -> None:
        done: set[str] = set()
        for copy in stage.strided_copies:
            self.live.hold((stage.index, microbatch, run, *copy.key), copy.size)
            self.live.need(0)
        for node in stage.nodes:
            for index in stage.regions_beginning(node.name):
                self.live.hold(
                    (stage.index, microbatch, "region's copies", index),
                    stage.buffer_copy_bytes(stage.regions[index]),
                )
            made = [
                (key, encoding)
                for key, encoding in stage.own_encodings()
                if encoding.encoded_at == node.name
            ]
            for key, encoding in made:
                if not encoding.waits_for_end:
                    self.live.hold((stage.index, microbatch, "encoding", *key), encoding.size)
            beside = max(
                (encoding.scratch for _, encoding in made if not encoding.waits_for_end), default=0
            )
            self._work(node.forward_peak_bytes, node.workspace_bytes, beside)
            done.add(node.name)
            for storage in stage.produced_by(node):
                self.live.hold(
                    (stage.index, microbatch, run, storage), stage.graph.storages[storage]
                )
            self._encode_at_end(
                stage,
                microbatch,
                run,
                [(key, encoding) for key, encoding in made if encoding.waits_for_end],
                done,
            )
            self._free_unread(stage, microbatch, run, done)
            self.live.need(0)
            for index, region in enumerate(stage.regions):
                if region[-1] == node.name and not stage.is_recomputed(index):
                    self.live.drop(stage.index, microbatch, "region's copies", index)
        for key, size in stage.sent_copies.items():
            self.live.hold((stage.index, microbatch, run, *key), size)
        self.live.need(0)
        self._free_unread(stage, microbatch, run, set(stage.order))

    def _free_unread(self, stage: NaiveStage, microbatch: int, run: str, done: set[str]) -> None:
        for storage in stage.own_storages():
            if stage.is_freed(storage, done):
                self.live.drop(stage.index, microbatch, run, storage)
        for copy in stage.strided_copies:
            if not copy.holders and not copy.is_sent and copy.until <= done:
                self.live.drop(stage.index, microbatch, run, *copy.key)

    def _encode_at_end(
        self,
        stage: NaiveStage,
        microbatch: int,
        kind: str,
        made: Sequence[tuple[Key, EncodedStorage]],
        done: set[str],
    ) -> None:
        """Encode at the end of a run, one after the other.

        A storage is freed with its last encoding, unless the run did not produce it.
        """
        if not made:
            return
        end = made[0][1].encoded_at
        run = stage.run_of(end)
        gone = [storage for storage in stage.own_storages() if stage.is_freed(storage, done)]
        given = [storage for storage in gone if run in stage.runs_reading(storage)]
        waiting = [encoding.storage for _, encoding in made]
        for storage in gone:
            if storage not in given and storage not in waiting:
                self.live.drop(stage.index, microbatch, kind, storage)
        self.live.need(0)
        for key, encoding in sorted(
            made, key=lambda pair: min(run.index(n) for n in pair[1].savers if n in run)
        ):
            self.live.hold((stage.index, microbatch, "encoding", *key), encoding.size)
            self.live.need(encoding.scratch)
            waiting.remove(encoding.storage)
            if encoding.storage in gone and encoding.storage not in (*given, *waiting):
                self.live.drop(stage.index, microbatch, kind, encoding.storage)

    def keep_outputs_only(self, stage: NaiveStage, microbatch: int) -> None:
        """Keep only the outputs of a forward."""
        for storage in stage.own_storages():
            if not stage.is_sent(storage):
                self.live.drop(stage.index, microbatch, "kept", storage)
        for copy in stage.strided_copies:
            self.live.drop(stage.index, microbatch, "kept", *copy.key)
        for key, size in stage.messages.items():
            self.live.drop(stage.index, microbatch, "kept", *key)
            self.live.hold((stage.index, microbatch, "outputs only", *key), size)

    def backward(self, stage: NaiveStage, microbatch: int, kind: Kind) -> None:
        first = kind is not Kind.BACKWARD_WEIGHT and (
            kind is Kind.BACKWARD or stage.has_input_backward
        )
        second = kind is not Kind.BACKWARD_INPUT
        whole = kind is Kind.BACKWARD or not stage.has_input_backward
        for node in reversed(stage.nodes if first or second else []):
            if node.saves_at != "never":
                self._recompute(stage, microbatch, stage.innermost_region(node.name))
            for key, encoding in stage.own_encodings() if kind is Kind.BACKWARD else ():
                if encoding.decoded_at == node.name:
                    self.live.hold(
                        (stage.index, microbatch, "copy", *key),
                        stage.graph.storages[encoding.storage],
                    )
                    self.live.need(encoding.scratch)
            self._work(self._rise(stage, node, whole, kind), node.workspace_bytes)
            if first or (second and whole):
                self._run_gradients(stage, microbatch, node.name, is_input_backward=not whole)
            elif second:
                self._free_captured(stage, microbatch, node.name)
            if first and not whole:
                for name in stage.input_backward_parameters():
                    if stage.trained_parameters()[name][-1] == node.name:
                        self.live.sizes[stage.index, microbatch, "input backward", name] = (
                            stage.size(name)
                        )
            if second:
                self._make_parameter_gradients(stage, node, whole=whole)
                again = (stage.index, microbatch) in self.recomputed
                is_stripped = kind is Kind.BACKWARD_WEIGHT and again
                for storage in stage.own_storages():
                    goes = is_stripped or not stage.is_sent(storage)
                    if goes and stage.holders(storage)[:1] == [node.name]:
                        self.live.drop(stage.index, microbatch, "kept", storage)
                for copy in stage.strided_copies:
                    if (is_stripped or not copy.is_sent) and copy.holders[:1] == [node.name]:
                        self.live.drop(stage.index, microbatch, "kept", *copy.key)
                for key, encoding in stage.own_encodings():
                    if encoding.savers[0] == node.name:
                        self.live.drop(stage.index, microbatch, "encoding", *key)
                        self.live.drop(stage.index, microbatch, "copy", *key)
                for index in stage.regions_beginning(node.name):
                    self.live.drop(stage.index, microbatch, "region's copies", index)
                self._use_saved(
                    stage, microbatch, stage.innermost_region(node.name), ("node", node.name)
                )
            self.live.need(
                stage.summand_bytes(node.name, is_input_backward=not whole)
                if first or (second and whole)
                else 0
            )
            if second and not whole:
                late = (
                    name
                    for name in stage.trained_parameters()
                    if name not in stage.input_backward_parameters()
                )
                self.live.need(
                    sum(
                        2 * stage.size(name) for name in late if stage.adds_to_view(name, node.name)
                    )
                )
        if kind is Kind.BACKWARD_INPUT:
            self._free_saved_for_inputs(stage, microbatch)
        if first or (second and whole):
            self._return(stage, microbatch, is_input_backward=not whole)
        if kind is Kind.BACKWARD_INPUT:
            self._free_outputs(stage, microbatch)
        if second:
            self.done.add((stage.index, microbatch))
            self.between.discard((stage.index, microbatch))
            self._finish(stage, microbatch)
        else:
            self.between.add((stage.index, microbatch))
            self.split.add((stage.index, microbatch))
        self._hand_over(stage.index, microbatch)
        self._hand_over(stage.index - 1, microbatch)

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
        found = [(number, g) for number, g in stage.gradients() if g.last in stage.aside]
        aside = [(number, g) for number, g in found if not stage.capture_places(g)]
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
        """Free outputs that no weight backward needs, if they were recomputed or handed over.

        Of recomputed ones, those of the first forward were sent. A next stage on the same rank may
        need handed ones longer, and holds them itself.
        """
        if (stage.index, microbatch) not in self.recomputed and stage.index + 1 not in self.stages:
            return
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
        is_half = (behind.index, microbatch) in self.between
        return any(
            behind.relays_input(name) or (is_half and behind.needs_for_weight_backward(name))
            for name in stage.names_in(key)
        )

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
        self.live.drop(index, microbatch, "outputs only")
        for key, size in before.messages.items():
            is_own = (*here, "kept", *key) in self.live.sizes and here not in self.recomputed
            self.live.drop(*here, "handed", *key)
            if self._is_needed_behind(before, microbatch, key) and not is_own:
                self.live.hold((*here, "handed", *key), size)
        for home, (_, names) in behind.returned(is_input_backward=there in self.split).items():
            relayed = any(before.relays_gradient(name) for name in names)
            retained = here in self.between and any(map(before.holds_received_gradient, names))
            if not (relayed or retained or (there in self.between and behind.holds_returned(home))):
                self.live.drop(*there, "returned", home)

    def _finish(self, stage: NaiveStage, microbatch: int) -> None:
        """End a microbatch: only what went to another rank stays until the step ends."""
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
        self.live.drop(stage.index, microbatch, "outputs only")
        self.live.drop(stage.index, microbatch, "stage's copies")
        for key, size in stage.messages.items() if stage.index + 1 not in self.stages else ():
            self.live.hold((stage.index, microbatch, "sent", *key), size)

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
) -> int:
    """Return the most bytes that the rank of `row` holds, without an optimizer.

    `regions` and `encoded_runs` are by stage.
    """
    row = [action for action in row if action.kind in COMPUTE]
    stages = {
        index: NaiveStage(graph, cut, index, regions.get(index, ()), encoded_runs.get(index, ()))
        for index in sorted({action.stage for action in row})
    }
    again = {
        (a.stage, a.microbatch)
        for a in row
        if a.kind is Kind.RECOMPUTE and a.microbatch is not None
    }
    rank = _Rank(stages=stages, recomputed=again)
    for stage in stages.values():
        _hold_always(rank.live, stage, set(stages), microbatches)
    for action in row:
        rank.perform(action)
    return rank.live.highest


def _hold_always(live: LiveBytes, stage: NaiveStage, rank: set[int], microbatches: int) -> None:
    """Hold what is there all the time: parameters, the minibatch, and receive buffers.

    All stages of the rank that read a parameter share one.
    """
    graph, index = stage.graph, stage.index
    for name in {name for node in stage.nodes for name in node.parameters}:
        live.sizes["parameter", name] = stage.size(name)
    for node in stage.nodes:
        if not node.parameters:
            live.hold(("anonymous", index, node.name), node.parameter_bytes)
        live.hold(("input", index, node.name), node.input_bytes * microbatches)
    for tensor in graph.tensors:
        if index - 1 not in rank and stage.arrives(tensor.producer, tensor.consumers):
            live.hold(("received", index, tensor.producer), tensor.bytes * microbatches)
        if index + 1 not in rank and stage.leaves(tensor.producer, tensor.consumers):
            live.hold(
                ("received gradient", index, tensor.producer), tensor.gradient_bytes * microbatches
            )
