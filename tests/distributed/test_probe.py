"""The probe between gloo ranks, and a plan with what it found."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from examples import models
from pipecompile.api.links import probe_links
from pipecompile.cli import commands
from pipecompile.errors import InputError
from pipecompile.ir.links import Link, Links
from pipecompile.ir.plan import Plan
from pipecompile.ir.serialization import decode, encode, write
from pipecompile.runtime.probe import fit_link
from tests.distributed import jobs
from tests.distributed.workers import Workers


@pytest.fixture(scope="module")
def found(workers: Workers, tmp_path_factory: pytest.TempPathFactory) -> Links:
    """The links of three ranks, on which they agree; while two are measured one waits."""
    first, *others = workers.run(3, jobs.probed, folder=str(tmp_path_factory.mktemp("probe")))
    assert others == [first, first]
    return first


def test_what_is_found_is_positive_and_finite(found: Links) -> None:
    assert found.ranks == 3
    for _, _, link in found.pairs():
        assert link.latency_ns > 0
        assert link.bandwidth_bytes_per_s is not None
        assert 0 < link.bandwidth_bytes_per_s < 10**15
    assert 0 < found.sending.latency_ns < 10**9
    assert 0 < found.receiving.latency_ns < 10**9


def test_a_plan_takes_what_was_found(found: Links, tmp_path: Path) -> None:
    write(path := tmp_path / "links.json", encode(found))
    target = f"{models.__file__}:sequential"
    arguments = [
        "plan",
        target,
        "--microbatches",
        "4",
        "--costs",
        "flops",
        "--format",
        "json",
        "--links",
        str(path),
    ]
    result = CliRunner().invoke(commands, [*arguments, "-k", "3"])
    assert result.exit_code == 0, result.output
    plan = decode(result.stdout.encode(), Plan, origin="stdout")
    assert plan.links == found
    refused = CliRunner().invoke(commands, [*arguments, "-k", "2"])
    assert refused.exit_code == 2
    assert "is for 3 ranks, but the plan has 2" in refused.stderr


def test_one_process_is_told_to_start_more() -> None:
    with pytest.raises(
        InputError, match=r"there is only one; .* torchrun --nproc-per-node 4 -m pipecompile links"
    ):
        probe_links()


def test_the_command_writes_nothing_without_other_ranks(tmp_path: Path) -> None:
    result = CliRunner().invoke(commands, ["links", "-o", str(tmp_path / "links.json")])
    assert result.exit_code == 2
    assert result.stderr.startswith("pipecompile: links are measured between ranks")
    assert not list(tmp_path.iterdir())


def test_a_line_is_found_again() -> None:
    sizes = (0, 1 << 16, 1 << 20, 1 << 22)
    assert fit_link({size: 5000 + size / 2 for size in sizes}) == Link(
        bandwidth_bytes_per_s=2 * 10**9, latency_ns=5000
    )
    assert fit_link(dict.fromkeys(sizes, 7.0)) == Link(latency_ns=7)
