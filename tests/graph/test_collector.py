"""The collector is paused in a block only, and left as it was."""

from __future__ import annotations

import gc

import pytest

from pipecompile.graph.collector import collector_paused


def test_the_collector_is_paused_in_the_block_only() -> None:
    with collector_paused():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="within"), collector_paused():
        raise ValueError("within")
    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
