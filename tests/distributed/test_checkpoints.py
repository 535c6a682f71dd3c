"""Runs that stop and go on: on the same ranks bit for bit, and on others, or unsplit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model

from tests.distributed import checkpoint_jobs as jobs
from tests.distributed.training_jobs import Mixture
from tests.distributed.workers import Workers
from tests.sweeps import sweep

UNSPLIT = (0, 1)
EXACT = 1e-12


def on(
    workers: Workers, layout: tuple[int, int], folder: Path, steps: int, **files: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Progress and state after training with a layout: ranks of a pipeline × replicas."""
    ranks, replicas = layout
    paths = {name: str(path) for name, path in files.items()}
    processes = max(ranks * replicas, 1)
    results = workers.run(
        processes, jobs.trained, ranks, replicas, steps, folder=str(folder), **paths
    )
    assert len({progress for progress, _ in results}) == 1
    return results[0]


def distance(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.mark.one_case_in(3)
@pytest.mark.parametrize("layout", [(4, 1), (2, 2), sweep((2, 1)), UNSPLIT])
def test_a_run_goes_on_bit_for_bit(
    workers: Workers, tmp_path: Path, layout: tuple[int, int]
) -> None:
    on(workers, layout, tmp_path, 2, save=tmp_path / "saved")
    progress, resumed = on(workers, layout, tmp_path, 2, load=tmp_path / "saved")
    expected, uninterrupted = on(workers, layout, tmp_path, 4)
    assert progress == expected == (4, 4, 0.0025)
    assert distance(resumed, uninterrupted) == 0


def test_a_run_goes_on_with_other_ranks_and_replicas_and_unsplit(
    workers: Workers, tmp_path: Path
) -> None:
    layouts = [(4, 1), (2, 2), UNSPLIT, (2, 1), (4, 1)]
    files = [tmp_path / str(index) for index in range(len(layouts))]
    on(workers, layouts[0], tmp_path, 2, save=files[0])
    for index, layout in enumerate(layouts[1:], 1):
        progress, state = on(workers, layout, tmp_path, 2, load=files[index - 1], save=files[index])
    for layout in ((4, 1), UNSPLIT):
        expected, uninterrupted = on(workers, layout, tmp_path, 10)
        assert progress == expected
        assert 0 < distance(state, uninterrupted) <= EXACT


@pytest.mark.sweep
def test_a_checkpoint_is_the_same_whoever_writes_it(workers: Workers, tmp_path: Path) -> None:
    layouts = [(4, 1), (2, 2), UNSPLIT, (4, 1)]
    files = [tmp_path / str(index) for index in range(len(layouts))]
    on(workers, layouts[0], tmp_path, 3, save=files[0])
    for index, layout in enumerate(layouts[1:], 1):
        on(workers, layout, tmp_path, 0, load=files[index - 1], save=files[index])
    first, *others = [
        {k: v for k, v in jobs.contents(str(file)).items() if not k.startswith("generators.")}
        for file in files
    ]
    assert first["optim.table.weight.step"] == 3
    for other in others:
        assert other.keys() - {"data.1"} == first.keys()
        for key, value in first.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(other[key], value), key
            elif key != "scheduler":  # lists something for each group of a rank
                assert other[key] == value


def test_steps_go_on_while_a_checkpoint_is_written(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    results = workers.run(
        4,
        jobs.saved_while_training,
        str(tmp_path / "saved"),
        str(tmp_path / "file" / "below"),
        folder=str(tmp_path),
    )
    wanted, got, _ = results[0]
    assert distance(wanted, got) == 0
    for _, _, error in results:
        assert "a checkpoint could not be written; rank 0: NotADirectoryError" in error


def test_torch_saves_and_loads_it_within_a_larger_checkpoint(
    workers: Workers, tmp_path: Path
) -> None:
    saved = str(tmp_path / "saved")
    assert workers.run(4, jobs.within_a_larger_one, saved, folder=str(tmp_path)) == [True] * 4


def test_tied_copies_that_differ_are_not_saved(workers: Workers, tmp_path: Path) -> None:
    errors = workers.run(4, jobs.disagreeing, str(tmp_path / "saved"), folder=str(tmp_path))
    for tied, aside in errors:
        assert "tied parameter 'table.weight' differs between ranks 0 and 3" in tied
        assert "put gradients aside" in aside
    assert not (tmp_path / "saved").exists()


@pytest.mark.sweep
def test_random_generators_go_on_with_as_many_processes(workers: Workers, tmp_path: Path) -> None:
    saved, folder = str(tmp_path / "saved"), str(tmp_path)
    wanted = workers.run(2, jobs.generated, saved, None, folder=folder)
    assert workers.run(2, jobs.generated, None, saved, folder=folder) == wanted
    assert workers.run(4, jobs.generated, None, saved, folder=folder)[:2] != wanted[::-1]


def test_replicas_go_on_at_their_places_in_the_data(workers: Workers, tmp_path: Path) -> None:
    saved, folder = str(tmp_path / "saved"), str(tmp_path)
    assert workers.run(4, jobs.places, 2, 5, saved, folder=folder) == [5, 5, 6, 6]
    assert workers.run(4, jobs.places, 2, None, saved, folder=folder) == [5, 5, 6, 6]
    for message in workers.run(4, jobs.places, 1, None, saved, folder=folder):
        assert "2 replicas were at different places in their data, from which 1 cannot" in message
    workers.run(4, jobs.places, 1, 8, saved, folder=folder)
    assert workers.run(4, jobs.places, 2, None, saved, folder=folder) == [8, 8, 8, 8]


def test_the_full_state_and_a_file_of_weights_load_into_the_unsplit_model(
    workers: Workers, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    results = workers.run(4, jobs.weights_in_a_file, str(file), folder=str(tmp_path))
    whole, *none = [state for state, _, _ in results]
    assert none == [None, None, None]
    model, other = Mixture().double(), Mixture().double()
    model.load_state_dict(whole, strict=True)
    load_model(other, file, strict=True)
    assert distance(dict(other.state_dict()), whole) == 0
    assert all(same for _, _, same in results)
    read = [set(names) for _, names, _ in results]
    assert set().union(*read) == whole.keys()
    assert sum(map(len, read)) == len(whole) + 1  # the table is read on two ranks


def test_what_a_file_of_weights_lacks_is_refused_on_all_ranks(
    workers: Workers, tmp_path: Path
) -> None:
    file = str(tmp_path / "model.safetensors")
    for text in workers.run(2, jobs.a_file_without, "last.bias", file, folder=str(tmp_path)):
        assert text.endswith(
            "last.bias are missing from the state dict; it must be one of the original model"
        )
