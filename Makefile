# Two commands: `make run` answers examples/prompts.jsonl, `make test` runs the tests. Both set up first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SLUICE_HOME ?= $(HOME)/.sluice
MODEL := smollm2-135m-instruct
MODEL_FILE := $(SLUICE_HOME)/models/$(MODEL).gguf
INPUT ?= examples/prompts.jsonl
OUTPUT ?= results/results.jsonl
export SLUICE_HOME
# For the tests, which run kernels in their own process; stages set the same themselves.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help setup run check format test test-redis prove chaos clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: $(VENV)/.installed $(MODEL_FILE) ## Create .venv, fetch the model, compile the kernels; once

# torch on its own first: everything else is small, and a failing download is then a short one to repeat.
$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed; $(PYTHON) is older. Try: make setup PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	touch $@

$(MODEL_FILE): | $(VENV)/.installed
	$(BIN)/sluice models pull $(MODEL)
	SLUICE_MODEL=$(MODEL) $(BIN)/python -m ops.warm

run: setup ## Answer the examples, or INPUT=... OUTPUT=...
	$(BIN)/sluice run -i $(INPUT) -o $(OUTPUT)

check: $(VENV)/.installed ## Format, lint, types, layers and the files for containers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml

format: $(VENV)/.installed ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup ## Run the tests
	$(BIN)/python -m pytest -m 'not slow'

test-redis: setup ## Run the tests of the transport on Debian's redis-server
	$(BIN)/python -m pytest -m 'not slow' --server=redis-server tests/pipeline

prove: setup ## Run the tests that take minutes
	$(BIN)/python -m pytest -m slow

chaos: setup ## Make everything go wrong that is in docs/faults.md, for as long as it takes
	$(BIN)/sluice chaos --long

clean: ## Remove what this Makefile and the tools made, but no model
	rm -rf $(VENV) build dist results .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
