"""The parts of the benchmark, in the order in which they run.

To add one: write a file with a function from a bench to cases, and add a line here and to the
docstring of __main__.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.gpu.attention import attention_cases
from benchmarks.gpu.captures import capture_cases
from benchmarks.gpu.cases import Part
from benchmarks.gpu.graphs import graph_cases
from benchmarks.gpu.messages import message_cases
from benchmarks.gpu.offload import offload_cases
from benchmarks.gpu.operators import operator_cases
from benchmarks.gpu.peaks import memory_cases, rank_cases
from benchmarks.gpu.ranks import ranks_cases
from benchmarks.gpu.steps import step_cases
from benchmarks.gpu.times import time_cases

__all__ = ["PARTS"]

# The first one also calibrates the device, for parts that need costs of an unknown one. Seconds are
# about twice what a H200 with 16 cores took.
PARTS: Mapping[str, Part] = {
    "operators": Part(operator_cases, seconds=110),
    "rank": Part(rank_cases, seconds=60),
    "times": Part(time_cases, seconds=90),
    "step": Part(step_cases, seconds=90),
    "attention": Part(attention_cases, seconds=60),
    "offload": Part(offload_cases, seconds=45),
    "graphs": Part(graph_cases, seconds=45),
    "messages": Part(message_cases, seconds=30),
    "memory": Part(memory_cases, seconds=250, is_timed=False, shares=3),
    "ranks": Part(ranks_cases, seconds=250, is_timed=False),
    "capture": Part(capture_cases, seconds=200, is_timed=False),
}
