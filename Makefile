# Every target builds .venv by itself from a bare Python (3.11 to 3.13).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs_ready
VERSION := $(shell sed -n 's/__version__ = "\(.*\)"/\1/p' colonnade/version.py)
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadgroup

# Ranks of the tests are processes: one thread each, or they fight over the cores.
export OMP_NUM_THREADS := 1
# Plain gloo turns mismatched collectives into aborts; with this they are Python errors.
export TORCH_DISTRIBUTED_DEBUG := DETAIL
# Without compiled files every process of every test compiles the package and its own test again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test short long browser mutants release-check recording bench docs check fast lint types layers clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(READY)  ## build .venv with the package and its development tools

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## train a small GPT on 4 ranks of this machine: data 2 x pipeline 2
	TORCH_DISTRIBUTED_DEBUG=OFF $(BIN)/colonnade demo --output examples/gpt/output

test: $(READY)  ## everything: `make check` and the slow tests, in under fifteen minutes
	$(MAKE) -j2 short lint types layers

short: $(READY)
	$(PYTEST) -m "not long"

long: $(VENV)/.long  ## the tests that are left out of `make test`: more layouts, more kills, and the slow ones with DETAIL; with TENTH=0 to 9, a tenth of them
	$(BIN)/python -m pytest -q -m long
	ALL_DETAIL=1 $(PYTEST) -m "slow and not long"

$(VENV)/.long: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,long]'
	touch $(VENV)/.long

mutants: $(READY)  ## change the package at random and see which changes no test notices: COUNT=50 SEED=0 JOBS=2
	$(BIN)/python -m tests.mutants --count $(or $(COUNT),50) --seed $(or $(SEED),0) --jobs $(or $(JOBS),2)

release-check: $(VENV)/.long  ## build wheel and sdist, check them, install the wheel in an empty environment and run the demo there
	$(BIN)/python tools/release_check.py

recording: $(READY)  ## record the demo for the README, docs/images/demo.svg
	cd $$(mktemp -d) && PATH=$(CURDIR)/$(BIN):$$PATH $(CURDIR)/$(BIN)/python $(CURDIR)/tools/record_demo.py $(CURDIR)/docs/images/demo.svg colonnade demo

bench: $(READY)  ## all benchmarks and one table of them, in about fifteen minutes; best with nothing else running
	env -u OMP_NUM_THREADS TORCH_DISTRIBUTED_DEBUG=OFF $(BIN)/python benchmarks/all.py

docs: $(DOCS_READY)  ## build the site into build/site/VERSION; a warning or a link that leads nowhere is an error
	$(BIN)/python -m sphinx -W --keep-going -q -j 2 -b html -d build/doctrees docs build/site/$(VERSION)
	@echo "open build/site/$(VERSION)/index.html"

$(DOCS_READY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $(DOCS_READY)

browser: $(VENV)/.long docs  ## open the site and the report's pages in headless Chromium (Debian's package, or CHROMIUM=path)
	$(BIN)/python -m pytest -q -rs -m long tests/browser tests/proof/report/test_browser.py

check: $(READY)  ## lint, types, layering and the fast tests, in about two minutes
	$(MAKE) -j2 fast lint types layers

fast: $(READY)
	$(PYTEST) -m "not slow"

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

layers: $(READY)
	$(BIN)/lint-imports

clean:  ## remove what the other targets made
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
