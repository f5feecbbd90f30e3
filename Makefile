# Two commands on a fresh machine: `make quickstart` and `make test`. Both set up a virtual environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
RUN := $(VENV)/.run
CORE := $(VENV)/.core
DEV := $(VENV)/.dev

.PHONY: help quickstart test-core test test-slow test-weekly test-scorers campaign check bench results docs wheel clean

help:
	@echo "make quickstart   compare routers on real text (three minutes on two idle cores)"
	@echo "make test-core    run the tests of the library alone, but for the slow ones"
	@echo "make test         run the tests, but for the slow ones"
	@echo "make test-slow    run the slow ones"
	@echo "make test-weekly  the contract for every router with every mixer compiled, all layouts, all kernels"
	@echo "make test-scorers the official scorers, fetched from their repositories, on our prediction files"
	@echo "make campaign     random programs against the promises of docs/reliability.md (two minutes on two idle cores)"
	@echo "make check        format, lint and type-check"
	@echo "make bench        measure the MoE layer against its limit and its peers"
	@echo "make results      make the pages of docs/results from records/"
	@echo "make docs         build the documentation into site/; any warning is an error"
	@echo "make wheel        build both wheels, install them in a clean environment and try them"

$(RUN): packages/pointsman/pyproject.toml packages/pointsman-lab/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable packages/pointsman --editable 'packages/pointsman-lab[report]'
	@touch $@

$(CORE): packages/pointsman/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable 'packages/pointsman[hf,dev]'
	@touch $@

$(DEV): $(RUN)
	$(INSTALL) --editable 'packages/pointsman[hf]' --editable 'packages/pointsman-lab[report,track,dev]'
	@touch $@

quickstart: $(RUN)
	$(BIN)/pointsman compare --routers smoe,xmoe,hyperrouter,dense-matched --data stdlib --preset tiny-decoder --steps 400 --eval-tokens 50000 --out runs/quickstart

test-core: $(CORE)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not slow" tests/library

test: $(DEV)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m "not slow"

test-slow: $(DEV)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m slow

test-weekly: $(DEV)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --override-ini faulthandler_timeout=4000 --all-specs tests/library/contract tests/library/kernels tests/lab/parallel/test_invariant.py

test-scorers: $(DEV)
	POINTSMAN_ORIGINALS=$${POINTSMAN_ORIGINALS:-github} $(BIN)/python -m pytest tests/tasks/test_official.py

campaign: $(DEV)
	$(BIN)/python tests/campaigns

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(DEV)
	$(INSTALL) --editable 'packages/pointsman-lab[bench]'
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.bench --out benchmarks/results/layer.md

results: $(DEV)
	$(BIN)/python -m tools.results

docs: $(RUN)
	$(INSTALL) --editable 'packages/pointsman-lab[docs]'
	$(BIN)/zensical build --strict --clean

wheel:
	.ci/wheel $(PYTHON)

clean:
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache .pytest_cache
