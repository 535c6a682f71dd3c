"""Checkpoints and weights of one process: what they hold by name, and what they refuse."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from pipecompile.api.compilation import pipecompile
from pipecompile.errors import FormatError, InputError, PipecompileError
from pipecompile.training import safetensors_file
from pipecompile.training.checkpoint import Checkpoint
from pipecompile.training.checkpoint_weights import CheckpointWeights
from pipecompile.training.host_optimizer import HostOptimizer
from pipecompile.training.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Tied(nn.Module):
    """Two names of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)
        self.inner = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        value: Tensor = self.head(torch.relu(self.inner(self.table(tokens))))
        return value


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, tokens)


TOKENS = torch.arange(8)


def pipeline_of(model: nn.Module) -> Pipeline:
    return pipecompile(
        model, TOKENS, k=2, microbatches=2, loss_fn=loss, costs="flops", self_check=False
    )


def stepped(model: nn.Module, kind: Any, **options: Any) -> Any:
    """An optimizer of this kind that has taken two steps."""
    optimizer = kind(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(TOKENS), TOKENS).backward()
        optimizer.step()
    return optimizer


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adafactor, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.LBFGS, {}),
]


@pytest.mark.parametrize(("kind", "options"), OPTIMIZERS)
def test_slots_are_restored_by_name_into_an_optimizer_that_has_none(
    tmp_path: Path, kind: Any, options: dict[str, Any]
) -> None:
    if kind is torch.optim.LBFGS:
        model: nn.Module = nn.Linear(8, 8)
        old = kind(model.parameters())
        inputs = torch.eye(8)

        def closure() -> Tensor:
            old.zero_grad()
            value = model(inputs).square().sum()
            value.backward()
            return value

        old.step(closure)
    else:
        model = Tied()
        old = stepped(model, kind, **options)
    Checkpoint.of_model(model, old).save(tmp_path)
    fresh = copy.deepcopy(model)
    new = kind(fresh.parameters(), **options)
    Checkpoint.of_model(fresh, new).load(tmp_path)
    assert equal(new.state_dict(), old.state_dict())


def equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    return bool(left == right)


def test_an_optimizer_that_has_not_stepped_is_saved_as_that(tmp_path: Path) -> None:
    model = Tied()
    Checkpoint.of_model(model, torch.optim.AdamW(model.parameters(), lr=0.5)).save(tmp_path)
    other = stepped(model, torch.optim.AdamW)
    Checkpoint.of_model(model, other).load(tmp_path)
    assert other.state_dict()["state"] == {}
    assert other.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.optim.AdamW, torch.optim.SGD),
        (torch.optim.Adam, torch.optim.AdamW),
        (torch.optim.SGD, lambda p: HostOptimizer(p, torch.optim.AdamW)),
        (lambda p: HostOptimizer(p, torch.optim.AdamW), torch.optim.RMSprop),
    ],
)
def test_the_state_of_another_optimizer_is_refused(
    saved: Callable[[Any], torch.optim.Optimizer],
    loaded: Callable[[Any], torch.optim.Optimizer],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model, other = Tied(), Tied()
    Checkpoint.of_model(model, stepped(model, saved)).save(tmp_path)
    before = other.table.weight.detach().clone()
    with pytest.raises(InputError, match=r"has the state of (\w+), but the optimizer is (\w+); "):
        Checkpoint.of_model(other, loaded(list(other.parameters()))).load(tmp_path)
    assert torch.equal(other.table.weight, before)
    # What the message advises.
    Checkpoint.of_model(other).load(tmp_path)
    assert torch.equal(other.table.weight, model.table.weight)


def schedulers_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Schedulers of five kinds."""
    rates = torch.optim.lr_scheduler
    pair = [rates.LinearLR(optimizer), rates.CosineAnnealingLR(optimizer, 9)]
    return [
        rates.StepLR(optimizer, 2),
        rates.CosineAnnealingLR(optimizer, 9),
        rates.ReduceLROnPlateau(optimizer),
        rates.SequentialLR(optimizer, pair, [3]),
        rates.SequentialLR(optimizer, [*pair[1:], rates.StepLR(optimizer, 2)], [3]),
    ]


@pytest.mark.parametrize("saved", range(5))
def test_the_state_of_another_scheduler_is_refused(saved: int, tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    optimizer, new = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    Checkpoint.of_model(model, optimizer, schedulers_of(optimizer)[saved]).save(tmp_path)
    before = other.table.weight.detach().clone()
    for number, scheduler in enumerate(schedulers_of(new)):
        checkpoint = Checkpoint.of_model(other, new, scheduler)
        if number == saved:
            continue
        with pytest.raises(InputError, match=r"has the state of .*, but the scheduler is .*; make"):
            checkpoint.load(tmp_path)
        assert torch.equal(other.table.weight, before)
    Checkpoint.of_model(other, new, schedulers_of(new)[saved]).load(tmp_path)


@pytest.mark.parametrize("path", [None, 3, True])
def test_what_is_no_path_is_refused(path: Any) -> None:
    checkpoint = Checkpoint.of_model(Tied())
    for act in (checkpoint.save, checkpoint.save_async, checkpoint.load):
        with pytest.raises(InputError, match="a checkpoint is a folder, but a"):
            act(path)


def test_an_optimizer_goes_to_the_host_and_back(tmp_path: Path) -> None:
    model = Tied()

    def on_host(parameters: Any) -> torch.optim.Optimizer:
        return HostOptimizer(parameters, torch.optim.AdamW)

    Checkpoint.of_model(model, stepped(model, torch.optim.AdamW)).save(tmp_path)
    Checkpoint.of_model(model, stepped(model, on_host)).load(tmp_path)
    Checkpoint.of_model(model, stepped(model, on_host)).save(tmp_path)
    Checkpoint.of_model(model, stepped(model, torch.optim.AdamW)).load(tmp_path)


def test_options_follow_parameters_into_other_groups(tmp_path: Path) -> None:
    model = Tied()
    table, weight, bias = model.parameters()
    groups = [{"params": [bias], "lr": 0.3}, {"params": [weight, table], "lr": 0.2}]
    old = torch.optim.SGD(groups)
    rates = torch.optim.lr_scheduler.LambdaLR(old, lambda step: 1 / (step + 1))
    old.step()
    rates.step()
    Checkpoint.of_model(model, old, rates).save(tmp_path)
    regrouped = [{"params": [table]}, {"params": [weight]}, {"params": [bias]}]
    new = torch.optim.SGD(regrouped, lr=1.0)
    other_rates = torch.optim.lr_scheduler.LambdaLR(new, lambda step: 1 / (step + 1))
    Checkpoint.of_model(model, new, other_rates).load(tmp_path)
    assert [group["lr"] for group in new.param_groups] == [0.1, 0.1, 0.15]
    new.step()
    other_rates.step()
    assert [group["lr"] for group in new.param_groups] == [0.2 / 3, 0.2 / 3, 0.3 / 3]
    one = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(InputError, match=r"'inner.bias' are in one group .* initial_lr=0.3"):
        Checkpoint.of_model(model, one).load(tmp_path)


def test_a_run_of_the_unsplit_model_goes_on_in_stages(tmp_path: Path) -> None:
    model = Tied()
    optimizer = stepped(model, torch.optim.AdamW)
    checkpoint = Checkpoint.of_model(model, optimizer)
    checkpoint.steps = 2
    checkpoint.save(tmp_path)
    pipeline = pipeline_of(Tied())
    resumed = torch.optim.AdamW(pipeline.parameters())
    pipeline.checkpoint(resumed).load(tmp_path)
    assert pipeline.steps == 2
    assert equal(pipeline.full_state_dict(), dict(model.state_dict()))
    assert equal(resumed.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pipeline_is_saved_by_its_checkpoint_alone(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(InputError, match=r"neither pickled nor copied.*pipeline.checkpoint"):
        copied(pipeline_of(Tied()))


def test_it_is_a_stateful_within_a_larger_checkpoint(tmp_path: Path) -> None:
    model = Tied()
    optimizer = stepped(model, torch.optim.AdamW)
    old = Checkpoint.of_model(model, optimizer, data={"epoch": [3]})
    assert isinstance(old, Stateful)
    dcp.save({"app": old, "mine": 5}, checkpoint_id=tmp_path)
    assert "app.optim.inner.bias.exp_avg" in metadata(tmp_path)
    other = Tied()
    with_state = stepped(other, torch.optim.AdamW)
    new = Checkpoint.of_model(other, with_state, data={})
    dcp.load({"app": new, "mine": 0}, checkpoint_id=tmp_path)
    assert equal(with_state.state_dict(), optimizer.state_dict())
    assert equal(dict(other.state_dict()), dict(model.state_dict()))
    assert new.data == {"epoch": [3]}
    fresh = Checkpoint.of_model(other, torch.optim.AdamW(other.parameters()), data=0)
    with pytest.raises(
        InputError, match=r"optim.table.weight.step, but the optimizer has no state"
    ):
        dcp.load({"app": fresh}, checkpoint_id=tmp_path)


def metadata(path: Path) -> Any:
    return dcp.FileSystemReader(path).read_metadata().state_dict_metadata


class Loader:
    """A loader of data that knows where it is."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def test_scaler_and_loader_are_part_of_it(tmp_path: Path) -> None:
    model, old, new = Tied(), Loader(7), Loader(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    Checkpoint.of_model(model, scaler=scaler, data=old).save(tmp_path)
    other = torch.amp.GradScaler("cpu")
    Checkpoint.of_model(model, scaler=other, data=new).load(tmp_path)
    assert other.get_scale() == 4.0
    assert new.position == 7


def test_what_is_missing_unknown_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = stepped_on_rows(model)
    Checkpoint.of_model(model).save(tmp_path)
    cases = [
        (Checkpoint.of_model(model, optimizer), "lacks hyperparameters.0.weight, .* and 1 more"),
        (Checkpoint.of_model(model, scaler=torch.amp.GradScaler("cpu")), "lacks scaler"),
        (Checkpoint.of_model(model, data=0), "lacks data.0"),
        (Checkpoint.of_model(nn.Sequential(*model, nn.Linear(4, 4))), "lacks model.2.weight"),
        (Checkpoint.of_model(model[:1]), "has model.1.weight, model.1.bias, which the model lacks"),
        (Checkpoint.of_model(nn.Sequential(model[0], nn.Linear(4, 5))), r"\(4, 4\) .* \(5, 4\)"),
    ]
    before = copy.deepcopy(model.state_dict())
    nn.init.zeros_(model[0].weight)
    for checkpoint, message in cases:
        with pytest.raises(InputError, match=message):
            checkpoint.load(tmp_path)
        assert not model[0].weight.any()
    Checkpoint.of_model(model).load(tmp_path)
    assert equal(dict(model.state_dict()), dict(before))
    with pytest.raises(InputError, match=r"there is no checkpoint in .*elsewhere"):
        Checkpoint.of_model(model).load(tmp_path / "elsewhere")
    (tmp_path / ".metadata").write_bytes(b"damaged")
    with pytest.raises(FormatError, match=r"cannot be read: .*; load another one"):
        Checkpoint.of_model(model).load(tmp_path)


def stepped_on_rows(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return optimizer


def saved_async(checkpoint: Checkpoint, path: Path) -> None:
    checkpoint.save_async(path)
    checkpoint.wait()


@pytest.mark.parametrize("save", [Checkpoint.save, saved_async])
def test_a_folder_is_written_once_more_or_is_no_checkpoint(
    save: Callable[[Checkpoint, Path], None], tmp_path: Path
) -> None:
    model = Tied()
    checkpoint = Checkpoint.of_model(model)
    checkpoint.save(tmp_path)
    checkpoint.steps = 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(checkpoint, tmp_path)
    checkpoint.steps = 0
    checkpoint.load(tmp_path)
    assert checkpoint.steps == 5
    broken = patch.object(dcp.FileSystemWriter, "write_data", side_effect=OSError("disk full"))
    with (
        broken,
        pytest.raises(PipecompileError, match=r"could not be written; rank 0: .*disk full"),
    ):
        save(checkpoint, tmp_path)
    with pytest.raises(InputError, match="there is no checkpoint"):
        checkpoint.load(tmp_path)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(3, 2).parameters())
    with pytest.raises(InputError, match=r"shape \(2, 3\) that is not one of this process"):
        Checkpoint.of_model(Tied(), optimizer).save(tmp_path)


def test_a_checkpoint_within_a_minibatch_is_refused(tmp_path: Path) -> None:
    pipeline = pipeline_of(Tied())
    pipeline.step(TOKENS, TOKENS, accumulate=True)
    with pytest.raises(InputError, match="put gradients aside"):
        pipeline.checkpoint().save(tmp_path)


# -- safetensors


def test_tied_weights_are_written_once(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    pipeline_of(model).save_safetensors(tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == {
        "table.weight",
        "inner.weight",
        "inner.bias",
    }
    pipeline_of(other).load_safetensors(tmp_path)
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


def test_weights_are_read_from_several_files(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    # The other name of the table, without metadata: as other programs write it.
    save_file({"head.weight": model.head.weight.detach()}, tmp_path / "1.safetensors")
    inner = {f"inner.{name}": value for name, value in model.inner.state_dict().items()}
    save_file(inner, tmp_path / "2.safetensors")
    files = dict.fromkeys(inner, "2.safetensors") | {"head.weight": "1.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    pipeline_of(other).load_safetensors(index)
    assert equal(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("as_model", [False, True])
@pytest.mark.parametrize("name", ["inner", "model"])
def test_weights_in_a_checkpoint_of_the_model_alone(
    tmp_path: Path, name: str, as_model: bool
) -> None:
    """Whose parts may have the name under which it is saved itself."""
    model = nn.Module()
    model.add_module(name, Tied())
    state = model.state_dict()
    dcp.save({"model": state} if as_model else state, checkpoint_id=tmp_path, no_dist=True)
    weights = CheckpointWeights(tmp_path, state, {})
    assert weights.keys() == state.keys()
    assert all(torch.equal(weights[each], value) for each, value in state.items())


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    pipeline = pipeline_of(Tied())
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "list.json").write_text('{"weight_map": ["a"]}')
    (tmp_path / "none.json").write_text("[]")
    for name in ("bad.safetensors", "bad.json", "list.json", "none.json"):
        with pytest.raises(FormatError, match="neither a safetensors file nor the index"):
            pipeline.load_safetensors(tmp_path / name)
    with pytest.raises(InputError, match="there is no file"):
        pipeline.load_safetensors(tmp_path / "none.safetensors")
    with pytest.raises(InputError, match=r"has neither model.safetensors nor"):
        pipeline.load_safetensors(tmp_path)
    save_file({"other": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match="are missing from"):
        pipeline.load_safetensors(tmp_path / "other.safetensors")


@pytest.mark.parametrize("names", ["a file that is not there", "another file"])
def test_an_index_that_names_another_file_is_refused(tmp_path: Path, names: str) -> None:
    model, index = Tied(), tmp_path / "model.safetensors.index.json"
    if names == "another file":
        save_file({"other": torch.ones(1)}, tmp_path / "1.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(model.state_dict(), "1.safetensors")}))
    with pytest.raises(
        InputError, match=r"the weights have .* in .*1.safetensors, which cannot be"
    ):
        pipeline_of(model).load_safetensors(tmp_path)


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "none" / "model.safetensors"
    with pytest.raises(InputError, match=r"the weights cannot be written to .* a folder that is"):
        pipeline_of(Tied()).save_safetensors(path)


def test_a_type_that_such_files_do_not_hold_is_refused(tmp_path: Path) -> None:
    model = Tied()
    model.inner.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(InputError, match=r"^inner\.phase .* torch\.complex128, .*checkpoint\(\)"):
        pipeline_of(model).save_safetensors(tmp_path / "model.safetensors")


def test_without_the_package_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(safetensors_file, "safetensors", None)
    with pytest.raises(InputError, match="pip install safetensors"):
        pipeline_of(Tied()).save_safetensors(tmp_path / "model.safetensors")
