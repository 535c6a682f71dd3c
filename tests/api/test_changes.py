"""What changes after a model was compiled, or on other data than the sample, is an error and no
wrong step.
"""

from __future__ import annotations

import copy
import inspect
import operator
from collections import OrderedDict
from dataclasses import asdict, astuple, dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import CaptureError, InputError
from pipecompile.training.pipeline import Pipeline

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 8)
        self.scale = 2.0
        self.factors = [1.0]
        self.gradient_checkpointing = False
        self.register_buffer("shift", torch.zeros(8))
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dim()
        if self.gradient_checkpointing:
            x = x.clone()
        return self.last(
            self.drop(self.first(x).tanh()) * self.scale * self.factors[0] + self.shift
        )


def compiled(model: nn.Module, sample: Tensor = X, **options: Any) -> Pipeline:
    loss = nn.functional.mse_loss
    return pipecompile(
        model,
        sample,
        2,
        microbatches=2,
        costs="flops",
        loss_fn=loss,
        sample_target=sample,
        **options,
    )


def hooked(model: Scaled) -> None:
    model.register_forward_hook(lambda *_: None)


def replaced(model: Scaled) -> None:
    model.last = nn.Linear(8, 8)


def scripted(model: Scaled) -> None:
    """Its tables are no dicts, and know no names of others."""
    model.last = torch.jit.script(model.last)


def untied(model: Scaled) -> None:
    model.last.weight = nn.Parameter(torch.zeros(8, 8))


def scaled(model: Scaled) -> None:
    model.scale = 3.0


def dropped(model: Scaled) -> None:
    model.drop.p = 0.5


def reordered(model: Scaled) -> None:
    model.factors[0] = 3.0


def buffered(model: Scaled) -> None:
    model.shift = torch.ones(8)


def shortened(model: Scaled) -> None:
    model.shift = torch.ones(1)


def converted(model: Scaled) -> None:
    model.double()


def frozen(model: Scaled) -> None:
    model.first.bias.requires_grad_(False)


def checkpointed(model: Scaled) -> None:
    """As transformers does: with a hook on the embeddings."""
    model.gradient_checkpointing = True
    model.first.register_forward_hook(lambda module, args, output: output.requires_grad_())


def ordered(model: Scaled) -> None:
    model.first, model.last = model.last, model.first
    del model.drop
    model.drop = nn.Dropout(0.1)


def sped_up(model: Scaled) -> None:
    model.compile()


def patched(model: Scaled) -> None:
    model.first.forward = torch.relu


def grown(model: Scaled) -> None:
    model.added = nn.Linear(8, 8)


def grown_by_a_number(model: Scaled) -> None:
    """As `nn.Sequential.append` does."""
    model.add_module("1", nn.Sequential(nn.Linear(8, 8)))


def shrunk(model: Scaled) -> None:
    model.last = nn.Identity()
    del model.drop


def hooked_backwards(model: Scaled) -> None:
    model.register_full_backward_hook(lambda *_: None)


def hooked_before_backwards(model: Scaled) -> None:
    model.register_full_backward_pre_hook(lambda *_: None)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (hooked, "the model has other forward hooks than when the model was compiled"),
        (replaced, "last is another module than"),
        (scripted, "last is another module than"),
        (untied, r"last.weight is another tensor than .* write to it in place \(copy_\)"),
        (scaled, "scale is 3.0, but was 2.0 when the model was compiled"),
        (dropped, "drop.p is 0.5, but was 0.1 when"),
        (reordered, "factors is or holds something else than when"),
        (buffered, "shift is another tensor than"),
        (shortened, r"shift is a tensor \(1,\) of .*float32 on cpu, but was a tensor \(8,\)"),
        (patched, "first.forward was not there when"),
        (grown, "added is a module that was not there when"),
        (grown_by_a_number, "1 is a module that was not there when"),
        (shrunk, "drop is gone, but was a module when"),
        (hooked_backwards, "the model has a backward hook that was not there .* taken apart"),
        (hooked_before_backwards, "the model has a backward hook that was not there .* apart"),
        (converted, r"first.weight is torch.float64, but was torch.float32 .* convert the model"),
        (frozen, "first.bias requires no gradient, but did when the model was compiled"),
        (checkpointed, r"gradient_checkpointing is True, but was False .* \(recompute=\)"),
        (ordered, "(first|last) is another module than .* stands at another place"),
        (sped_up, "the code that torch.compile made of the model was not there"),
    ],
)
def test_a_model_that_changed_since_it_was_compiled(change: Any, text: str) -> None:
    """Also if it is to be captured anew, for other modes."""
    model = Scaled()
    pipeline = compiled(model)
    pipeline.step(X, X)
    change(model)
    for run in (lambda: pipeline.step(X, X), lambda: pipeline.evaluate(X)):
        with pytest.raises(InputError, match=f"^{text}") as caught:
            run()
        assert "\n" not in str(caught.value) and "compile" in str(caught.value)


def counted(model: Scaled, step: int) -> None:
    model.global_step = step


def logged(model: Scaled, step: int) -> None:
    model.log["loss"] = float(step)


def remembered(model: Scaled, step: int) -> None:
    model.history.append(torch.ones(step))


def tagged(model: Scaled, step: int) -> None:
    model.first.tag = step


def measured(model: Scaled, step: int) -> None:
    model.norms[0] = step


def described(model: Scaled, step: int) -> None:
    model.tracker.scale = step


def shown(model: Scaled, step: int) -> None:
    model.extra_repr = lambda: f"step {step}"


class Logging(Scaled):
    """Has attributes for the training loop, in names that tensors and forwards have too."""

    def __init__(self) -> None:
        super().__init__()
        self.log: dict[str, float] = {}
        self.history: list[Tensor] = []
        self.norms, self.tracker = np.zeros(2), SimpleNamespace(scale=0)

    def forward(self, x: Tensor) -> Tensor:
        norms, history, tracker = x.exp().log(), len, x
        return super().forward(norms[:, : history(x[0])] + 0 * tracker)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize(
    "change", [counted, logged, remembered, tagged, measured, described, shown]
)
def test_attributes_that_no_forward_reads_may_change(change: Any) -> None:
    model = Logging()
    pipeline = compiled(model)
    twin = compiled(copy.deepcopy(model))
    for step in range(3):
        assert torch.equal(pipeline.step(X, X), twin.step(X, X))
        assert torch.equal(pipeline.evaluate(X), twin.evaluate(X))
        change(model, step)


class ByName(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, f"sc{'a'}le")


class ByDict(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * len(vars(self))


class IfThere(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if hasattr(self, "global_step") else 1)


class InSight(Scaled):
    """Reads an attribute only where its tensors have values: another method captures it."""

    def forward(self, x: Tensor) -> Tensor:
        is_traced = torch.compiler.is_exporting()
        if not is_traced and (x == x).all():
            return super().forward(x) * self.factor
        return super().forward(x) * 1.0

    factor = 1.0


class PastTheClass(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * object.__getattribute__(self, "factor")

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0


class Statically(PastTheClass):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.forward(self, x) * inspect.getattr_static(self, "factor")


class OfDir(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * sum(name.startswith("global_") for name in dir(self))


class OfCopy(PastTheClass):
    def forward(self, x: Tensor) -> Tensor:
        return Scaled.forward(self, x) * copy.copy(self).factor


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ByName, "scale"),
        (ByDict, "global_step"),
        (IfThere, "global_step"),
        (InSight, "factor"),
        (PastTheClass, "factor"),
        (Statically, "factor"),
        (OfDir, "global_step"),
        (OfCopy, "factor"),
    ],
)
def test_attributes_that_a_forward_may_have_read_stay(kind: type[Scaled], name: str) -> None:
    model = kind()
    pipeline = compiled(model)
    setattr(model, name, 3)
    with pytest.raises(InputError, match=rf"^{name} (is|was) .* when the model was compiled"):
        pipeline.step(X, X)


class InSlot(Scaled):
    __slots__ = ("factor",)

    def __init__(self) -> None:
        super().__init__()
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def test_a_slot_of_a_module_is_no_attribute_but_read_like_one() -> None:
    model = InSlot()
    pipeline = compiled(model)
    pipeline.step(X, X)
    model.factor = 3.0
    with pytest.raises(InputError, match=r"^factor has changed since the model was compiled"):
        pipeline.step(X, X)


class Choosing(nn.Module):
    """Reads one attribute or the other, as its data tell."""

    def __init__(self) -> None:
        super().__init__()
        self.above, self.below = 2.0, 3.0

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.above if x.sum() > 0 else self.below)


def test_what_data_chose_not_to_read_is_read_when_it_runs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), Choosing(), nn.Linear(8, 8))
    with torch.no_grad():
        model[0].bias.fill_(1e3)
    pipeline = compiled(model)
    model[1].below = 5.0
    pipeline.step(X, X)
    assert torch.equal(pipeline.evaluate(-X * 1e4), torch.cat([*map(model, (-X * 1e4).split(2))]))
    model[1].above = 5.0
    with pytest.raises(InputError, match=r"^1.above is 5.0, but was 2.0"):
        pipeline.step(X, X)


def test_a_hook_in_the_place_of_another() -> None:
    model = Scaled()
    handle = model.first.register_forward_hook(lambda module, args, output: output * 2)
    pipeline = compiled(model)
    handle.remove()
    model.first.register_forward_hook(lambda module, args, output: output * 3)
    with pytest.raises(InputError, match=r"^first has other forward hooks than when"):
        pipeline.step(X, X)


def test_a_hook_in_a_table_that_took_the_place_of_an_empty_one() -> None:
    model = Scaled()
    pipeline = compiled(model)
    model.last._forward_hooks = OrderedDict()
    pipeline.step(X, X)
    model.last.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="last has other forward hooks"):
        pipeline.step(X, X)


def test_backward_hooks_of_modules_that_are_one_node_may_come_later() -> None:
    model, seen = Scaled(), []
    pipeline = compiled(model)
    model.first.register_full_backward_hook(lambda *_: seen.append("first"))
    model.last.register_full_backward_pre_hook(lambda *_: seen.append("last"))
    pipeline.step(X, X)
    assert sorted(seen) == ["first", "first", "last", "last"]


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Gated(nn.Module):
    """One node since it branches on data, with its gate in it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x) if x.sum() > -1e9 else x


class GatedTwice(Scaled):
    """Calls a gate within a node, and also itself, where it is taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.gated = Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return self.gated(x) + self.gated.gate(x)


def test_hooks_of_a_module_that_is_within_a_node_and_also_taken_apart() -> None:
    """What the graph has of them is that of the capture."""
    model, scales = GatedTwice(), [2.0]
    pipeline = compiled(model)
    handle = model.gated.gate.register_full_backward_hook(lambda *_: None)
    with pytest.raises(InputError, match=r"^gated.gate has a backward hook that was not there"):
        pipeline.step(X, X)
    handle.remove()
    model.gated.gate.register_forward_hook(lambda module, args, output: output * scales[0])
    pipeline = compiled(model)
    pipeline.step(X, X)
    scales[0] = 3.0
    with pytest.raises(InputError, match=r"^scales in .* has changed since the model was compiled"):
        pipeline.step(X, X)


@dataclass
class Scales:
    scale_0: float = 1.0
    scale_1: float = 2.0
    unread: int = 0


class ByComputedName(Scaled):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.scales, self.scale_of = Scales(), scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale_of(self.scales)


@pytest.mark.parametrize(
    "scale",
    [
        lambda scales: getattr(scales, f"scale_{1}"),
        lambda scales: vars(scales)[f"scale_{1}"],
        lambda scales: asdict(scales)[f"scale_{1}"],
        lambda scales: (lambda scale_0, scale_1, unread: scale_1)(**vars(scales)),
        operator.attrgetter(f"scale_{1}"),
        lambda scales: next(value for value in astuple(scales) if value > 1),
    ],
)
def test_names_that_the_forward_computes(scale: Any) -> None:
    model = ByComputedName(scale)
    pipeline = compiled(model)
    pipeline.step(X, X)
    model.scales.scale_1 = 3.0
    with pytest.raises(InputError, match=r"^scales.scale_1 has changed since"):
        pipeline.step(X, X)


def test_names_that_no_forward_computes() -> None:
    model = ByComputedName(lambda scales: getattr(scales, f"scale_{1}"))
    pipeline = compiled(model)
    model.scales.unread, model.scales.scale_0 = 1, 2.0
    pipeline.step(X, X)


class Defaults:
    scale_1 = 2.0


class ByComputedNameOfAClass(ByComputedName):
    scale_1 = 2.0

    def __init__(self, *, of_itself: bool) -> None:
        super().__init__(lambda scales: getattr(self if of_itself else scales, f"scale_{1}"))
        self.scales = Defaults()


@pytest.mark.parametrize("of_itself", [False, True])
@pytest.mark.parametrize("in_class", [False, True])
def test_names_of_classes_that_the_forward_computes(
    of_itself: bool, in_class: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ByComputedNameOfAClass(of_itself=of_itself)
    pipeline = compiled(model)
    pipeline.step(X, X)
    owner: Any = model if of_itself else model.scales
    monkeypatch.setattr(type(owner) if in_class else owner, "scale_1", 3.0)
    with pytest.raises(InputError, match=r"scale_1 (has changed since|was not there when)"):
        pipeline.step(X, X)


TRAINER = SimpleNamespace(step=0)


class InTraining(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * vars(self)["scale"]

    def training_step(self) -> int:
        return TRAINER.step


def test_methods_that_no_forward_calls_may_name_what_changes() -> None:
    model = InTraining()
    pipeline = compiled(model)
    TRAINER.step += 1
    pipeline.step(X, X)


SEEN: dict[str, Any] = {}


@pytest.mark.parametrize("kept", [SEEN, {}, SimpleNamespace()], ids=["global", "closure", "object"])
def test_hooks_of_modules_that_are_one_node_may_keep_what_they_see(kept: Any) -> None:
    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        if kept is SEEN:
            SEEN["output"] = output.detach()
        elif isinstance(kept, dict):
            kept["output"] = output.detach()
        else:
            kept.output = output.detach()

    model = Scaled()
    model.first.register_forward_hook(keep)
    pipeline = compiled(model)
    for sample in (X, -X):
        pipeline.step(sample, X)
        output = kept["output"] if isinstance(kept, dict) else kept.output
        assert torch.equal(output, model.first.forward(sample[2:]))


def test_what_a_hook_reads_that_is_in_the_graph_stays() -> None:
    model, scales = Scaled(), [2.0]
    model.register_forward_hook(lambda module, args, output: output * scales[0])
    pipeline = compiled(model)
    scales[0] = 3.0
    with pytest.raises(InputError, match=r"^scales in .* has changed since the model was compiled"):
        pipeline.step(X, X)


class Merging(Scaled):
    """Does more than set flags in `.eval()`."""

    def train(self, mode: bool = True) -> Merging:
        if self.training != mode:
            with torch.no_grad():
                self.first.weight.mul_(2)
        return super().train(mode)


def test_evaluation_changes_no_more_than_the_modes() -> None:
    model = Merging()
    before = model.first.weight.clone()
    compiled(model).evaluate(X)
    assert model.training and torch.equal(model.first.weight, before)


def test_hooks_that_take_a_step_do_not_see_the_self_check() -> None:
    model = Scaled()
    seen: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    pipeline = compiled(model)
    pipeline.evaluate(X)
    assert not seen
    with pytest.raises(InputError, match=r"first.weight has a post-accumulate hook"):
        pipeline.step(X, X)
    assert not seen


class Head(nn.Module):
    """In eval mode another head, which reads what the first layers made too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.other = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for layer in self.layers:
            made.append(x := layer(x).tanh())
        return x if self.training else self.other(x) + self.other(made[0])


def test_what_only_evaluation_shares_is_summed_in_order() -> None:
    model = Head()
    pipeline = compiled(model)
    model.eval()
    pipeline.step(X, X)
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    for rows in X.split(2):
        nn.functional.mse_loss(model(rows), rows).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.grad / 2), name


class Shorter(nn.Module):
    """In eval mode its middle is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if self.training or index < 2 or index > 5:
                x = layer(x).tanh()
        return x


def test_a_stage_that_another_mode_leaves_empty_is_refused() -> None:
    loss = nn.functional.mse_loss
    pipeline = pipecompile(
        Shorter(), X, 4, microbatches=2, costs="flops", loss_fn=loss, sample_target=X
    )
    with pytest.raises(
        CaptureError,
        match=r"stage 1 has nothing to run.*compile the model in this mode or with this shape",
    ):
        pipeline.evaluate(X)


def test_what_the_forward_sets_for_itself_may_change() -> None:
    model = Scaled()
    pipeline = compiled(model)
    model(X)
    assert model.seen == 2
    assert pipeline.step(X, X) is not None


def lazy(model: Any, x: Tensor) -> Tensor:
    if model.tau is None:
        model.tau = 1.0
    return x / model.tau


def defaulted(model: Any, x: Tensor) -> Tensor:
    model.rate = getattr(model, "rate", 1.0)
    return x * model.rate


def defaulting(model: Any, x: Tensor) -> Tensor:
    return x * model.state.setdefault("gain", 1.0)


def beside(model: Any, x: Tensor) -> Tensor:
    x = (x / model.state["tau"]).softmax(-1)
    model.state["attention"] = x.detach()
    return x


def by_flag(model: Any, x: Tensor) -> Tensor:
    if not model.is_ready:
        model.gain, model.is_ready = 1.0, True
    return x * model.gain


def by_dict(model: Any, x: Tensor) -> Tensor:
    model.seen = x.shape
    return x * vars(model).setdefault("gain", 1.0)


def of_function(model: Any, x: Tensor) -> Tensor:
    model.activation = model.activation or (lambda value: value.tanh())
    if model.rows != x.shape[0]:
        model.rows = x.shape[0]
    return model.activation(x)  # type: ignore[no-any-return]


def anew(model: Any, x: Tensor) -> Tensor:
    model.gain, model.items = 1.0, [x.detach()]
    model.items.append(model.gain)
    return x * model.items[1]


class Setting(nn.Module):
    """Runs `act` on its layer's result, which sets attributes."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act
        self.tau, self.activation, self.is_ready, self.rows = None, None, False, -1
        self.gain = 2.0
        self.state: dict[str, Any] = {"tau": 1.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, self.linear(x))  # type: ignore[no-any-return]


SETTING: dict[Any, tuple[str, Any]] = {
    lazy: ("tau", 0.1),
    defaulted: ("rate", 0.1),
    defaulting: ("state", {"tau": 1.0, "gain": 0.1}),
    beside: ("state", {"tau": 0.1}),
    by_flag: ("gain", 0.1),
    by_dict: ("gain", 0.1),
    of_function: ("activation", torch.relu),
}


@pytest.mark.parametrize("act", [*SETTING, anew])
def test_a_forward_of_the_model_leaves_what_its_pipeline_takes(act: Any) -> None:
    model = nn.Sequential(Setting(act), nn.Linear(8, 8))
    pipeline = compiled(model)
    loss = pipeline.step(X, X)
    for rows in (X, X[:3], X[:1]):
        model(rows)
        assert torch.equal(pipeline.step(X, X), loss)


@pytest.mark.one_case_in(2)
@pytest.mark.parametrize("act", SETTING)
@pytest.mark.parametrize("runs_before", [False, True])
def test_what_a_forward_reads_before_it_sets_it(act: Any, runs_before: bool) -> None:
    model = nn.Sequential(Setting(act), nn.Linear(8, 8))
    pipeline = compiled(model)
    if runs_before:
        model(X)
    name, value = SETTING[act]
    setattr(model[0], name, value)
    with pytest.raises(InputError, match=rf"^0.{name} is .* when the model was compiled"):
        pipeline.step(X, X)


def test_what_a_forward_sets_before_it_reads_it_is_free() -> None:
    model = nn.Sequential(Setting(anew), nn.Linear(8, 8))
    pipeline = compiled(model)
    loss = pipeline.step(X, X)
    model[0].gain, model[0].items = 3.0, []
    assert torch.equal(pipeline.step(X, X), loss)


class Writing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x.mul_(3)
        return x.sin()


class Passing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else x * 1.5


@pytest.mark.parametrize("kind", [Writing, Passing])
def test_a_module_that_asks_data_does_to_its_argument_what_it_did_not_on_the_sample(
    kind: type[nn.Module],
) -> None:
    model = nn.Sequential(nn.Hardtanh(-1, 1), kind(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    pipeline = compiled(model, -X.abs())
    assert pipeline.step(-X.abs(), X) is not None
    with pytest.raises(
        InputError,
        match=r"^1 branches on data: on this input it wrote to its argument or returned it",
    ):
        pipeline.step(X.abs(), X)


class EvaluatedInPlace(nn.Module):
    """Writes to a view only in eval mode: there the write and who read before it share a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.a(x).sin()
        y = self.b(hidden * 2.0)
        if not self.training:
            hidden[:, :4].add_(y[:, :4])
        return self.c(hidden.relu() + y)


def test_evaluation_is_cut_around_its_own_writes() -> None:
    model = EvaluatedInPlace()
    pipeline = compiled(model, pin={"a": 0, "relu": 0, "b": 1})
    wanted = model.eval()(X).detach()
    model.train()
    assert torch.equal(pipeline.evaluate(X), wanted)


def test_stages_that_move_take_the_models_buffers_along() -> None:
    model = Scaled()
    pipeline = compiled(model)
    pipeline._runner.device = torch.device("meta")  # as a rank's GPU
    pipeline._runner.move_stages()
    assert dict(pipeline.named_buffers())["shift"].device.type == "meta"
    held = {id(buffer) for stage in pipeline.stages for buffer in stage.buffers()}
    assert {id(buffer) for buffer in model.buffers()} == held


class Config(dict):  # type: ignore[type-arg]
    """A dict of an installed package, as those of diffusers are."""


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.config = Config(scale=2.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * self.config["scale"])


def test_what_saving_a_model_of_an_installed_package_writes_is_no_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Wrapped()
    monkeypatch.setattr("pipecompile.training.program.is_installed", lambda package: True)
    pipeline = compiled(model)
    first = pipeline.step(X, X)
    # As `save_pretrained` of diffusers does.
    model.config["_class_name"] = "Net"
    assert torch.equal(pipeline.step(X, X), first)
    model.config["scale"] = 3.0
    with pytest.raises(InputError, match="config"):
        pipeline.step(X, X)


def test_hooks_that_collect_hidden_states_are_no_change() -> None:
    """A forward of a model of transformers that is asked for them installs them."""
    from transformers.utils.output_capturing import install_output_capuring_hook

    model = Wrapped()
    pipeline = compiled(model)
    first = pipeline.step(X, X)
    install_output_capuring_hook(model.first, "hidden_states", 0)
    assert torch.equal(pipeline.step(X, X), first)
    model.first.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(InputError, match="first has other forward hooks"):
        pipeline.step(X, X)


def test_a_method_that_is_put_back_as_it_was_is_no_change() -> None:
    model = Scaled()
    pipeline = compiled(model)
    before, model.forward = model.forward, model.last.forward  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"^forward was not there"):
        pipeline.step(X, X)
    model.forward = before  # type: ignore[method-assign]
    pipeline.step(X, X)
    model.forward = model.last.forward  # type: ignore[method-assign]
    with pytest.raises(InputError, match=r"^forward was not there"):
        pipeline.step(X, X)
    del model.forward
    pipeline.step(X, X)
