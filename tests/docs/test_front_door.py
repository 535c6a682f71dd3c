"""README and the quickstart: their code blocks run as they stand, and README keeps its size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.docs.blocks import run_page

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"


@pytest.mark.parametrize(
    "page", [README, ROOT / "docs" / "quickstart.md"], ids=lambda page: page.stem
)
def test_the_blocks_of_a_page_run_as_they_stand(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert run_page(page) > 0


def test_readme_is_short() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) < 120


def test_every_page_of_the_repository_that_readme_links_to_exists() -> None:
    links = [part.split(")")[0] for part in README.read_text().split("](")[1:]]
    local = [link.split("#")[0] for link in links if "://" not in link]
    assert [link for link in local if not (ROOT / link).is_file()] == []
