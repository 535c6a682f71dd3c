from __future__ import annotations

from pipecompile.ir.plurals import counted


def test_only_one_is_singular() -> None:
    assert [counted(number, "stage") for number in (0, 1, 2)] == ["0 stages", "1 stage", "2 stages"]
    assert counted(4, "microbatch") == "4 microbatches"
