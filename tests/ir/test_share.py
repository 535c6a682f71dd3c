from __future__ import annotations

import pytest

from pipecompile.errors import InputError
from pipecompile.ir.share import parse_share


@pytest.mark.parametrize(
    ("text", "share"), [("5%", 0.05), ("0.05", 0.05), (".2", 0.2), ("12.5 %", 0.125), ("0", 0.0)]
)
def test_shares_are_read_with_and_without_a_percent_sign(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "-5%", "five", "1e-2"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=r"write 5% or 0\.05"):
        parse_share(text)
