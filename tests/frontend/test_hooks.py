"""Hooks of modules that are one node are called; others are recorded or refused."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.modules.module as module_hooks
from plain_loop import mean_square
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from zoo import called
from zoo.exact import exact

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import CaptureError, InputError
from pipecompile.frontend.capture import capture
from pipecompile.frontend.outside_values import OutsideValues
from pipecompile.frontend.proof import proven_capture
from pipecompile.frontend.signature import Arguments
from pipecompile.passes.contract import apply_passes
from pipecompile.passes.group import Group

WIDTH = 8
X = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1))
CALL = Arguments((X[:4].clone(),), {})


class Block(nn.Module):
    """A layer that is recorded inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sin()


def model() -> nn.Sequential:
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))


def test_forward_hooks_of_a_module_that_is_recorded_inside_are_recorded() -> None:
    hooked = model()
    hooked[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    hooked[1].register_forward_hook(lambda module, inputs, output: output + inputs[0])
    captured_model = exact(hooked, X)
    assert called(captured_model.graph) == ["0.linear", "sin", "mul", "1.linear", "sin", "add", "2"]
    assert any(
        "forward hooks of 1 are part of the graph" in str(note) for note in captured_model.notes
    )


def test_hooks_of_a_module_of_torch_are_called_by_it() -> None:
    hooked = model()
    hooked[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    hooked[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    captured_model = exact(hooked, X)
    assert called(captured_model.graph)[-1] == "2"
    assert not any("hooks" in str(note) for note in captured_model.notes)


def test_a_tensor_that_a_hook_stores_can_be_read() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model()
            self.kept: list[Tensor] = []
            self.body[0].register_forward_hook(
                lambda module, inputs, output: self.kept.append(output)
            )

        def forward(self, x: Tensor) -> Tensor:
            self.kept.clear()
            return self.body(x) + self.kept[0]

    collecting = Collecting()
    exact(collecting, X)
    assert collecting.kept == []


def test_a_backward_hook_is_allowed_on_a_leaf() -> None:
    hooked = model()
    hooked[1].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 3,))
    with pytest.raises(
        CaptureError,
        match=r"^1: a backward hook is registered .* make the module one node \(leaf\)",
    ):
        capture(hooked, CALL)
    assert called(exact(hooked, X, leaf=["1"]).graph) == ["0.linear", "sin", "1", "2"]


def test_a_hook_on_a_tensor_is_called_where_the_tensor_is_made() -> None:
    class Halving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Block(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.body(x)
            out = self.head(hidden)
            hidden.register_hook(lambda gradient: gradient / 2)
            return out + hidden

    captured_model = exact(Halving(), X)
    module = captured_model.instantiate(CALL)
    apply_passes(module.graph, [Group()])
    groups = {node.name: node.meta["group"] for node in module.graph.nodes if node.op != "get_attr"}
    (hook,) = [name for name in groups if "hook" in name]
    assert groups[hook] == groups["sin"] is not None


class Enclosing(nn.Module):
    """Registers the hook `make(x)` on its hidden tensor."""

    def __init__(self, make: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.body, self.head = Block(), nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        hidden.register_hook(self.make(x))
        return self.head(hidden)


def of_a_size(x: Tensor) -> Callable[[Tensor], Tensor]:
    batch = x.shape[0]
    return lambda gradient: gradient / batch


def test_a_hook_that_encloses_a_size_is_exact_at_every_batch() -> None:
    captured_model = exact(Enclosing(of_a_size), X, batches=(4, 2, 7))
    assert captured_model.guards.is_fixed
    assert any("microbatches of 4 samples alone" in str(note) for note in captured_model.notes)


def of_a_tensor(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda gradient: gradient * x


def of_a_list(x: Tensor) -> Callable[[Tensor], Tensor]:
    kept = [x]
    return lambda gradient: gradient * kept[0]


def of_a_default(x: Tensor) -> Callable[[Tensor], Tensor]:
    def hook(gradient: Tensor, x: Tensor = x) -> Tensor:
        return gradient * x

    return hook


def of_a_bound_argument(x: Tensor) -> Callable[[Tensor], Tensor]:
    return partial(torch.mul, x)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("make", [of_a_tensor, of_a_list, of_a_default, of_a_bound_argument])
def test_a_hook_that_encloses_a_tensor_is_refused(
    make: Callable[[Tensor], Callable[[Tensor], Tensor]],
) -> None:
    with pytest.raises(CaptureError, match="hook"):
        capture(Enclosing(make), CALL)


def test_a_parameters_own_hook_stays() -> None:
    hooked = model()
    hooked[0].linear.weight.register_hook(lambda gradient: gradient * 5)
    exact(hooked, X)


def test_requiring_a_gradient_inside_the_forward() -> None:
    class Requires(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            point = x.detach() * 1
            point.requires_grad = True
            return self.linear(point), point.requires_grad

    exact(Requires(), X)


def _doubled(module: nn.Module, *values: Any) -> Any:
    return tuple(2 * each for each in values[0]) if isinstance(module, Block) else None


REGISTERING = (
    module_hooks.register_module_forward_pre_hook,
    module_hooks.register_module_forward_hook,
    module_hooks.register_module_full_backward_pre_hook,
    module_hooks.register_module_full_backward_hook,
)


@pytest.mark.parametrize("register", REGISTERING)
def test_a_hook_of_all_modules_that_comes_or_goes_later_is_refused(register: Any) -> None:
    hooked = model()
    values = OutsideValues(hooked)
    handle = register(_doubled)
    with_hook = OutsideValues(hooked)
    assert "hooks" in (values.changed() or "")
    assert with_hook.changed() is None
    handle.remove()
    assert values.changed() is None
    assert "hooks" in (with_hook.changed() or "")


def test_hooks_of_torchs_own_tools_may_come() -> None:
    hooked = model()
    values = OutsideValues(hooked)
    with FlopCounterMode(display=False):
        hooked(X)
        assert values.changed() is None


def test_a_step_knows_the_hooks_of_all_modules() -> None:
    hooked = model()
    pipeline = pipecompile(hooked, X[:4], k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    handle = module_hooks.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(InputError, match="_global_forward_hooks has changed"):
            pipeline.step(X[:4])
    finally:
        handle.remove()
    pipeline.step(X[:4])


class Kept(nn.Module):
    """A hook of its first layer keeps a result, which the forward takes."""

    def __init__(self, keep: Callable[[Any, Tensor], None], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kept: Any = {}
        self.take = take
        self.first.register_forward_hook(lambda module, inputs, output: keep(self, output))

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, 8) to the same shape."""
        y = self.first(x).tanh()
        return self.last(y + self.take(self))


def in_dict(model: Any, output: Tensor) -> None:
    model.kept["first"] = output


def set_anew(model: Any, output: Tensor) -> None:
    model.kept = output


def taken(model: Any) -> Tensor:
    kept: Tensor = model.kept
    model.kept = {}
    return kept


def cleared(model: Any) -> Tensor:
    kept: Tensor = model.kept["first"]
    model.kept.clear()
    return kept


@pytest.mark.parametrize(
    ("keep", "take"),
    [(in_dict, lambda model: model.kept.pop("first")), (in_dict, cleared), (set_anew, taken)],
)
def test_what_a_hook_keeps_and_the_forward_takes_away_is_refused(
    keep: Callable[[Any, Tensor], None], take: Callable[[Any], Tensor]
) -> None:
    with pytest.raises(CaptureError, match="let the forward leave there what the hook keeps"):
        proven_capture(Kept(keep, take), Arguments((X[:4].clone(),), {}))


@pytest.mark.parametrize(
    ("keep", "take"),
    [(in_dict, lambda model: model.kept["first"]), (set_anew, lambda model: model.kept)],
)
def test_the_way_out_of_that_works(
    keep: Callable[[Any, Tensor], None], take: Callable[[Any], Tensor]
) -> None:
    x = X[:4].clone()
    pipeline = pipecompile(
        Kept(keep, take), x, k=2, microbatches=2, loss_fn=mean_square, costs="flops"
    )
    assert torch.equal(pipeline.step(x), pipeline.step(x))


class Lazy(nn.Module):
    """Installs hooks in its first forward, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = Block(), nn.Linear(WIDTH, WIDTH)
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        if not self.is_ready:
            self.body.register_forward_hook(lambda module, inputs, output: 2 * output)
            self.is_ready = True
        return self.last(self.body(x))


def test_hooks_that_the_first_forward_installs_may_be_there_later() -> None:
    model = Lazy()
    x = X[:4].clone()
    pipeline = pipecompile(model, x, k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    first = pipeline.step(x)
    model(x)
    assert torch.equal(pipeline.step(x), first)
    model.body.register_forward_hook(lambda module, inputs, output: -output)
    with pytest.raises(InputError, match="body has other forward hooks"):
        pipeline.step(x)


class Hooking(nn.Module):
    """Its forward registers a hook of its layer, which does nothing for small values."""

    def __init__(self, register: Callable[[nn.Module], Any], *, removes: bool) -> None:
        super().__init__()
        self.layer, self.register, self.removes = nn.Linear(WIDTH, WIDTH), register, removes

    def forward(self, x: Tensor) -> Tensor:
        """A value of shape (N, WIDTH) to the same shape."""
        handle = self.register(self.layer)
        y: Tensor = self.layer(x)
        if self.removes:
            handle.remove()
        return y


def clamps(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.clamp(-1e3, 1e3)


REGISTER: list[Callable[[nn.Module], Any]] = [
    lambda layer: layer.register_forward_hook(clamps),
    lambda layer: layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] / 2,)),
]


@pytest.mark.parametrize("register", REGISTER)
def test_a_hook_that_the_forward_leaves_at_a_node_is_refused(
    register: Callable[[nn.Module], Any],
) -> None:
    model = nn.Sequential(Hooking(register, removes=False), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CaptureError, match=r"registers or removes a hook|the forward sets it"):
        proven_capture(model, CALL)


@pytest.mark.parametrize("register", REGISTER)
def test_a_hook_that_the_forward_registers_and_removes_is_in_the_graph(
    register: Callable[[nn.Module], Any],
) -> None:
    """On values too that the sample did not have."""
    model = nn.Sequential(Hooking(register, removes=True), nn.Linear(WIDTH, WIDTH))
    found, module, _ = proven_capture(model, CALL)
    assert found.method == "torch.export"
    assert torch.equal(module(1e5 * X[:4])[0], model(1e5 * X[:4]))


class Clamping(TorchDispatchMode):
    """Clamps what each operator gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.clamp(-1e3, 1e3) if isinstance(result, Tensor) else result


class Watched(Block):
    """Runs under a mode that changes what operators do."""

    def forward(self, x: Tensor) -> Tensor:
        with Clamping():
            return super().forward(x)


def test_a_mode_of_operators_in_the_forward_is_refused() -> None:
    with pytest.raises(CaptureError, match="runs under Clamping, a mode that no stage enters"):
        proven_capture(nn.Sequential(Watched(), nn.Linear(WIDTH, WIDTH)), CALL)


LOG: list[Any] = []


class Meter:
    """A hook that is an object, and keeps sums."""

    total, positive = 0.0, 0

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.total += output.detach().mean().item()
        self.positive += (output > 0).sum().item()  # type: ignore[assignment]
        LOG.append((self.total, self.positive))


@torch.no_grad()
def log_norm(module: nn.Module, inputs: Any, output: Tensor) -> None:
    LOG.append(output.norm().item())


def log_caught(module: nn.Module, inputs: Any, output: Tensor) -> None:
    with contextlib.suppress(RuntimeError):
        LOG.append(output.std().item())


def log_tagged(tag: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
    LOG.append((tag, output[output > 0].numel()))


LOGGING: dict[str, Any] = {
    "item": lambda module, inputs, output: LOG.append(output.mean().item()),
    "float": lambda module, inputs, output: LOG.append(float(output.mean())),
    "text": lambda module, inputs, output: LOG.append(f"{output.mean():.3f}"),
    "list": lambda module, inputs, output: LOG.append(output.mean(0).tolist()),
    "array": lambda module, inputs, output: LOG.append(output.detach().cpu().numpy()),
    "own array": lambda module, inputs, output: LOG.append(np.asarray(output.detach())),
    "object": Meter(),
    "decorated": log_norm,
    "catching": log_caught,
    "partial": partial(log_tagged, "first"),
    "scaling": lambda module, inputs, output: (
        LOG.append(1) or output * abs(output[0, 0].item()) ** 0
    ),
}


@pytest.mark.one_case_in(4)
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("hook", LOGGING.values(), ids=LOGGING)
def test_a_hook_that_logs_numbers_runs_once_for_each_microbatch(hook: Any, at: int) -> None:
    logging = model()
    logging[at].register_forward_hook(hook)
    steps = pipecompile(logging, X[:4], k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    assert steps.plan.capture.method == "recorded, data probed"
    LOG.clear()
    steps.step(X[:4])
    assert len(LOG) == 2


def test_a_hook_that_sums_what_it_reads_keeps_plain_numbers() -> None:
    logging, meter = model(), Meter()
    logging[2].register_forward_hook(meter)
    exact(logging, X)
    assert (type(meter.total), type(meter.positive)) == (float, int)


def test_a_hook_with_numbers_logs_those_of_the_model() -> None:
    logging = model()
    logging[2].register_forward_hook(LOGGING["array"])
    steps = pipecompile(logging, X[:4], k=2, microbatches=2, loss_fn=mean_square, costs="flops")
    LOG.clear()
    steps.step(X[:4])
    logged = torch.from_numpy(np.concatenate(LOG))
    assert torch.equal(logged, torch.cat([logging(part).detach() for part in X[:4].split(2)]))


@pytest.mark.parametrize("name", ["item", "text", "array", "decorated", "partial"])
def test_a_hook_that_logs_numbers_of_the_model_itself_is_refused(name: str) -> None:
    logging = model()
    logging.register_forward_hook(LOGGING[name])
    with pytest.raises(
        CaptureError, match=r"^Sequential \(.*hook .* a module inside the model may"
    ):
        capture(logging, CALL)


def test_a_hook_that_logs_numbers_of_a_model_without_weights_is_refused() -> None:
    logging = model().to("meta")
    logging[2].register_forward_hook(log_norm)
    with pytest.raises(CaptureError, match=r"^2 \(.*the forward hook log_norm reads the values"):
        capture(logging, Arguments((X[:4].to("meta"),), {}))


def test_a_hook_that_reads_in_some_calls_only_is_refused_by_name() -> None:
    def log_some(module: nn.Module, inputs: Any, output: Tensor) -> None:
        LOG.append(output.mean().item() if len(LOG) % 3 == 2 else None)

    LOG.clear()
    logging = model()
    logging[2].register_forward_hook(log_some)
    with pytest.raises(CaptureError, match=r"^2.*log_some.*read as many in each call"):
        pipecompile(logging, X[:4], k=2, microbatches=2, loss_fn=mean_square, costs="flops")


class Reading(nn.Linear):
    """A layer that reads a number and does not use it."""

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        LOG.append(output.mean().item())
        return output


def test_a_module_of_torch_that_reads_a_number_is_one_node() -> None:
    captured_model = exact(nn.Sequential(nn.Linear(WIDTH, WIDTH), Reading(WIDTH, WIDTH)), X)
    assert captured_model.method == "recorded, data probed"
    assert captured_model.data_dependent == {"1"}


def set_on_the_model(whole: Any) -> None:
    whole.features = None
    whole[0].register_forward_hook(lambda *call: setattr(whole, "features", call[-1].detach()))


def counted_on_the_model(whole: Any) -> None:
    whole.calls = 0
    whole[0].register_forward_hook(lambda *_: setattr(whole, "calls", whole.calls + 1))


def listed_on_the_model(whole: Any) -> None:
    whole.features = []
    whole[0].register_forward_hook(lambda *call: whole.features.append(call[-1].detach()))


def set_on_another_layer(whole: Any) -> None:
    whole[2].features = {}
    whole[0].register_forward_pre_hook(lambda *call: whole[2].features.update(x=call[-1][0]))


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize(
    "hook", [set_on_the_model, counted_on_the_model, listed_on_the_model, set_on_another_layer]
)
def test_a_compile_leaves_the_attributes_that_hooks_of_layers_set(
    hook: Callable[[Any], None], self_check: bool
) -> None:
    hooked: Any = model()
    hook(hooked)
    before = [dict(vars(each)) for each in hooked.modules()]
    held = [copy.copy(value) for each in before for value in each.values()]
    pipecompile(
        hooked,
        X[:4],
        k=2,
        microbatches=2,
        loss_fn=mean_square,
        costs="flops",
        self_check=self_check,
    )
    assert [dict(vars(each)) for each in hooked.modules()] == before
    assert [value for each in before for value in each.values()] == held
