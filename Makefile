# Every target sets up what it needs in .venv; a machine needs only python3 >= 3.11, pip and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COPY := build/check
NEWEST := .venv-newest
# What touches torch most: captures, stages and steps in one process, and a step over ranks.
FAST_TESTS := tests/frontend tests/graph tests/passes tests/codegen tests/runtime tests/training tests/distributed/test_training.py tests/test_package.py
# Processes that tests start find bytecode, also where the machine says that none shall be written.
ENVIRONMENT := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# By file, so that fixtures that start worker processes start them once, in the order of tests/conftest.py.
# Not three: tests that start processes of their own would then time out on slow cores.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: demo test check bench newest docs clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(BIN)/python -m examples.demo

test: $(READY)
	$(ENVIRONMENT) $(BIN)/python -m pytest $(WORKERS)

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[benchmark]'
	$(ENVIRONMENT) $(BIN)/python -m pytest $(WORKERS) -m "sweep or hypothesis" --hypothesis-profile=ci
	$(BIN)/python -m benchmarks

# mypy and import-linter read an installed copy: in a checkout they cannot see that `passes` is pipecompile.passes.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(COPY) .
	cd $(COPY) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache
	cd $(COPY) && ../../$(BIN)/lint-imports --config ../../pyproject.toml

# The fast tests on the newest torch that pip finds, in an environment of its own, whatever range pyproject.toml names.
newest:
	test -x $(NEWEST)/bin/pip || $(PYTHON) -m venv $(NEWEST) || \
	  { $(PYTHON) -m venv --without-pip $(NEWEST) && $(PYTHON) -m pip --python $(NEWEST)/bin/python install --quiet pip; }
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade torch
	grep -v '^torch==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*(each for each in project["dependencies"] + project["optional-dependencies"]["dev"] if not each.startswith("torch")), sep="\n")' > $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint $(NEWEST)/constraints.txt --requirement $(NEWEST)/requirements.txt
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(ENVIRONMENT) PIPECOMPILE_ANY_TORCH=1 $(NEWEST)/bin/python -m pytest $(WORKERS) $(FAST_TESTS)
	$(NEWEST)/bin/python -c 'import sys, torch; print("torch", torch.__version__, "on Python", sys.version.split()[0])'

# The site, in build/docs: a broken link or an unknown option is an error.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -b html -W --keep-going -d build/doctrees docs build/docs

clean:
	rm -rf build demo .venv $(NEWEST) *.egg-info .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's python3 may lack ensurepip; then the machine's own pip fills the environment.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pipecompile needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1): try make PYTHON=python3.11" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
	  { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
