"""README and the pages of the site: their code blocks run as they stand, and README keeps its size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.docs.blocks import run_page

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "quickstart.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_they_stand(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert run_page(page) > 0


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) < 120
