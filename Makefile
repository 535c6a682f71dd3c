# Every target sets up what it needs in .venv; a machine needs only python3 >= 3.11, pip and make.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
COPY := build/check

.PHONY: demo test check bench docs clean
.DEFAULT_GOAL := test

demo: $(READY)
	$(BIN)/python -m examples.demo

# By file, so that fixtures that start worker processes start them once.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

bench: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[benchmark]'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m sweep
	$(BIN)/python -m benchmarks

# mypy and import-linter read an installed copy: in a checkout they cannot see that `passes` is pipecompile.passes.
check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(COPY) .
	cd $(COPY) && ../../$(BIN)/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache
	cd $(COPY) && ../../$(BIN)/lint-imports --config ../../pyproject.toml

# The site, in build/docs: a broken link or an unknown option is an error.
docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'
	$(BIN)/python -m sphinx -b html -W --keep-going -d build/doctrees docs build/docs

clean:
	rm -rf build demo .venv *.egg-info .mypy_cache .ruff_cache .import_linter_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Debian's python3 may lack ensurepip; then the machine's own pip fills the environment.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "pipecompile needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1): try make PYTHON=python3.11" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
	  { $(PYTHON) -m venv --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@
