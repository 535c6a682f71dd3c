"""What a user gets by installing: the packages, the public names, and a cheap import."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

import pipecompile
from pipecompile import torch_versions
from pipecompile.torch_versions import NEWEST, OLDEST, check_torch

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PROJECT["tool"]["setuptools"]

PUBLIC = """
    BatchNormUpdate
    CaptureError
    Checkpoint
    Choices
    Encoding
    Explanation
    FormatError
    Granularity
    HostOptimizer
    InfeasibleError
    InputError
    Objective
    OptimizerName
    PipecompileError
    Pipeline
    PlacementShape
    Plan
    PlanChange
    PlanDiff
    RankFaultError
    Recompute
    RecordedRun
    ScheduleError
    ScheduleName
    ShardLevel
    StalePlanError
    StaleProfileError
    __version__
    diff
    explain
    pipecompile
"""


def run(code: str, cwd: Path, path: Path = ROOT) -> str:
    """What a fresh interpreter prints that starts in `cwd` and finds the package in `path`."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    return subprocess.run(
        command, cwd=cwd, env=environment, check=True, capture_output=True, text=True
    ).stdout.strip()


def folders(start: Path, name: str) -> set[str]:
    """The packages from `start` down, where `start` is imported as `name`."""
    places = (file.parent.relative_to(start).parts for file in start.rglob("__init__.py"))
    return {".".join((name, *parts)) for parts in places}


def test_the_package_list_is_complete() -> None:
    found = folders(ROOT / "pipecompile", "pipecompile")
    for top in ("passes", "cost_models"):
        found |= folders(ROOT / top, f"pipecompile.{top}")
    assert sorted(SETUPTOOLS["packages"]) == sorted(found)


def test_no_folder_of_code_is_missing_its_init() -> None:
    for top in ("pipecompile", "passes", "cost_models"):
        for file in (ROOT / top).rglob("*.py"):
            assert (file.parent / "__init__.py").is_file(), file.relative_to(ROOT)


def modules() -> dict[str, Path]:
    """The file of each module of the package, by the module's name."""
    tops = {"pipecompile": "pipecompile"}
    tops |= {folder: package for package, folder in SETUPTOOLS["package-dir"].items()}
    files = {}
    for top, package in tops.items():
        for file in (ROOT / top).rglob("*.py"):
            parts = file.relative_to(ROOT / top).with_suffix("").parts
            files[".".join((package, *parts)).removesuffix(".__init__")] = file
    return files


def test_docstrings_of_packages_name_modules_that_exist() -> None:
    rooms = {file.parent for file in modules().values()}
    for room in rooms:
        text = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
        # A list has the names in its first column, which ends with two spaces.
        columns = re.findall(r"^    (\S.*?)(?:  |$)", text, re.MULTILINE)
        named = {name for column in columns for name in column.split(", ")}
        named |= set(re.findall(r"`([a-z_]+)[./a-z_]*`", text))
        existing = {file.stem for file in room.glob("*.py")} | {other.name for other in rooms}
        assert named <= existing, f"{room.name}: {named - existing}"


def imports(tree: ast.AST) -> Iterator[str]:
    """The dotted names that a module imports, in functions too; not those for type checkers."""
    if isinstance(tree, ast.Import):
        yield from (alias.name for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        yield from (f"{tree.module}.{alias.name}" for alias in tree.names)
    is_for_types = isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"
    for child in tree.orelse if is_for_types else ast.iter_child_nodes(tree):
        yield from imports(child)


def test_no_import_circles() -> None:
    """Import-linter orders the rooms; within each, imports go one way too, lazy ones included."""
    files = modules()
    graph = nx.DiGraph()
    for module, file in files.items():
        for name in imports(ast.parse(file.read_text())):
            imported = name if name in files else name.rpartition(".")[0]
            same_room = imported.split(".")[:2] == module.split(".")[:2]
            if imported in files and same_room and imported != module:
                graph.add_edge(module, imported)
    circles = [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 1]
    assert sorted(map(sorted, circles)) == []


def test_every_mapped_folder_exists() -> None:
    for package, folder in SETUPTOOLS["package-dir"].items():
        assert (ROOT / folder / "__init__.py").is_file(), package


def test_public_names() -> None:
    assert pipecompile.__all__ == PUBLIC.split()
    assert dir(pipecompile) == sorted(PUBLIC.split())


def test_public_names_resolve() -> None:
    from pipecompile import Pipeline
    from pipecompile import pipecompile as function

    assert Pipeline.__module__.split(".")[0] == "pipecompile"
    assert callable(function)
    assert not isinstance(function, type(sys))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'pipelines'"):
        _ = pipecompile.pipelines


def test_warnings_are_seen_without_set_up() -> None:
    """Python prints those of loggers that have no handler."""
    program = (
        "import logging, pipecompile\n"
        "for level in ('info', 'warning'):\n"
        "    getattr(logging.getLogger('pipecompile.api'), level)(level)\n"
    )
    found = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert found.stderr == b"warning\n"


def test_version() -> None:
    assert pipecompile.__version__ == PROJECT["project"]["version"]


@pytest.mark.parametrize("heavy", ["torch", "ortools", "numpy", "networkx"])
def test_importing_the_package_is_cheap(heavy: str, tmp_path: Path) -> None:
    assert run(f"import sys, pipecompile; print({heavy!r} in sys.modules)", tmp_path) == "False"


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    assert (
        run("import sys, pipecompile.planner.draft; print('torch' in sys.modules)", tmp_path)
        == "False"
    )


@pytest.mark.parametrize("name", ["passes", "cost_models"])
def test_a_users_own_folder_of_the_same_name_changes_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("mine = True\n")
    code = f"import pipecompile.{name} as ours, {name} as theirs; print(ours.__name__, theirs.mine)"
    assert run(code, tmp_path) == f"pipecompile.{name} True"


def test_the_installed_layout_needs_no_checkout(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    for package in SETUPTOOLS["packages"]:
        folder = SETUPTOOLS["package-dir"].get(package, package.replace(".", "/"))
        target = site / package.replace(".", "/")
        target.mkdir(parents=True, exist_ok=True)
        for file in (ROOT / folder).glob("*.py"):
            (target / file.name).write_bytes(file.read_bytes())
    (site / "passes").mkdir()
    (site / "passes" / "__init__.py").write_text("mine = True\n")
    code = (
        "import pipecompile, pipecompile.passes as p; print(len(pipecompile.__path__), p.__file__)"
    )
    assert run(code, tmp_path, site) == f"1 {site / 'pipecompile' / 'passes' / '__init__.py'}"


def test_class_names_are_unique() -> None:
    """One name for one thing: a reader who searches for a class finds it, private ones included."""
    homes: dict[str, list[str]] = {}
    for top in ("pipecompile", "passes", "cost_models"):
        for file in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name.lstrip("_"), []).append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_the_range_of_torch_is_the_same_everywhere() -> None:
    (requirement,) = (r for r in PROJECT["project"]["dependencies"] if r.startswith("torch"))
    (major, minor), (_, last) = OLDEST, NEWEST
    assert requirement == f"torch>={major}.{minor},<{major}.{last + 1}"


@pytest.mark.parametrize("installed", ["2.10.1", "2.16.0", "3.0.0+cu130", "1.13.1"])
def test_a_version_of_torch_that_nobody_tried_is_refused(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(torch_versions, "version", lambda _: installed)
    monkeypatch.delenv("PIPECOMPILE_ANY_TORCH", raising=False)  # `make newest` sets it
    words = rf"works with torch 2.11 to 2.15, but {re.escape(installed)} is installed; pip install"
    with pytest.raises(ImportError, match=words):
        check_torch()
    monkeypatch.setenv("PIPECOMPILE_ANY_TORCH", "1")
    check_torch()


@pytest.mark.parametrize("installed", ["2.11.0", "2.13.0+cpu", "2.15.2", "2.14.0a0+git1"])
def test_a_version_of_torch_that_was_tried_is_taken(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    monkeypatch.setattr(torch_versions, "version", lambda _: installed)
    check_torch()
