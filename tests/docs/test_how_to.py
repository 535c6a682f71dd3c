"""The how-to pages: their code blocks run as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.docs.blocks import run_page

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "how-to").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run_as_they_stand(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    assert run_page(page) > 0
