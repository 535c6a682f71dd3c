"""Data-dependent modules are one node, the smallest that works; fakes get the sample's answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from zoo import called, captured, same
from zoo.exact import exact

from pipecompile.api.compilation import pipecompile
from pipecompile.api.verification import reference_for
from pipecompile.errors import CaptureError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments
from pipecompile.frontend.target import Target, sum_of_squares

WIDTH = 8


def sample(batch: int = 4) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(batch))


class Part(nn.Module):
    """A layer; subclasses say what else it does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Branch(Part):
    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return self.linear(x)
        return -x


class Item(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * x.sum().item()


class Listed(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + sum(x[:, 0].tolist())


class Nonzero(Part):
    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nonzero(x[:, 0] > 0)[:, 0]
        return x.index_add(0, rows, self.linear(x[rows]))


class Masked(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x[x > 0].mean()


class Unique(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / x.sign().unique().numel()


class Numeric(Part):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.from_numpy(np.sin(x.detach().numpy()))


class Looking(Part):
    """Takes another path if it finds its tensors to be fakes, as models of transformers do."""

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, torch._subclasses.FakeTensor):
            x = x[x > 0]
        return self.linear(x) if x.mean() > 0 else -x


class Around(nn.Module):
    """Two layers around `part`."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.stem, self.part, self.head = nn.Linear(WIDTH, WIDTH), part, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(self.stem(x).sin()))


KINDS = (Branch, Item, Listed, Nonzero, Masked, Unique, Numeric, Looking)


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_dependent_module_is_one_node_and_exact_at_other_batches(kind: type[Part]) -> None:
    captured_model = exact(Around(kind()), sample(7), batches=(4, 2, 7))
    assert called(captured_model.graph) == ["stem", "sin", "part", "head"]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_note_names_the_module_and_the_line(kind: type[Part]) -> None:
    captured_model = capture(Around(kind()), Arguments((sample(),), {}))
    lines, start = inspect.getsourcelines(kind)
    note, *_ = map(str, captured_model.notes)
    assert note.startswith("part asks for the values of tensors")
    assert any(f"test_data_dependence.py:{start + offset}" in note for offset in range(len(lines)))


def test_what_numpy_computes_alone_is_exact_too() -> None:
    class Sine(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.from_numpy(np.sin(x.detach().numpy()))

    exact(Around(Sine()), sample(7), batches=(4, 2, 7))


class Spectral(nn.Module):
    """A mask on a spectrum: `istft` asks whether its window is too small somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(8))
        self.mask = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """A tensor of shape (N, samples) to one of that shape."""
        window = self.get_buffer("window")
        spectrum = torch.stft(x, 8, 2, window=window, return_complex=True)
        mask = self.mask(spectrum.abs().transpose(1, 2)).sigmoid().transpose(1, 2)
        return torch.istft(spectrum * mask, 8, 2, window=window, length=x.shape[-1])


def test_an_inverse_of_a_spectrum() -> None:
    exact(Spectral(), torch.randn(6, 32), batches=(4, 2, 6))


@pytest.mark.parametrize(
    "ask", [torch.equal, Tensor.equal, torch.ops.aten.equal], ids=["function", "method", "operator"]
)
def test_whether_two_truth_values_are_equal_depends_on_data(ask: Any) -> None:
    yes = torch.ones((), dtype=torch.bool)

    class Asking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if ask(x.mean() > 0, yes) else -x

    assert called(exact(Around(Asking()), sample(7), batches=(4, 2, 7)).graph)[2] == "part"


def test_only_the_smallest_data_dependent_module_is_one_node() -> None:
    class Nested(Part):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Branch()

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.inner(x.cos()).exp())

    captured_model = exact(Around(Nested()), sample())
    assert called(captured_model.graph) == [
        "stem",
        "sin",
        "cos",
        "part.inner",
        "exp",
        "part.linear",
        "head",
    ]


class Selected(Part):
    """The size of its result depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)[x[:, 0] > 0]


class Summed(nn.Module):
    """A module around it, whose result has a fixed shape."""

    def __init__(self) -> None:
        super().__init__()
        self.selected = Selected()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.selected(x).sum(0)


def test_if_the_shape_of_the_result_depends_on_data_the_module_around_is_one_node() -> None:
    class Twice(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.part(self.part(self.stem(x))))

    captured_model = exact(Twice(Summed()), sample(7), batches=(4, 7))
    assert called(captured_model.graph) == ["stem", "part", "part", "head"]


def refusal(model: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        capture(model, Arguments((sample(),), {}))
    return str(caught.value)


def test_a_result_whose_shape_depends_on_data_up_to_the_root_is_refused() -> None:
    message = refusal(Around(Selected()))
    assert message.startswith("part (")
    assert "shape depends on the values of another" in message


def test_what_a_node_leaves_on_itself_is_to_be_returned() -> None:
    class Keeping(Part):
        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.linear(x).mean(1)
            return x if x.mean() > 0 else -x

    class Using(Around):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.part.kept[:, None]

    message = refusal(Using(Keeping()))
    assert "with that as one node: Using (" in message
    assert "part.kept is used, which the forward of part, that is one node, sets;" in message


@pytest.mark.one_case_in(6)
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_itself_cannot_be_one_node(kind: type[Part]) -> None:
    message = refusal(kind())
    line = int(message.split(f"{__file__}:")[1].partition(")")[0]) if __file__ in message else None
    lines, start = inspect.getsourcelines(kind)
    assert kind.__name__ in message
    assert "\n" not in message
    assert line is None or start <= line < start + len(lines)


def test_another_path_on_fakes_is_told_as_the_branch_on_data_that_it_is() -> None:
    class LookingAtNames(Part):
        def forward(self, x: Tensor) -> Tensor:
            if type(x).__name__ == "FakeTensor":
                x = x[x > 0]
            return self.linear(x) if x.mean() > 0 else -x

    message = refusal(Around(LookingAtNames()))
    assert message.startswith("part (") and "so stages could not know" in message


def test_calls_of_a_shared_module_have_their_own_answers() -> None:
    """The first call takes one branch, the second the other: each has its own answers."""

    class Shared(Around):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.part(x.abs()) + self.part(-x.abs()))

    model = Shared(Branch())
    captured_model = exact(model, sample(7), batches=(4, 2, 7))
    module = captured_model.instantiate(Arguments((sample(),), {}))
    first, second = (node for node in module.graph.nodes if node.target == "part")
    assert [answer.number for answer in first.meta["data_answers"]] == [True]
    assert [answer.number for answer in second.meta["data_answers"]] == [False]


def test_data_may_take_another_branch_than_the_sample() -> None:
    model = Around(Branch())
    call = Arguments((sample(),), {})
    module = capture(model, call).instantiate(call)
    for x in (sample(), sample() + 3, sample() - 3, -sample()):
        assert torch.equal(module(x)[0], model(x))


def test_a_loop_whose_end_depends_on_data() -> None:
    class Halving(Part):
        def forward(self, x: Tensor) -> Tensor:
            while x.abs().max() > 0.1:
                x = x / 2
            return self.linear(x)

    exact(Around(Halving()), sample(7), batches=(4, 7))


class Mixture(nn.Module):
    """Each sample goes to one of several experts; the module counts calls and has dropout."""

    def __init__(self, choose: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.choose = choose
        self.dropout = nn.Dropout(0.3)
        self.register_buffer("used", torch.zeros(3))

    def chosen(self, x: Tensor) -> Iterable[int]:
        return self.choose(x).unique().tolist()

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in self.chosen(x):
            rows = torch.nonzero(self.choose(x) == index)[:, 0]
            out[rows] = self.dropout(self.experts[index](x[rows]))
            self.used[index] += len(rows)
        return out


class EveryExpert(Mixture):
    def chosen(self, x: Tensor) -> Iterable[int]:
        return range(3)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("kind", [Mixture, EveryExpert])
def test_a_mixture_of_experts_one_of_which_is_empty(kind: type[Mixture]) -> None:
    exact(Around(kind(lambda x: (x[:, 0] > 0).long())), sample(7), batches=(4, 7))


def test_costs_and_memory_of_a_data_dependent_model_are_those_of_the_sample() -> None:
    model = Around(Mixture(lambda x: (x[:, 0] > 0).long()))
    pipeline = pipecompile(
        model,
        sample(8),
        2,
        loss_fn=lambda out, target: (out - target).square().mean(),
        costs="flops",
        microbatches=2,
    )
    wanted = pipeline.plan.stages
    assert len(wanted) == 2
    loss = pipeline.step(sample(8), sample(8))
    assert loss is not None
    assert torch.isfinite(loss)
    assert model.part.used.sum() == 8


class Rarely(Part):
    """Only if the mean is negative, it counts calls and has dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if x.mean() > 0:
            return self.linear(x)
        self.seen.add_(1)
        return nn.functional.dropout(self.linear(x), 0.5, self.training)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("recompute", ["none", "stage"])
def test_the_branch_that_the_sample_does_not_take_draws_and_writes(recompute: str) -> None:
    """A pipeline compiled on one branch and trained on the other equals the unsplit model."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Tanh(), Rarely()), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    )
    x = sample(8)
    target = Target(model, Arguments((x.abs(),), {}), sum_of_squares)
    pipeline = pipecompile(
        model,
        target.call,
        2,
        loss_fn=sum_of_squares,
        costs="flops",
        microbatches=4,
        recompute=recompute,
    )
    reference = reference_for(target, pipeline.plan)
    for step in range(2):
        for parameter in pipeline.parameters():
            parameter.grad = None
        loss = pipeline.step(-x.abs(), None)
        wanted = reference.step(
            replace(target, call=Arguments((-x.abs(),), {})), 4, seed=pipeline.seed, step=step
        )
        expected = {name: value.grad for name, value in reference.model.named_parameters()}
        assert torch.equal(loss, wanted)
        assert same({name: value.grad for name, value in pipeline.named_parameters()}, expected)
        assert model[0][1].seen == reference.model[0][1].seen == 4 * (step + 1)


def test_a_model_without_values_is_refused_since_there_are_no_answers() -> None:
    model = Around(Branch()).to("meta")
    with pytest.raises(CaptureError, match="branches on the values of a tensor"):
        capture(model, Arguments((torch.empty(4, WIDTH, device="meta"),), {}))


def test_the_data_probe_restores_parameters_that_the_forward_writes_to() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if x.sum() > 0 else x.cos()

    model = nn.Sequential(nn.Embedding(10, 8, max_norm=0.5), Branch(), nn.Linear(8, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    captured(model, torch.arange(4) % 10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Chosen(Part):
    """Returns one function of its input or another; `read` is what the model around it does with
    the result and the input.
    """

    def __init__(self, choose: Callable[[Tensor], bool], other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.choose, self.other = choose, other

    def forward(self, x: Tensor) -> Tensor:
        return x if self.choose(x) else self.other(x)


class Reading(nn.Module):
    """Goes one way or another, as `ask` says of the result of a part that branches on data."""

    def __init__(self, part: nn.Module, ask: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        self.part, self.ask, self.head = part, ask, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 1
        value = self.part(hidden)
        return self.head(value) if self.ask(value, hidden) else -self.head(value)


def transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


OTHER_WAYS: dict[str, Callable[[Tensor], bool]] = {
    "a sign": lambda x: bool(x.sum() > 0),
    "a size": lambda x: bool(x.norm() < 10 * WIDTH),
    "no zeros": lambda x: bool((x != 0).any()),
    "an order": lambda x: bool(x[0, 0] > x[-1, -1]),
    "a number": lambda x: x.max().item() > x.min().abs().item(),
    "a list": lambda x: x[0].tolist()[0] > 0,
}


def lowest_last(batch: int = 4) -> Tensor:
    """Positive numbers, the largest first."""
    return sample(batch).abs().flatten().sort(descending=True).values.view(batch, WIDTH)


@pytest.mark.parametrize("choose", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_an_identity_that_other_data_changes_is_refused(choose: Callable[[Tensor], bool]) -> None:
    model = Reading(Chosen(choose, torch.clone), lambda value, hidden: value is hidden)
    with pytest.raises(CaptureError, match=r"^on other data than the sample's \(.*not the model"):
        proven_capture(model, Arguments((lowest_last(),), {}))


@pytest.mark.parametrize("choose", OTHER_WAYS.values(), ids=OTHER_WAYS)
def test_a_branch_is_allowed_that_other_data_takes_the_other_way(
    choose: Callable[[Tensor], bool],
) -> None:
    model = Reading(Chosen(choose, transposed), lambda value, hidden: value.shape[1] == WIDTH)
    capture_, _, _ = proven_capture(model, Arguments((lowest_last(),), {}))
    assert "part" in called(capture_.graph)


def test_data_that_the_model_does_not_take_is_not_compared() -> None:
    def positive(x: Tensor) -> bool:
        assert (x > 0).all(), "positive numbers only"
        return True

    model = Reading(Chosen(positive, torch.clone), lambda value, hidden: True)
    proven_capture(model, Arguments((lowest_last(),), {}))
