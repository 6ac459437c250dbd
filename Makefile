# Two commands: `make demo` and `make test`. Both set up everything they need in .venv, once.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS := 1

.PHONY: help setup demo test test-slow lint types goldens schemas docs wheel-test clean

help:
	@echo "make demo     compile a spec into a plan, explain it, and train a small Llama on real text with 4 ranks"
	@echo "make test     lint, types and the test suite"
	@echo "make test-slow  tests that take minutes each; CI runs them too"
	@echo "make goldens  compile plans/*/spec.yaml anew, for review"
	@echo "make schemas  generate schemas/ from the types"
	@echo "make docs     generate docs/capabilities.md from the table of capabilities and the rules"
	@echo "make clean    remove .venv and everything that runs have written"

setup: .venv/installed

# The stamp is newer than what it was made from, so a second run costs nothing.
.venv/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Python 3.11 or newer is needed, but '$(PYTHON)' was not found"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed: make PYTHON=python3.11 ..."; exit 1; }
	@echo "Setting up .venv: the planner, PyTorch and the tools (once; some minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[runtime,dev]"
	@touch $@

demo: setup
	@$(BIN)/python scripts/demo.py

test: setup lint types
	@echo "Running the test suite"
	@$(BIN)/python -m pytest -q -m "not slow"

test-slow: setup
	@echo "Running the slow tests"
	@$(BIN)/python -m pytest -q -m slow

lint: setup
	@echo "Checking style"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: setup
	@echo "Checking types of titan_planner"
	@$(BIN)/mypy

schemas: setup
	@for kind in spec plan; do \
	  $(BIN)/python -c "import sys; from titan_planner.ir.schema import schema_text; sys.stdout.write(schema_text('$$kind'))" > schemas/$$kind.v1.schema.json; \
	done

docs: setup
	@$(BIN)/python -c "import sys; from titan_planner.render.capabilities import page; sys.stdout.write(page())" > docs/capabilities.md

goldens: setup schemas
	@for spec in plans/*/spec.yaml; do \
	  folder=$$(dirname $$spec); \
	  $(BIN)/titan-plan compile $$spec -o $$folder/plan.json && $(BIN)/titan-plan explain $$folder/plan.json > $$folder/explain.txt; \
	done

clean:
	rm -rf .venv outputs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
