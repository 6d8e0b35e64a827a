# `make help` lists the targets.  Everything runs in .venv, made on first use.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# shows what it fetches
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help setup demo test format-check lint types unit coverage test-slow mutants fuzz house bench docs browser clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(STAMP) ## make .venv and install the package with its pinned tools

# Build isolation would fetch unpinned build tools; the pinned ones are in the constraints.
$(STAMP): pyproject.toml constraints.txt
	@echo "making $(VENV), once; PyTorch alone is 200 MB to fetch, so that this takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) hatchling editables
	@# a pip before 25.1 is silent while it unpacks
	@(while sleep 3; do printf .; done) & dots=$$!; trap "kill $$dots" EXIT; \
		$(PIP) --no-build-isolation -e '.[dev]'
	@touch $(STAMP)

demo: setup ## train, evaluate and compare six kinds of attention on bundled digits (QUICK=1: two, in a minute)
	$(BIN)/gpattention demo $(if $(QUICK),--quick)

test: setup format-check lint types unit ## format check, lint, types, fast tests

format-check:
	$(BIN)/ruff format --check .

lint:
	$(BIN)/ruff check .

types:
	$(BIN)/mypy

# One thread per worker: the matrices are small and two cores are all we count on.
unit:
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m 'not slow and not gpu'

# Apart from the tests, whose time tracing nearly doubles.
coverage: setup ## the fast tests once more, with the lines that none of them runs
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(WORKERS) -m 'not slow and not gpu' \
		--cov --cov-report=term-missing:skip-covered --cov-fail-under=97

test-slow: setup ## the long tests: large sizes, compilers, and a GPU where there is one
	$(BIN)/pytest -m 'slow or gpu'

mutants: setup ## plant known bugs in a copy and check that the tests notice each one
	$(BIN)/python scripts/mutants.py --workers $(WORKERS)

# SEED chooses the cases, MINUTES how long, CASE=AREA:NUMBER repeats one.
SEED ?= 0
MINUTES ?= 4
fuzz: setup ## attack with random cases (SEED=0 MINUTES=4); CASE=maths:17 repeats one
	$(BIN)/python -m tests.fuzz $(if $(CASE),--case $(CASE),--seed $(SEED) --minutes $(MINUTES) --workers $(WORKERS))

house: setup ## files and lines of code, room by room, and what common tasks walk through
	-$(BIN)/python scripts/house.py
	$(BIN)/python scripts/house.py --walks

bench: setup ## time posteriors, training steps and 65,536 tokens on this CPU, in a minute or two
	$(BIN)/gpattention bench cpu

docs: setup ## build the documentation into site/
	$(PIP) --no-build-isolation -e '.[docs]'
	$(BIN)/mkdocs build --strict

browser: setup ## open a report in headless Chromium; installs it where it can
	scripts/browser.sh $(BIN)/python
	OMP_NUM_THREADS=1 $(BIN)/pytest -rs tests/browser

clean: ## remove everything that was built
	rm -rf $(VENV) build dist site .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
