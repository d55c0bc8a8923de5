# Every target builds .venv by itself from a bare Python (3.10 to 3.13).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist loadgroup

# Ranks of the tests are processes: one thread each, or they fight over the cores.
export OMP_NUM_THREADS := 1
# Plain gloo turns mismatched collectives into aborts; with this they are Python errors.
export TORCH_DISTRIBUTED_DEBUG := DETAIL
# Without compiled files every process of every test compiles the package and its own test again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo test short long mutants bench check fast lint types layers clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(READY)  ## build .venv with the package and its development tools

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

demo: $(READY)  ## train a small GPT on 4 ranks of this machine: data 2 x pipeline 2
	TORCH_DISTRIBUTED_DEBUG=OFF $(BIN)/colonnade run --nproc 4 examples/gpt/train.py --fresh

test: $(READY)  ## everything: `make check` and the slow tests, in under fifteen minutes
	$(MAKE) -j2 short lint types layers

short: $(READY)
	$(PYTEST) -m "not long"

long: $(READY)  ## the tests that are left out of `make test`: more layouts, more kills; with TENTH=0 to 9, a tenth of them
	$(BIN)/python -m pytest -q -m long

mutants: $(READY)  ## change the package at random and see which changes no test notices: COUNT=50 SEED=0 JOBS=2
	$(BIN)/python -m tests.mutants --count $(or $(COUNT),50) --seed $(or $(SEED),0) --jobs $(or $(JOBS),2)

bench: $(READY)  ## all benchmarks and one table of them, in about fifteen minutes; best with nothing else running
	env -u OMP_NUM_THREADS TORCH_DISTRIBUTED_DEBUG=OFF $(BIN)/python benchmarks/all.py

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
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
