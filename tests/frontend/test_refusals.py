"""A refusal is one line that names the module, the line of the model and a way out."""

from __future__ import annotations

import inspect
import os
import secrets
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from zoo import captured

from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.failing_model import ModelFailsError
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments, arguments_of


class Inner(nn.Module):
    """Its forward does what `act` does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)

    def act(self, x: Tensor) -> Any:
        raise NotImplementedError


class Outer(nn.Module):
    """Layers before and after, so that the refusal has to name the module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Identity(), inner])

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for block in self.blocks:
            x = block(x)
        return x * 2


def refusal(inner: Inner) -> str:
    with pytest.raises(CaptureError) as caught:
        captured(Outer(inner), torch.randn(4, 4))
    message = str(caught.value)
    assert "\n" not in message
    return message


def line(function: Any, text: str) -> int:
    lines, start = inspect.getsourcelines(function)
    return start + next(index for index, source in enumerate(lines) if text in source)


def test_an_assignment_to_data() -> None:
    class Assigns(Inner):
        def act(self, x: Tensor) -> Tensor:
            hidden = x * 2
            hidden.data = torch.zeros(4, 4)
            return hidden

    message = refusal(Assigns())
    assert message.startswith("blocks.1 (")
    assert f"test_refusals.py:{line(Assigns.act, 'hidden.data =')})" in message
    assert "assigns to an attribute of a tensor" in message


def test_a_failure_of_the_model_itself_is_reported_with_its_line() -> None:
    class Fails(Inner):
        def act(self, x: Tensor) -> Tensor:
            return x @ torch.zeros(5, 5)

    message = refusal(Fails())
    assert message.startswith("blocks.1 (")
    assert f"test_refusals.py:{line(Fails.act, 'torch.zeros(5, 5)')})" in message
    assert "the model itself fails on the sample input: RuntimeError: " in message
    assert "mat1 and mat2" in message  # torch 2.15 names the operator before it


def test_a_model_that_fails_is_restored() -> None:
    class Counts(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def act(self, x: Tensor) -> Tensor:
            self.calls += torch.rand(())
            raise ValueError("labels missing\n(of all samples)")

    model, sample = Outer(Counts()), torch.randn(4, 4)
    before = torch.get_rng_state()
    with pytest.raises(ModelFailsError, match=r"labels missing; give a sample .* x of \(4, 4\);"):
        captured(model, sample)
    assert not model.get_buffer("blocks.1.calls")
    assert torch.equal(torch.get_rng_state(), before)


def test_what_fails_on_fakes_alone_is_no_failure_of_the_model() -> None:
    class Plain(Inner):
        def act(self, x: Tensor) -> Tensor:
            if type(x) is not Tensor:
                raise TypeError("plain tensors alone")
            return x.sin()

    assert "cannot run on fake tensors: TypeError: plain tensors alone" in refusal(Plain())


def test_a_model_without_values_fails_on_fakes() -> None:
    class Fails(Inner):
        def act(self, x: Tensor) -> Tensor:
            raise ValueError("labels missing")

    model = Outer(Fails()).to("meta")
    with pytest.raises(CaptureError, match="cannot run on fake tensors: ValueError: labels"):
        captured(model, torch.randn(4, 4, device="meta"))


def test_so_is_one_behind_a_branch_on_data() -> None:
    """What the first recording could not do is no cause, since the model itself fails later."""

    class Branches(Inner):
        def act(self, x: Tensor) -> Tensor:
            if x.sum() > -1e9:
                x = x.sin()
            first, second = x.split(1, dim=1)
            return first + second

    message = refusal(Branches())
    assert f"test_refusals.py:{line(Branches.act, 'first, second')})" in message
    assert "ValueError: too many values to unpack" in message and "branches" not in message


def test_a_failure_inside_a_torch_module_is_reported_with_its_path() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x)

    with pytest.raises(CaptureError, match=r"^body\.1 \("):
        captured(Wrong(), torch.randn(4, 4))


@pytest.mark.parametrize("name", ["graph", "code", "meta", "recompile", "_code", "shape_env"])
@pytest.mark.parametrize("kind", [nn.Module, nn.Parameter, Tensor])
def test_a_name_that_modules_of_graphs_have_themselves(name: str, kind: type) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            if kind is nn.Module:
                self.add_module(name, nn.Sequential(nn.Linear(4, 4)))
            elif kind is nn.Parameter:
                self.register_parameter(name, nn.Parameter(torch.ones(4)))
            else:
                self.register_buffer(name, torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            own = getattr(self, name)
            return own(x) if kind is nn.Module else self.linear(x) * own

    with pytest.raises(CaptureError, match=f"called '{name}', a name that .*; rename it"):
        captured(Named(), torch.randn(4, 4))


def test_a_name_of_modules_of_graphs_within_a_submodule() -> None:
    class Inside(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.graph, self.meta = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def act(self, x: Tensor) -> Tensor:
            return self.graph(x) * self.meta

    captured(Outer(Inside()), torch.randn(4, 4))


def test_a_cache_is_left_out_of_the_output() -> None:
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, use_cache=True
    )
    model = transformers.GPT2LMHeadModel(config)
    capture, _ = captured(model, input_ids=torch.randint(0, 16, (4, 8)))
    assert capture.outputs.is_tensor.count(True) == 1
    assert capture.outputs.unflatten([torch.ones(1)]).past_key_values is None


def test_parameters_without_a_shape() -> None:
    with pytest.raises(
        InputError, match="has parameters without a shape yet; run the model once first"
    ):
        captured(Outer(nn.Sequential(nn.LazyLinear(4))), torch.randn(4, 4))


def test_inference_mode() -> None:
    model = nn.Linear(4, 4)
    with (
        torch.inference_mode(),
        pytest.raises(InputError, match=r"leave torch\.inference_mode first"),
    ):
        captured(model, torch.randn(4, 4))


def by_leaf(x: Tensor) -> bool:
    return x.is_leaf


def by_grad_fn(x: Tensor) -> bool:
    return x.grad_fn is None


class AsksInLayer(nn.Linear):
    """A layer, which is one node, that asks something of what it is given."""

    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__(4, 4)
        self.ask = ask

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * (1 + self.ask(input))


class AsksBehindData(nn.Module):
    """One node since it branches on data."""

    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.ask(x)) if x.sum() > -1e9 else x


class AsksOutside(AsksBehindData):
    """Is taken apart, so that its answer is that of the whole model."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.ask(x))


def between(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), module, nn.Linear(4, 4))


def asking_hook(ask: Callable[[Tensor], bool]) -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda _, args: (args[0] * (1 + ask(args[0])),))
    return layer


@pytest.mark.parametrize("kind", [AsksInLayer, AsksBehindData, asking_hook])
@pytest.mark.parametrize("ask", [by_leaf, by_grad_fn])
def test_a_node_that_asks_how_its_argument_was_computed(
    kind: Callable[..., nn.Module], ask: Callable[[Tensor], bool]
) -> None:
    """At the beginning of a stage it has no history."""
    properties = dict(vars(Tensor))
    match = r"^1 \(\S*test_refusals.py:\d+\): the module is one node and asks how its argument"
    with pytest.raises(CaptureError, match=match):
        proven_capture(between(kind(ask)), Arguments((torch.randn(4, 4),), {}))
    assert dict(vars(Tensor)) == properties


@pytest.mark.parametrize(
    "model",
    [
        between(AsksOutside(by_leaf)),
        between(AsksOutside(by_grad_fn)),
        between(AsksInLayer(lambda x: x.requires_grad)),
        between(AsksInLayer(lambda x: by_grad_fn(x.detach()))),
        nn.Sequential(AsksInLayer(by_leaf), nn.Linear(4, 4)),
    ],
)
def test_questions_whose_answer_no_cut_changes(model: nn.Module) -> None:
    proven_capture(model, Arguments((torch.randn(4, 4),), {}))


class Trainer:
    """Holds no tensor."""


def test_a_weak_proxy_of_what_is_gone() -> None:
    """As Lightning leaves one of its trainer: torch itself cannot ask for its class."""
    model, trainer = nn.Sequential(nn.Linear(4, 4)), Trainer()
    model[0].trainer = weakref.proxy(trainer)
    captured(model, torch.randn(4, 4))
    del trainer
    with pytest.raises(InputError, match=r"^0 has an attribute 'trainer', a weak proxy of .* gone"):
        captured(model, torch.randn(4, 4))


def test_a_forward_that_is_no_function_of_python() -> None:
    own = nn.Linear(4, 4)
    own.forward = torch.relu  # type: ignore[method-assign]
    for model in (torch.jit.trace(nn.Linear(4, 4), torch.randn(4, 4)), own):  # type: ignore[no-untyped-call]
        with pytest.raises(InputError, match="is no function of Python; give the Python module"):
            arguments_of(model, torch.randn(4, 4))


def test_a_scripted_module() -> None:
    scripted = torch.jit.script(nn.ReLU())
    with pytest.raises(InputError, match=r"^1 is a scripted module; give the Python module"):
        captured(nn.Sequential(nn.Linear(4, 4), scripted), torch.randn(4, 4))


def last_ones(module: nn.Module, prefix: str = "", **which: Any) -> Any:
    named = nn.Module.named_parameters(module, prefix, **which)
    return (each for each in named if each[0].startswith("blocks"))


def test_methods_that_give_other_parameters_than_modules_hold() -> None:
    class Chosen(Outer):
        named_parameters = last_ones

    class Listed(Outer):
        def parameters(self, recurse: bool = True) -> Any:
            return self.linear.parameters()

    class Plain(Outer):
        def named_parameters(self, prefix: str = "") -> Any:  # type: ignore[override]
            return super().named_parameters(prefix)

    for kind, method in ((Chosen, "named_p"), (Listed, "p"), (Plain, "named_p")):
        with pytest.raises(InputError, match=f"^the model has a method {method}arameters of its"):
            captured(kind(nn.Linear(4, 4)), torch.randn(4, 4))
    with pytest.raises(InputError, match=r"^blocks\.1 has a method named_parameters of its"):
        captured(Outer(Chosen(nn.Linear(4, 4))), torch.randn(4, 4))


def test_methods_that_give_the_parameters_that_modules_hold() -> None:
    class Counting(Outer):
        def parameters(self, recurse: bool = True) -> Any:
            self.asked = True
            return super().parameters(recurse)

    model = Counting(nn.Linear(4, 4))
    captured(model, torch.randn(4, 4))


def test_a_failure_with_lines_of_values_is_one_line() -> None:
    class Differentiates(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            raise KeyError(torch.eye(3))

    class Fails(Inner):
        def act(self, x: Tensor) -> Tensor:
            return Differentiates.apply(x)

    assert "of the model itself fails on the sample input: KeyError: " in refusal(Fails())


def test_a_sparse_gradient() -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    with pytest.raises(CaptureError, match=r"the gradient of 0.weight is sparse"):
        captured(model, torch.randint(0, 8, (4, 3)))


def test_an_input_that_requires_a_gradient() -> None:
    with pytest.raises(InputError, match=r"the input 'input' requires a gradient"):
        captured(nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4, requires_grad=True))


def cond(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def while_loop(layer: nn.Module, x: Tensor) -> Tensor:
    def again(count: Tensor, value: Tensor) -> Tensor:
        return count < 3

    def once(count: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return count + 1, value * 1.5

    return torch.while_loop(again, once, (torch.tensor(0), x))[1]


def exact_type(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if type(x) is torch.Tensor else x


def exact_class(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if x.__class__ is torch.Tensor else x


def type_of_a_weight(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x) if type(layer.weight) is nn.Parameter else x


def is_fake(layer: nn.Module, x: Tensor) -> Tensor:
    return x if isinstance(x, FakeTensor) else layer(x)


OF_SYSTEM = "the system's random numbers"


def from_secrets(layer: nn.Module, x: Tensor) -> Tensor:
    return x * secrets.randbits(60)


def from_the_system(layer: nn.Module, x: Tensor) -> Tensor:
    return x * int.from_bytes(os.urandom(7), "big")


def from_the_clock(layer: nn.Module, x: Tensor) -> Tensor:
    # The last digits: in float32 all nanoseconds are the same number for some milliseconds.
    return x * (time.perf_counter_ns() % 100_003)


def from_own_generator(layer: nn.Module, x: Tensor) -> Tensor:
    return x * GENERATOR.random()


def nested(layer: nn.Module, x: Tensor) -> Tensor:
    parts = torch.nested.nested_tensor([torch.ones(3, 4), torch.ones(2, 4)], layout=torch.jagged)
    return x + parts.values().sum()


GENERATOR = np.random.default_rng(0)
UNSEEDED = "two steps of the model itself differ for the same seed"
EXACT_TYPE = "the exact type of a tensor"
CAUSES: dict[Callable[[nn.Module, Tensor], Tensor], str] = {
    cond: "the forward calls cond, whose branches",
    while_loop: "the forward calls while_loop, whose branches",
    exact_type: EXACT_TYPE,
    exact_class: EXACT_TYPE,
    type_of_a_weight: EXACT_TYPE,
    is_fake: EXACT_TYPE,
    from_secrets: OF_SYSTEM,
    from_the_system: OF_SYSTEM,
    from_the_clock: UNSEEDED,
    from_own_generator: UNSEEDED,
    nested: "is nested, whose bytes no plan counts",
}


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("function", CAUSES, ids=lambda function: function.__name__)
def test_the_cause_is_named(function: Callable[[nn.Module, Tensor], Tensor]) -> None:
    class Does(Inner):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def act(self, x: Tensor) -> Tensor:
            return function(self.layer, x)

    with pytest.raises(CaptureError) as caught:
        proven_capture(Outer(Does()), Arguments((torch.randn(4, 4),), {}))
    message = str(caught.value)
    assert CAUSES[function] in message
    assert "\n" not in message and " at 0x" not in message and len(message) < 700


@pytest.mark.parametrize("part", ["itself", "a view"])
@pytest.mark.parametrize("question", [Tensor.storage_offset, Tensor.data_ptr])
def test_where_an_input_begins_is_refused(question: Callable[[Tensor], int], part: str) -> None:
    with pytest.raises(CaptureError, match=r"asks where its input begins .*\(clone\)"):
        captured(Begins(question, part), torch.randn(4, 4))


def test_where_a_copy_begins_is_not() -> None:
    captured(Begins(Tensor.storage_offset, "a copy"), torch.randn(4, 4))


class Begins(nn.Module):
    """Asks where its input begins, or a part or a copy of it."""

    def __init__(self, question: Callable[[Tensor], int], part: str) -> None:
        super().__init__()
        self.question, self.part = question, part

    def forward(self, x: Tensor) -> Tensor:
        of = {"itself": x, "a view": x[1:].mT, "a copy": x.clone()}[self.part]
        return x * (2 if self.question(of) == 0 else 3)


class Experts(nn.Module):
    """Routes rows to two layers, as `dispatch` says."""

    def __init__(self, dispatch: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.dispatch = nn.Linear(4, 2), dispatch
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.dispatch(self, x)

    def chosen(self, x: Tensor) -> Tensor:
        """The number of the expert for each row of (N, 4)."""
        return self.gate(x).argmax(-1)


def by_index(model: Any, x: Tensor) -> Tensor:
    chosen, out = model.chosen(x), torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        (rows,) = torch.where(chosen == number)
        out = out.index_add(0, rows, expert(x[rows]))
    return out


def by_mask(model: Any, x: Tensor) -> Tensor:
    chosen, out = model.chosen(x), torch.zeros_like(x)
    for number, expert in enumerate(model.experts):
        out[chosen == number] = expert(x[chosen == number])
    return out


def by_count(model: Any, x: Tensor) -> Tensor:
    chosen = model.chosen(x)
    order = chosen.argsort(stable=True)
    parts = x[order].split(torch.bincount(chosen, minlength=2).tolist())
    made = [expert(part) for expert, part in zip(model.experts, parts, strict=True)]
    return torch.zeros_like(x).index_copy(0, order, torch.cat(made))


def if_any(model: Any, x: Tensor) -> Tensor:
    chosen = model.chosen(x)
    for number, expert in enumerate(model.experts):
        if (chosen == number).any():
            x = x + expert(x) * (chosen == number)[:, None]
    return x


def by_nonzero(model: Any, x: Tensor) -> Tensor:
    rows = x.sum(-1).gt(0).nonzero().squeeze(-1)
    return x.index_add(0, rows, model.experts[0](x[rows]))


def by_number(model: Any, x: Tensor) -> Tensor:
    return model.experts[0](x) * x.detach().abs().max().item()  # type: ignore[no-any-return]


def by_size(model: Any, x: Tensor) -> Tensor:
    return model.experts[0](x) * torch.unique(x.long()).numel()  # type: ignore[no-any-return]


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("dispatch", "what"),
    [
        (by_index, "torch.where of a condition alone gives"),
        (by_mask, "indexing with a mask gives"),
        (by_count, "bincount gives"),
        (if_any, "branches on the values of a tensor"),
        (by_nonzero, "nonzero gives"),
        (by_number, "item reads a number"),
        (by_size, "unique gives"),
    ],
)
def test_the_way_out_of_data_dependence_is_a_submodule(
    dispatch: Callable[[Any, Tensor], Tensor], what: str
) -> None:
    """The advice is right: the same code in a submodule is captured, and proven."""
    call = Arguments((torch.randn(4, 4),), {})
    with pytest.raises(CaptureError) as caught:
        proven_capture(Experts(dispatch), call)
    assert what in str(caught.value)
    assert "into a submodule whose results have fixed shapes" in str(caught.value)
    assert "u0" not in str(caught.value)
    inside, _, _ = proven_capture(Outer(Experts(dispatch)), call)
    assert inside.method.endswith("data probed")


def packed(model: Any, x: Tensor) -> Tensor:
    steps, lengths = x[:, None].repeat(1, 3, 1), x.sum(-1).gt(0).long() + 1
    sequences = nn.utils.rnn.pack_padded_sequence(
        steps, lengths, batch_first=True, enforce_sorted=False
    )
    return model.rnn(sequences)[1][0]  # type: ignore[no-any-return]


def padded(model: Any, x: Tensor) -> Tensor:
    steps, lengths = x[:, None].repeat(1, 3, 1), x.sum(-1).gt(0).long() + 1
    return model.rnn(steps)[0].gather(1, (lengths - 1)[:, None, None].expand(-1, 1, 4))[:, 0]  # type: ignore[no-any-return]


def test_packed_sequences_are_refused_and_padded_ones_are_not() -> None:
    """Also in a submodule, which torch cannot run on fake tensors."""
    call, model = Arguments((torch.randn(4, 4),), {}), Experts(packed)
    model.rnn = nn.GRU(4, 4, batch_first=True)
    with torch.no_grad():
        expected = model(*call.args)
    for refused in (model, Outer(model)):
        with pytest.raises(CaptureError, match=r"packing sequences gives .*the padded tensor"):
            proven_capture(refused, call)
    model.dispatch = padded
    torch.testing.assert_close(model(*call.args), expected)
    proven_capture(model, call)


def slope(model: Any, x: Tensor) -> Tensor:
    return torch.func.grad(lambda value: model.gate(value).sum())(x)  # type: ignore[no-any-return]


def test_transforms_of_functions_are_named() -> None:
    with pytest.raises(CaptureError) as caught:
        proven_capture(Experts(slope), Arguments((torch.randn(4, 4),), {}))
    message = str(caught.value)
    assert "the forward transforms a function (grad, vjp, jacrev" in message
    assert "write out what that computes" in message


def required(model: Any, x: Tensor) -> Tensor:
    return model.gate(x.requires_grad_())  # type: ignore[no-any-return]


def set_to_require(model: Any, x: Tensor) -> Tensor:
    x.requires_grad = True
    return model.gate(x)  # type: ignore[no-any-return]


def required_of_a_copy(model: Any, x: Tensor) -> Tensor:
    return model.gate(x.detach().requires_grad_())  # type: ignore[no-any-return]


@pytest.mark.parametrize("forward", [required, set_to_require])
def test_an_input_that_the_forward_lets_require_a_gradient(
    forward: Callable[[Any, Tensor], Tensor],
) -> None:
    x = torch.randn(4, 4)
    with pytest.raises(CaptureError, match=r"detached copy \(x.detach\(\).requires_grad_\(\)\)"):
        proven_capture(Experts(forward), Arguments((x,), {}))
    assert not x.requires_grad
    proven_capture(Experts(required_of_a_copy), Arguments((x,), {}))


def with_hook(model: Any, x: Tensor) -> Tensor:
    model.gate.weight.register_hook(torch.neg)
    return model.gate(x)  # type: ignore[no-any-return]


def frozen(model: Any, x: Tensor) -> Tensor:
    model.gate.weight.requires_grad_(False)
    return model.gate(x)  # type: ignore[no-any-return]


def frozen_by_assignment(model: Any, x: Tensor) -> Tensor:
    model.gate.weight.requires_grad = False
    return model.gate(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (with_hook, "puts a hook on a parameter.*outside the forward"),
        (frozen, "sets requires_grad of a parameter.*outside the forward"),
        (frozen_by_assignment, "sets requires_grad of a parameter.*outside the forward"),
    ],
)
def test_what_a_forward_leaves_on_a_parameter(
    forward: Callable[[Any, Tensor], Tensor], message: str
) -> None:
    model = Experts(forward)
    with pytest.raises(CaptureError, match=message):
        proven_capture(model, Arguments((torch.randn(4, 4),), {}))
    assert model.gate.weight.requires_grad and not model.gate.weight._backward_hooks


def trained_as_before(model: Any, x: Tensor) -> Tensor:
    model.gate.weight.requires_grad = True
    model.gate.bias.requires_grad_()
    return model.gate(x)  # type: ignore[no-any-return]


def test_a_forward_may_set_requires_grad_to_what_it_is() -> None:
    proven_capture(Experts(trained_as_before), Arguments((torch.randn(4, 4),), {}))


def test_a_refused_branch_leaves_the_model_as_it_was() -> None:
    """Torch compiles the branches of `cond`, and keeps what it compiled."""

    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return torch.cond(x.abs().max() > 3, torch.sin, torch.cos, (y,))

    model, x = nn.Sequential(Branching(), Branching()), torch.randn(4, 4)
    before = model(x)
    with pytest.raises(CaptureError, match="calls cond, whose branches"):
        proven_capture(model, Arguments((x,), {}))
    assert torch.equal(model(x), before)


class Removed(nn.Module):
    """Takes a buffer away and puts it back, behind another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.ones(4))
        self.register_buffer("second", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        del self.first
        self.register_buffer("first", torch.ones(4))
        return x * self.first


def test_a_buffer_that_is_taken_away_and_put_back() -> None:
    with pytest.raises(CaptureError, match=r"0\.first: the forward makes or removes"):
        captured(nn.Sequential(Removed(), nn.Linear(4, 4)), torch.randn(4, 4))
