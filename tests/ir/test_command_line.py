"""The options of a plan as words: the command line reads them back."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pipecompile.api.choices import requested_options
from pipecompile.cli.options import planning_options
from pipecompile.ir.command_line import option_words, plan_command
from pipecompile.ir.links import FREE, Link, Links
from pipecompile.ir.plan import Options


def read_back(words: list[str]) -> Options:
    """The options that `pipecompile plan` makes of these words."""
    found: list[Options] = []

    @click.command()
    @planning_options()
    def plan(**options: Any) -> None:
        del options["self_check"], options["links"]
        found.append(requested_options(**options))

    result = CliRunner().invoke(plan, words)
    assert result.exit_code == 0, result.output
    return found[0]


@pytest.mark.parametrize(
    "choices",
    [
        {"k": 3},
        {"k": 2, "microbatches": 8, "schedule": "search", "optimizer": "adamw"},
        {"ranks": 2, "stages_per_rank": 2, "schedule": "interleaved-1f1b", "placement": "loop"},
        {"k": 2, "memory": "1.5GiB", "recompute": "auto", "encodings": ["half", "mask"]},
        {"k": 2, "memory": ["1GiB", 1001], "objective": "max-load"},
        {"k": 2, "pin": {"a": 0, "b=c": -1}, "no_split": [["h.0", "h.1"], ["x"]]},
        {"k": 2, "replicas": 2, "shard": "parameters", "leaf": ["Block", "h.3"]},
        {"stage_replicas": [3, 1], "microbatches": 6},
        {"k": 2, "objective": "throughput", "memory": "1GiB", "kv_tokens": 7},
        {"k": 2, "objective": "latency"},
        {"layout": [["a", "b c"], ["d"]], "layout_format": "json"},
        {"k": 2, "granularity": "blocks", "parameters_everywhere": True, "master_weights": True},
    ],
    ids=lambda choices: "-".join(choices),
)
def test_options_are_read_back(choices: dict[str, Any]) -> None:
    options = requested_options(costs="roofline:h100", **choices)
    words = option_words(options)
    assert read_back(words) == options
    command = plan_command("net.py:two words", options, FREE)
    assert shlex.split(command) == ["pipecompile", "plan", "net.py:two words", *words]


def test_links_are_in_a_file() -> None:
    links = Links.of(Link(bandwidth_bytes_per_s=10**9))
    assert plan_command("t", requested_options(k=2), links).endswith(" --links LINKS.json")
