"""Each rank has its own stages only: models that were built on the meta device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from pipecompile.training.checkpoint import Checkpoint
from tests.distributed import materialisation_jobs as jobs
from tests.distributed.training_jobs import mixture
from tests.distributed.workers import Workers

needs_peaks = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="the peak of a process is read from /proc"
)


@needs_peaks
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["safetensors", "a run's checkpoint", "a model's checkpoint"])
def test_a_rank_that_reads_a_file_has_no_memory_for_its_stage_twice(
    workers: Workers, tmp_path: Path, kind: str
) -> None:
    file, layer, slack = tmp_path / "weights", jobs.LAYER_BYTES, 40 << 20
    jobs.write_layers(file, kind)
    # Of a model's checkpoint a tensor is read, and then copied to where it belongs.
    read = 2 * layer if kind == "a model's checkpoint" else layer
    for grown, own in workers.run(2, jobs.peak_growth, str(file), folder=str(tmp_path)):
        assert own == jobs.LAYERS // 2 * layer
        assert own - slack < grown < own + read + slack


@needs_peaks
def test_a_rank_has_memory_for_its_stages_only(workers: Workers, tmp_path: Path) -> None:
    layer = jobs.LAYER_BYTES
    # A module draws before its values are copied, and a byte for each says whether it was set.
    drawn = layer + layer // 4
    slack = 40 << 20  # the kernel counts pages in steps, and the allocator keeps some
    for grown, own in workers.run(4, jobs.peak_growth, folder=str(tmp_path)):
        assert own == jobs.LAYERS // 4 * layer
        assert own - slack < grown < own + drawn + slack


def test_any_cut_begins_with_the_same_weights(workers: Workers, tmp_path: Path) -> None:
    whole: dict[str, torch.Tensor] = {}
    for ranks in (2, 4):
        for state, rest in workers.run(ranks, jobs.set_by_modules, folder=str(tmp_path)):
            assert rest
            for name, value in state.items():
                assert "running" in name or torch.equal(whole.setdefault(name, value), value)
    assert whole["layers.0.weight"].std() > 0.1
    for layer in ("layers.1", "layers.2", "layers.3"):
        assert whole[f"{layer}.scale"].eq(2).all()
        assert not whole[f"{layer}.last.bias"].any()
        assert 0 < whole[f"{layer}.last.weight"].std() < 0.01
    assert not whole["attention.out_proj.bias"].any()  # attention sets what its part has


def test_weights_come_from_a_file(workers: Workers, tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in mixture(4).model.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    folder = str(tmp_path)
    for distance in workers.run(2, jobs.from_file, f"{folder}/model.safetensors", folder=folder):
        assert distance <= 1e-12


def test_a_file_may_have_any_values(workers: Workers, tmp_path: Path) -> None:
    wanted, file = jobs.Masked().double().state_dict(), str(tmp_path / "model.safetensors")
    wanted["last.bias"][3] = torch.nan
    save_file(wanted, file)
    for state in workers.run(2, jobs.values_from_file, file, folder=str(tmp_path)):
        for name, value in state.items():
            assert torch.equal(value.nan_to_num(), wanted[name].nan_to_num()), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("kind", ["Checkpoint", "as a run", "as model", "alone"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_come_from_a_checkpoint_of_the_unsplit_model(
    workers: Workers, tmp_path: Path, ranks: int, kind: str
) -> None:
    model, path = mixture(4).model, str(tmp_path / "checkpoint")
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.add_(3)  # no module sets these by itself
    wanted = model.state_dict()
    if kind == "Checkpoint":
        Checkpoint.of_model(model).save(path)
    else:
        run = {"steps": 0, "seed": 5} if kind == "as a run" else {}
        saved = wanted if kind == "alone" else {"model": wanted, **run}
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    found = workers.run(4, jobs.from_checkpoint, path, ranks, folder=str(tmp_path))
    for state, without in found:
        assert state.keys().isdisjoint(without)
        assert without
        for name, value in state.items():
            assert torch.equal(value, wanted[name]), name
    # The ranks of a pipeline have all of the model.
    assert set[str]().union(*(state for state, _ in found[:ranks])) == wanted.keys()


def test_what_nothing_sets_is_named(workers: Workers, tmp_path: Path) -> None:
    for error in workers.run(2, jobs.without_a_value, folder=str(tmp_path)):
        assert error.startswith("InputError: the model was built on the meta device, and nothing ")
        assert "sets weight; give a file that has it (weights=)" in error
