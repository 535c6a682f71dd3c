"""The code blocks of a page, run as they stand, from top to bottom, in one folder and namespace.

A block of      is
python          run; if its first line is `# NAME.py`, written to a file of that name instead
sh              run, line by line; `# exit 1` behind a command says what it ends with, else 0
output          what the block before it prints, where `...` stands for anything
json            written to a file, if a comment `<!-- file: NAME -->` stands before it
any other kind  text, and so are `sh` blocks behind `<!-- skip: next -->`
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from sybil import Document, Example
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown import CodeBlockParser, SkipParser

from pipecompile.cli import commands

FILE = re.compile(r"# (\S+\.py)\n")
NAMED = re.compile(r"<!-- file: (\S+) -->\s*```json\n\Z")
PROGRAMS = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
PRINTED = "what the last block printed"  # in the namespace, where no page looks


def run_page(path: Path) -> int:
    """Runs the blocks of the page at `path` in the current folder; returns how many there were."""
    kinds = {"python": _python, "sh": _shell, "output": _output, "json": _json}
    parsers = [CodeBlockParser(language, evaluator) for language, evaluator in kinds.items()]
    document = Document.parse(str(path), SkipParser(), *parsers)
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    return count


def _python(example: Example) -> None:
    named = FILE.match(example.parsed)
    if named:
        Path(named[1]).write_text(example.parsed)
        return
    with _captured(example):
        PythonEvaluator()(example)


def _json(example: Example) -> None:
    before = example.document.text[: example.start] + "```json\n"
    named = NAMED.search(before)
    if named:
        Path(named[1]).write_text(example.parsed)


def _shell(example: Example) -> None:
    with _captured(example):
        for line in example.parsed.replace("\\\n", " ").splitlines():
            if line.strip() and not line.startswith("#"):
                _command(line)


def _command(line: str) -> None:
    program, *arguments = shlex.split(line, comments=True)
    said = re.search(r"# exit (\d)", line)
    code = (
        _pipecompile(arguments)
        if program == "pipecompile"
        else _process(PROGRAMS[program] + arguments)
    )
    assert code == int(said[1] if said else 0), f"{line}\nended with {code}"


def _pipecompile(arguments: list[str]) -> int:
    """In this process, where torch is imported already."""
    # A page rewrites a module within a second, by which Python takes its bytecode for current.
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        commands(arguments, prog_name="pipecompile")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.dont_write_bytecode = writes_none
    return 0


def _process(command: list[str]) -> int:
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    print(done.stdout)
    print(done.stderr, file=sys.stderr)
    return done.returncode


def _output(example: Example) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    printed = example.namespace.get(PRINTED, "")
    if not doctest.OutputChecker().check_output(example.parsed, printed, flags):
        raise AssertionError(
            f"{example.path}:{example.line}: the page says\n{example.parsed}\nprinted\n{printed}"
        )


@contextlib.contextmanager
def _captured(example: Example) -> Iterator[None]:
    """Keeps standard output for an `output` block; pytest shows both streams where a page fails."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            yield
    finally:
        example.namespace[PRINTED] = out.getvalue()
        print(out.getvalue())
