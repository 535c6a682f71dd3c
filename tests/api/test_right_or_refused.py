"""What once ended in an error of torch: it trains as in a plain loop, or is refused in one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import steps_alike
from torch import Tensor, nn
from torch.nn.utils import prune, spectral_norm, weight_norm
from traps import WIDTH

from pipecompile import CaptureError, InputError, pipecompile

BATCHES = [torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(3)]
X = BATCHES[0]


def between(layer: nn.Module) -> nn.Module:
    """Two layers with another one between them."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), layer, nn.Linear(WIDTH, WIDTH))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "computed",
    [weight_norm, spectral_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.3)],
    ids=["weight_norm", "spectral_norm", "prune"],
)
@pytest.mark.parametrize("has_run", [False, True])
def test_weights_that_hooks_compute(
    computed: Callable[[nn.Module], nn.Module], has_run: bool
) -> None:
    torch.manual_seed(0)
    steps_alike(between(computed(nn.Linear(WIDTH, WIDTH))), BATCHES)
    if has_run:  # then the weight carries a gradient, and `deepcopy` would refuse the model
        model = between(computed(nn.Linear(WIDTH, WIDTH)))
        model(X)
        pipecompile(
            model, X, k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
        ).step(X, X)


class Sloped(nn.Module):
    """Takes a gradient in its forward."""

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return torch.autograd.grad((value**3).sum(), value, create_graph=True)[0]


class Sparse(nn.Module):
    """Has a sparse buffer."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("rows", torch.eye(WIDTH).to_sparse(layout=layout))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return (self.rows @ value.T).T


class Calling(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, value: Tensor) -> Tensor:
        return self.function(value)


def cubed_slope(value: Tensor) -> Tensor:
    return torch.func.grad(lambda v: (v**3).sum())(value)


def sparse_product(value: Tensor) -> Tensor:
    return (torch.eye(WIDTH).to_sparse() @ value.T).T


def csr_product(value: Tensor) -> Tensor:
    return (torch.eye(WIDTH).to_sparse_csr() @ value.T).T


NESTED = torch.nested.nested_tensor([torch.randn(3, WIDTH), torch.randn(4, WIDTH)])
COMPILES: dict[str, tuple[Any, Any, str]] = {
    "a function": (torch.sin, X, "the model is a builtin_function_or_method, but must be"),
    "no samples": (between(nn.Tanh()), X[:0], "the inputs have no samples"),
    "a sparse input": (between(nn.Tanh()), torch.eye(8).to_sparse(), "an input is sparse_coo"),
    "a CSR input": (between(nn.Tanh()), torch.eye(8).to_sparse_csr(), "an input is sparse_csr"),
    "a nested input": (between(nn.Tanh()), NESTED, "an input is nested"),
    "a sparse buffer": (between(Sparse(torch.sparse_coo)), X, "2.rows is sparse_coo"),
    "a CSR buffer": (between(Sparse(torch.sparse_csr)), X, "2.rows is sparse_csr"),
    "a gradient": (between(Sloped()), X, "the forward calls torch.autograd.grad"),
    "torch.func.grad": (between(Calling(cubed_slope)), X, "transforms a function (grad"),
    "a sparse product": (between(Calling(sparse_product)), X, "is sparse_coo, whose bytes no plan"),
    "a CSR product": (between(Calling(csr_product)), X, "is sparse_csr, whose bytes no plan"),
}


@pytest.mark.parametrize("what", COMPILES)
def test_what_cannot_be_compiled_is_refused_in_one_line(what: str) -> None:
    model, batch, message = COMPILES[what]
    with pytest.raises((InputError, CaptureError)) as caught:
        pipecompile(
            model, batch, k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("loss_fn", ["mse", 3, [nn.functional.mse_loss]])
def test_so_is_a_loss_that_is_no_function(loss_fn: Any) -> None:
    with pytest.raises(InputError, match=r"must be a function of \(output, target\)"):
        pipecompile(between(nn.Tanh()), X, k=2, costs="flops", loss_fn=loss_fn, microbatches=2)


def squared_slope(value: Tensor) -> Tensor:
    return torch.autograd.grad(value.square().sum(), value, create_graph=True)[0]


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (sparse_product, "it computes with sparse tensors"),
        (csr_product, "it computes with sparse tensors"),
        (cubed_slope, "it computes a derivative"),
    ],
)
def test_so_is_a_module_of_one_node_that_costs_cannot_run(
    function: Callable[[Tensor], Tensor], why: str
) -> None:
    message = f"^2: this cannot be run by itself, which costs and memory need: {why}"
    with pytest.raises(CaptureError, match=message) as caught:
        pipecompile(between(Calling(function)), X, k=2, costs="flops", leaf=("2",), microbatches=2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("recompute", ["none", "block", "stage"])
def test_a_module_of_one_node_may_differentiate_what_it_is_given(recompute: str) -> None:
    model = between(Calling(squared_slope))
    steps_alike(model, [X, X + 1], k=3, microbatches=2, leaf=("2",), recompute=recompute)


def square(output: Tensor, target: Any) -> Tensor:
    return nn.functional.mse_loss(output, target)


STEPS: dict[str, tuple[Callable[[Tensor, Any], Tensor], Any, bool, str]] = {
    "no target": (square, None, True, "give the step one: step(batch, target)"),
    "a detached loss": (lambda o, _: o.detach().sum(), X, True, "the loss carries no gradient"),
    "a loss of indices": (lambda o, _: o.argmax().float(), X, True, "the loss carries no gradient"),
    "nothing to train": (square, X, False, "no parameter of the model requires a gradient"),
}


@pytest.mark.parametrize("what", STEPS)
def test_a_step_that_trains_nothing_is_refused(what: str) -> None:
    loss_fn, target, trains, message = STEPS[what]
    model = between(nn.Tanh()).requires_grad_(trains)
    pipeline = pipecompile(model, X, k=2, costs="flops", loss_fn=loss_fn, microbatches=2)
    with pytest.raises(InputError) as caught:
        pipeline.step(X, target)
    assert message in str(caught.value)


@torch.inference_mode()
def inference() -> Tensor:
    return X.clone()


INPUTS: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (X.to_sparse, "input is sparse_coo, of which no microbatches can be cut"),
    "CSR": (X.to_sparse_csr, "input is sparse_csr, of which no microbatches can be cut"),
    "nested": (lambda: NESTED, "input is nested, of which no microbatches can be cut"),
    "without values": (lambda: X.to("meta"), "input is on the meta device"),
    "a leaf with a gradient": (X.clone().requires_grad_, "input requires a gradient"),
    "of another layer": (lambda: nn.Linear(WIDTH, WIDTH)(X), "input requires a gradient"),
    "made in inference mode": (inference, "input was made under torch.inference_mode"),
}


@pytest.mark.parametrize("what", INPUTS)
def test_an_input_that_no_step_can_take_is_refused_in_one_line(what: str) -> None:
    make, message = INPUTS[what]
    pipeline = pipecompile(
        between(nn.Tanh()), X, k=2, costs="flops", loss_fn=square, microbatches=2
    )
    with pytest.raises(InputError) as caught:
        pipeline.step(make(), X)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_so_is_one_without_gradients_around_it(without: Callable[[], Any]) -> None:
    pipeline = pipecompile(
        between(nn.Tanh()), X, k=2, costs="flops", loss_fn=square, microbatches=2
    )
    with without(), pytest.raises(InputError, match="gradients are switched off around it"):
        pipeline.step(X, X)
    pipeline.step(X, X)


# -- losses and hooks


def run_with(model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], **options: Any) -> None:
    """Two steps of a pipeline of two stages."""
    pipeline = pipecompile(model, X, k=2, costs="flops", loss_fn=loss_fn, **options)
    pipeline.step(X, X)
    pipeline.step(X, X)


HEAD = nn.Linear(WIDTH, 1)
TEMPERATURE = nn.Parameter(torch.ones(()))


class LossLayer(nn.Module):
    """A loss with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Two tensors of shape (N, WIDTH) to a scalar."""
        return (self.scale * (output - target)).square().mean()


MODEL, SCALED = between(nn.Tanh()), LossLayer()
TRAINING_LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "a layer": lambda output, _: HEAD(output).square().mean(),
    "a function around a module": lambda output, target: SCALED(output, target),
    "a parameter": lambda output, target: ((output - target) * TEMPERATURE).square().mean(),
    "a penalty on the model": lambda output, _: (
        output.square().mean() + sum(p.square().sum() for p in MODEL.parameters())
    ),
    "a weight of the model": lambda output, _: (output @ MODEL[0].weight).square().mean(),
    "beside metrics": lambda output, _: (HEAD(output).square().mean(), output),
}


@pytest.mark.parametrize("name", TRAINING_LOSSES)
def test_a_loss_that_trains_something_else_is_refused(name: str) -> None:
    seen = (
        "reads .* of the model" if "the model" in name else "trains a tensor of shape .* no output"
    )
    with pytest.raises(InputError, match=f"loss_fn {seen}"):
        run_with(MODEL, TRAINING_LOSSES[name])
    assert all(parameter.grad is None for parameter in (*HEAD.parameters(), TEMPERATURE))


class Decaying(nn.Module):
    """A model with a buffer that its forward writes to, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("level", torch.ones(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        self.level.mul_(0.9)
        return self.last(torch.tanh(self.frozen(self.first(value))))


def _without_gradient(model: Decaying) -> Tensor:
    with torch.no_grad():
        return model.first.weight.norm()


def _gradient_norm(model: Decaying) -> Tensor | float:
    # A step begins without gradients, and puts those of an earlier one aside.
    gradient = model.last.bias.grad
    return 0.0 if gradient is None else gradient.norm()


READS: dict[str, tuple[Callable[[Decaying], Any], str]] = {
    "detach": (lambda model: model.first.weight.detach().norm(), "first.weight"),
    "no_grad": (_without_gradient, "last.weight|first.weight"),
    "item": (lambda model: model.last.bias[0].item(), "last.bias"),
    "data": (lambda model: model.last.bias.data.sum(), "last.bias"),
    "a buffer": (lambda model: model.level.mean(), "level"),
    "a gradient": (_gradient_norm, "last.bias.grad"),
    "whether there is a gradient": (
        lambda model: 1.0 if model.last.bias.grad is None else 2.0,
        "last.bias.grad",
    ),
    "a frozen layer": (lambda model: model.frozen(X).mean(), "frozen.weight"),
    "numpy": (lambda model: float(model.frozen.weight.numpy().sum()), "frozen.weight"),
}


@pytest.mark.parametrize("name", READS)
def test_a_loss_that_reads_state_of_the_model_is_refused(name: str) -> None:
    read, seen = READS[name]
    model, calls = Decaying(), []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        calls.append(name)
        extra = read(model) if len(calls) > 2 else 0.0
        return (output - target).square().mean() + extra

    pipeline = pipecompile(model, X, k=2, microbatches=2, costs="flops", loss_fn=loss_fn)
    pipeline.step(X, X)
    with pytest.raises(InputError, match=f"loss_fn reads ({seen}) of the model"):
        pipeline.step(X, X)


def test_a_loss_may_read_what_is_its_own_and_shapes_of_the_model() -> None:
    model, weight = Decaying(), torch.rand(WIDTH)
    steps_alike(
        between(nn.Tanh()),
        BATCHES,
        loss_fn=lambda output, _: (output * weight).abs().mean() / len(model.first.weight),
    )


def test_a_loss_may_compute_with_sparse_tensors() -> None:
    steps_alike(
        between(nn.Tanh()),
        BATCHES,
        loss_fn=lambda output, _: (torch.eye(WIDTH).to_sparse() @ output.T).square().mean(),
    )


def _raise(output: Tensor, target: Tensor) -> Tensor:
    raise KeyError("nothing")


RAISING_LOSSES: dict[str, tuple[Callable[[Any, Any], Tensor], str]] = {
    "of its own": (_raise, r"KeyError: 'nothing'"),
    "of shapes": (lambda output, target: (output @ target).mean(), r"RuntimeError: .*shapes"),
    "of a type": (nn.functional.nll_loss, r"RuntimeError: .*"),
    "of an attribute": (lambda output, _: output.logits, r"AttributeError: .*logits"),
}


@pytest.mark.parametrize("name", RAISING_LOSSES)
@pytest.mark.parametrize("how", ["step", "evaluate"])
def test_what_a_loss_raises_is_said_with_what_it_was_given(name: str, how: str) -> None:
    loss_fn, raised = RAISING_LOSSES[name]
    pipeline = pipecompile(
        between(nn.Tanh()), X, k=2, microbatches=2, costs="flops", loss_fn=loss_fn
    )
    with pytest.raises(
        InputError, match=f"loss_fn raised {raised}.*given the output torch.float32"
    ):
        getattr(pipeline, how)(X, X)


def test_a_loss_that_is_given_parts_of_class_weights_is_told_the_way() -> None:
    """Eight classes, and eight samples: weights of classes are cut as if they were of samples."""

    def weighted(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, target["classes"], weight=target["weights"])

    target = {"classes": torch.zeros(8, dtype=torch.long), "weights": torch.ones(WIDTH)}
    pipeline = pipecompile(
        between(nn.Tanh()), X, k=2, microbatches=2, costs="flops", loss_fn=weighted
    )
    with pytest.raises(InputError, match=r"weight tensor .* target_batch_dims, as \(0, None\)"):
        pipeline.step(X, target)


class LaterLoss:
    """A loss that begins at its sixth call to train what `begin` adds to it."""

    def __init__(self, begin: Callable[[Tensor], Tensor]) -> None:
        self.begin, self.calls = begin, 0

    def __call__(self, output: Tensor, _: Tensor) -> Tensor:
        """Two tensors of shape (N, WIDTH) to a scalar."""
        self.calls += 1
        extra = self.begin(output) if self.calls > 5 else torch.zeros(())
        return output.square().mean() + extra


def _unfreeze_and_apply(output: Tensor) -> Tensor:
    return HEAD.requires_grad_(True)(output).mean()


@pytest.mark.parametrize(
    "begin", [lambda _: TEMPERATURE.square(), _unfreeze_and_apply], ids=["penalty", "layer"]
)
def test_a_loss_that_begins_later_to_train_something_else_is_refused(
    begin: Callable[[Tensor], Tensor],
) -> None:
    loss_fn = LaterLoss(begin)
    pipeline = pipecompile(MODEL, X, k=2, microbatches=2, costs="flops", loss_fn=loss_fn)
    pipeline.step(X, X)
    pipeline.step(X, X)
    with pytest.raises(InputError, match=r"loss_fn trains a tensor of shape .* that is no output"):
        pipeline.step(X, X)
    assert loss_fn.calls == 6
    assert all(parameter.grad is None for parameter in HEAD.parameters())


def test_a_loss_with_frozen_layers_trains() -> None:
    torch.manual_seed(0)
    frozen = nn.Linear(WIDTH, 1).requires_grad_(False)
    steps_alike(between(nn.Tanh()), BATCHES, loss_fn=lambda output, _: frozen(output).abs().mean())


class TwiceRead(nn.Module):
    """A weight that the first and the last stage read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.last(torch.tanh(self.first(value)))


def test_hooks_on_gradients_run_on_whole_gradients_or_are_refused() -> None:
    torch.manual_seed(0)
    tied = TwiceRead()
    tied.first.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    with pytest.raises(InputError, match=r"first.weight has a hook on its gradient, but is tied"):
        run_with(tied, nn.functional.mse_loss)
    late = between(nn.Tanh())
    late[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(InputError, match=r"0.weight has a post-accumulate hook"):
        run_with(late, nn.functional.mse_loss)
    added = TwiceRead()
    pipeline = pipecompile(
        added, X, k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
    )
    pipeline.step(X, X)
    handle = added.last.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(InputError, match="is tied over stages"):
        pipeline.step(X, X)
    handle.remove()
    pipeline.step(X, X)


class Asking(nn.Module):
    """Does something else for another layout."""

    def __init__(self, ask: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.ask = nn.Linear(WIDTH, WIDTH), ask

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        answer = self.ask(value)
        return self.layer(answer if isinstance(answer, Tensor) else value * (1 + bool(answer)))


LAYOUTS: dict[str, Callable[[Tensor], Any]] = {
    "is_contiguous": lambda value: value.is_contiguous(),
    "stride": lambda value: value.stride(0) == 1,
    "strides": lambda value: value.stride() == (1, WIDTH),
    "as_strided": lambda value: value.as_strided(value.shape, value.stride()),
    "torch.as_strided": lambda value: torch.as_strided(value, value.shape, (WIDTH, 1)),
    "of a view": lambda value: value[:, 1:].is_contiguous(),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_of_an_input_is_refused_where_the_forward_asks(name: str) -> None:
    model = Asking(LAYOUTS[name])
    pipeline = pipecompile(model, X, k=1, microbatches=2, costs="flops")
    pipeline.evaluate(X)
    for other in (X.mT, torch.cat([X, X], 1)[:, ::2]):
        with pytest.raises(InputError, match=r"value has strides .* asks for them; give tensors"):
            pipeline.evaluate(other)
    pipeline.evaluate(X[:5])


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    order=st.permutations(range(3)),
    steps=st.tuples(*[st.integers(1, 2)] * 3),
    offset=st.integers(0, 3),
)
def test_any_layout_is_right_or_refused(
    name: str, order: list[int], steps: tuple[int, ...], offset: int
) -> None:
    """Rows of any strides, that begin anywhere in memory."""
    model, pipeline = _asking(name)
    sizes = (8, 1, WIDTH)
    large = [sizes[dim] * steps[dim] for dim in order]
    memory = torch.randn(offset + math.prod(large), generator=torch.Generator().manual_seed(1))
    whole = memory[offset:].view(large).permute([order.index(dim) for dim in range(3)])
    rows = whole[:: steps[0], :: steps[1], :: steps[2]][:, 0]
    wanted = torch.cat([model(part) for part in rows.chunk(2)])
    if rows.stride() == X.stride():
        assert torch.equal(pipeline.evaluate(rows), wanted)
    else:
        with pytest.raises(InputError, match="asks for them; give tensors that lie in memory"):
            pipeline.evaluate(rows)


@cache
def _asking(name: str) -> tuple[nn.Module, Any]:
    model = Asking(LAYOUTS[name])
    return model, pipecompile(model, X, k=1, microbatches=2, costs="flops")


def test_another_layout_is_taken_where_nobody_asks() -> None:
    torch.manual_seed(0)
    steps_alike(between(nn.Tanh()), [X, X.mT, torch.cat([X, X], 1)[:, ::2]])


def test_targets_are_cut_as_they_are_told() -> None:
    torch.manual_seed(0)
    labels, weights = torch.rand(8, WIDTH), torch.rand(WIDTH)
    model = between(nn.Tanh())
    unsplit = between(nn.Tanh())
    unsplit.load_state_dict(model.state_dict())

    def loss_fn(output: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return ((output - target[0].mT).square() * target[1]).mean()

    pipeline = pipecompile(
        model, X, k=2, microbatches=2, costs="flops", loss_fn=loss_fn, target_batch_dims=(1, None)
    )
    loss = pipeline.step(X, (labels.mT, weights))
    parts = zip(X.chunk(2), labels.chunk(2), strict=True)
    losses = [loss_fn(unsplit(x), (y.mT, weights)) for x, y in parts]
    torch.stack(losses).mean().backward()
    assert torch.equal(loss, torch.stack(losses).mean())
    for own, other in zip(model.parameters(), unsplit.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)
    assert torch.equal(
        pipeline.evaluate(X, (labels.mT, weights)), pipeline.evaluate(X, (labels.mT, weights))
    )
    with pytest.raises(InputError, match="target_batch_dims"):
        run_with(between(nn.Tanh()), lambda output, _: output.mean(), sample_target=torch.ones(2))


class Scaled(nn.Module):
    """Makes a number of a tensor that is neither a parameter nor a buffer."""

    def __init__(self, number: Callable[[Tensor], float]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale, self.number = torch.tensor(2.0), number

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return self.last(torch.tanh(self.first(value))) * self.number(self.scale)


NUMBERS: dict[str, Callable[[Tensor], float]] = {
    "item": lambda scale: scale.item(),
    "float": float,
    "int": int,
    "tolist": lambda scale: scale.tolist(),
    "bool": lambda scale: 2 if scale else 1,
    "item of a view": lambda scale: scale.view(1)[0].item(),
    "comparison": lambda scale: 3 if scale.item() > 1 else 1,
}


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("name", [name for name in NUMBERS if name != "item of a view"])
@pytest.mark.parametrize("change", [Tensor.zero_, lambda scale: scale.data.fill_(-1)])
def test_a_number_of_a_tensor_that_changes_is_refused(
    name: str, change: Callable[[Tensor], object]
) -> None:
    torch.manual_seed(0)
    model = Scaled(NUMBERS[name])
    steps_alike(model, BATCHES)
    pipeline = pipecompile(
        model, X, k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
    )
    pipeline.step(X, X)
    change(model.scale)
    for run in (lambda: pipeline.step(X, X), lambda: pipeline.evaluate(X)):
        with pytest.raises(InputError, match="makes a number of a tensor that has changed"):
            run()
    model.scale.fill_(2)
    pipeline.step(X, X)


def test_a_number_of_what_is_computed_from_a_tensor_is_refused_at_once() -> None:
    with pytest.raises(CaptureError, match="reads a number out of a tensor"):
        run_with(Scaled(NUMBERS["item of a view"]), nn.functional.mse_loss)


class KeywordNames(nn.Module):
    """Its modules and parameters have names that Python's grammar keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.by_name = nn.ModuleDict({n: nn.Linear(WIDTH, WIDTH) for n in ("class", "in", "a-b")})
        self.register_parameter("import", nn.Parameter(torch.ones(WIDTH)))
        self.register_buffer("not", torch.full((WIDTH,), 2.0))
        self.add_module("0", nn.LayerNorm(WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        for layer in self.by_name.values():
            value = layer(value).tanh()
        return getattr(self, "0")(value * getattr(self, "import")) + getattr(self, "not")


@pytest.mark.parametrize("k", [1, 2, 3])
def test_names_that_are_keywords_of_python(k: int) -> None:
    steps_alike(KeywordNames(), BATCHES, k=k)


class NoisyGradient(torch.autograd.Function):
    """Adds noise to the gradient, by one of many ways to draw."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, draw: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.draw = draw
        return value * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient + ctx.draw(gradient), None


class Noisy(nn.Module):
    """Draws in its backward."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return NoisyGradient.apply(value, self.draw)


@pytest.mark.parametrize(
    "draw",
    [
        torch.randn_like,
        torch.nn.functional.dropout,
        torch.bernoulli,
        lambda gradient: gradient * torch.rand(()),
        lambda gradient: gradient[torch.randperm(len(gradient))],
        lambda gradient: torch.empty_like(gradient).uniform_(),
    ],
    ids=["randn_like", "dropout", "bernoulli", "rand", "randperm", "uniform_"],
)
def test_a_backward_that_draws_is_refused(draw: Callable[[Tensor], Tensor]) -> None:
    if draw is torch.bernoulli:
        model = between(Noisy(lambda gradient: torch.bernoulli(gradient.sigmoid())))
    else:
        model = between(Noisy(draw))
    with pytest.raises(CaptureError, match="the backward of the model draws random numbers"):
        pipecompile(model, X, k=2, costs="flops", microbatches=2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_type_that_changes_is_refused(dtype: torch.dtype) -> None:
    model = between(nn.Linear(WIDTH, WIDTH))
    pipeline = pipecompile(
        model, X, k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
    )
    model[2].to(dtype)
    with pytest.raises(InputError, match=r"2.weight is torch.*, but was torch.float32"):
        pipeline.step(X, X)


class Noise(nn.Module):
    """Adds noise in both modes."""

    def forward(self, value: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        return value + torch.randn_like(value)


def test_each_evaluation_has_noise_of_its_own() -> None:
    pipeline = pipecompile(
        between(Noise()), X, k=2, costs="flops", loss_fn=nn.functional.mse_loss, microbatches=2
    )
    first, second = pipeline.evaluate(X), pipeline.evaluate(X)
    assert not torch.equal(first, second)
