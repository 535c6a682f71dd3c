"""The four calls of a stage, and recompute."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, fx, nn
from zoo import same

from pipecompile.codegen.stages import emit
from pipecompile.errors import InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.signature import Arguments
from pipecompile.graph.random_streams import StreamKey
from pipecompile.runtime.stage import EagerStage, TiedGradients

NOW = StreamKey(seed=1, step=0, microbatch=0)


class Block(nn.Module):
    """Two inputs and two outputs; the parameters are used more than once."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.left(x).tanh() * self.right(y)
        return self.left(hidden), hidden + y


def loss_of(outputs: Sequence[Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[0], target)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block().double()


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)


@pytest.mark.parametrize("carries", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("last", [False, True])
def test_the_two_halves_of_a_backward_are_the_backward(
    block: Block, inputs: tuple[Tensor, Tensor], carries: tuple[bool, bool], last: bool
) -> None:
    twin = copy.deepcopy(block)
    given = [] if last else [torch.randn(4, 6, dtype=torch.float64) for _ in range(2)]
    loss = loss_of if last else None
    whole, halves = (EagerStage(m, gradient_inputs=carries, loss=loss) for m in (block, twin))
    _, saved = whole.forward(inputs, NOW, inputs[0])
    wanted = whole.backward(saved, given, {})
    _, saved = halves.forward(inputs, NOW, inputs[0])
    got, live = halves.backward_input(saved, given)
    halves.backward_weight(live, {})
    assert (
        [value is None for value in got]
        == [value is None for value in wanted]
        == [not c for c in carries]
    )
    for left, right in zip([*got, *gradients(twin)], [*wanted, *gradients(block)], strict=True):
        assert same(left, right)


def test_weight_gradients_wait_for_the_weight_backward(
    block: Block, inputs: tuple[Tensor, Tensor]
) -> None:
    stage = EagerStage(block, gradient_inputs=(True, True), loss=loss_of)
    _, saved = stage.forward(inputs, NOW, inputs[0])
    _, live = stage.backward_input(saved, ())
    assert gradients(block) == [None] * 4
    stage.backward_weight(live, {})
    assert None not in gradients(block)


def test_a_first_stage_has_nothing_to_do_in_the_input_backward(
    block: Block, inputs: tuple[Tensor, Tensor]
) -> None:
    stage = EagerStage(block, gradient_inputs=(False, False), loss=loss_of)
    _, saved = stage.forward(inputs, NOW, inputs[0])
    found, live = stage.backward_input(saved, ())
    assert found == [None, None] and gradients(block) == [None] * 4
    stage.backward_weight(live, {})
    assert None not in gradients(block)


def test_outputs_and_inputs_are_cut_off_from_the_neighbours(
    block: Block, inputs: tuple[Tensor, Tensor]
) -> None:
    given = inputs[0].clone().requires_grad_()
    outputs, saved = EagerStage(block, gradient_inputs=(True, True)).forward(
        (given, inputs[1]), NOW
    )
    assert not any(value.requires_grad for value in outputs)
    assert all(value.is_leaf and value.requires_grad for value in saved.inputs)
    assert given.grad is None


def test_gradients_of_outputs_that_nobody_uses_may_be_missing(
    block: Block, inputs: tuple[Tensor, Tensor]
) -> None:
    stage = EagerStage(block, gradient_inputs=(True, True))
    _, saved = stage.forward(inputs, NOW)
    assert stage.backward(saved, [None, torch.ones(4, 6, dtype=torch.float64)], {})[1] is not None
    _, saved = stage.forward(inputs, NOW)
    assert stage.backward(saved, [None, None], {}) == [None, None]


def test_the_gradient_of_what_only_passes_through_is_not_copied() -> None:
    module = fx.symbolic_trace(Passing())
    (x, y), gradients = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    stage = EagerStage(module, gradient_inputs=(True, True))
    _, saved = stage.forward([x, y], NOW)
    own, passed = stage.backward(saved, list(gradients), {})
    assert own is not None and passed is not None
    assert passed.data_ptr() == gradients[1].data_ptr()
    assert torch.equal(passed, gradients[1]) and torch.equal(own, gradients[0] * x.cos())


class Passing(nn.Module):
    """Hands its second input on."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), y


def test_a_loss_holds_no_more_memory_than_a_scalar() -> None:
    """That of mse_loss lies in memory for all elements."""
    stage = EagerStage(fx.symbolic_trace(Passing()), gradient_inputs=(True, True), loss=loss_of)
    (loss,), _ = stage.forward([torch.randn(4, 6), torch.randn(4, 6)], NOW, torch.randn(4, 6))
    assert loss.untyped_storage().nbytes() == 4


def test_gradients_of_microbatches_add_up(block: Block, inputs: tuple[Tensor, Tensor]) -> None:
    stage = EagerStage(block, gradient_inputs=(True, True), loss=loss_of)
    saved = [stage.forward(inputs, StreamKey(1, 0, index), inputs[0])[1] for index in range(2)]
    stage.backward(saved[0], (), {})
    once = gradients(block)
    stage.backward(saved[1], (), {})
    assert all(
        torch.equal(twice, one * 2) for twice, one in zip(gradients(block), once, strict=True)
    )


class Restless(nn.Module):
    """Draws numbers and keeps running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 6)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def restless(model: Restless, x: Tensor) -> EagerStage:
    """The model as a stage of its own, as it is emitted."""
    call = Arguments((x,), {})
    module = capture(model, call).instantiate(call)
    (stage,) = emit(module, {node.name: 0 for node in module.graph.nodes})
    return EagerStage(
        stage.module,
        gradient_inputs=(True,),
        loss=loss_of,
        buffers=stage.buffers,
        random=stage.random,
    )


@pytest.mark.parametrize("microbatches", [1, 3])
def test_recompute_changes_nothing(microbatches: int) -> None:
    torch.manual_seed(0)
    plain = Restless()
    recomputed = copy.deepcopy(plain)
    rows = [torch.randn(4, 6) for _ in range(microbatches)]
    results = []
    for model, recompute in ((plain, False), (recomputed, True)):
        stage = restless(model, rows[0])
        forwards = [
            stage.forward([x], StreamKey(1, 0, j), x, recompute=recompute)
            for j, x in enumerate(rows)
        ]
        inputs = []
        for _, saved in forwards:
            if recompute:
                assert saved.outputs is None
                stage.recompute(saved)
            inputs += stage.backward(saved, (), {})
        losses = [outputs[0] for outputs, _ in forwards]
        results.append([*losses, *inputs, *gradients(model), *model.buffers()])
    assert all(torch.equal(left, right) for left, right in zip(*results, strict=True))
    assert recomputed.layers[1].num_batches_tracked == microbatches


def test_recompute_leaves_the_generator_and_the_buffers() -> None:
    model, x = Restless(), torch.randn(4, 6)
    stage = restless(model, x)
    _, saved = stage.forward([x], NOW, x, recompute=True)
    state, buffers = torch.get_rng_state(), [buffer.clone() for buffer in model.buffers()]
    stage.recompute(saved)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(
        torch.equal(now, before) for now, before in zip(model.buffers(), buffers, strict=True)
    )


def test_a_backward_before_its_recompute_is_a_defect(
    block: Block, inputs: tuple[Tensor, Tensor]
) -> None:
    stage = EagerStage(block, gradient_inputs=(True, True), loss=loss_of)
    _, saved = stage.forward(inputs, NOW, inputs[0], recompute=True)
    with pytest.raises(AssertionError, match="a recompute must come before the backward"):
        stage.backward(saved, (), {})


class Scale(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (x * self.weight,)


def test_gradients_of_a_tied_parameter_are_handed_on_and_summed_as_autograd_does() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6))
    xs = [torch.randn(4, 6) for _ in range(3)]
    first = EagerStage(Scale(weight), gradient_inputs=(False,), tied_to_later=[weight])
    second = EagerStage(
        Scale(weight), gradient_inputs=(True,), loss=loss_of, tied_to_earlier=[weight]
    )
    weight.grad = torch.ones(6)
    for x in xs:
        carried: TiedGradients = {}
        outputs, early = first.forward([x], NOW)
        _, late = second.forward(outputs, NOW, x)
        before = weight.grad.clone()
        handed = second.backward(late, (), carried)
        assert torch.equal(weight.grad, before)
        assert list(carried) == [weight]
        first.backward(early, handed, carried)
        assert carried == {}
    got, weight.grad = weight.grad, torch.ones(6)
    for x in xs:
        loss_of(((x * weight) * weight,), x).backward()
    assert torch.equal(got, weight.grad)


def test_evaluation_builds_no_graph_and_has_no_loss(
    block: Block, inputs: tuple[Tensor, Tensor]
) -> None:
    outputs = EagerStage(block, gradient_inputs=(True, True), loss=loss_of).evaluate(inputs, NOW)
    assert len(outputs) == 2
    assert not any(value.requires_grad for value in outputs)


def test_a_failing_forward_leaves_the_gradient_mode() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_grad_enabled(False)
            raise ZeroDivisionError

    with pytest.raises(InputError, match="raised ZeroDivisionError; the stage was given"):
        EagerStage(Fails(), gradient_inputs=(True,)).forward([torch.zeros(1)], NOW)
    assert torch.is_grad_enabled()
