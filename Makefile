# The verbs of the project. Each makes its own virtual environment first; none needs anything but
# Python 3.11+, a C++ compiler and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m
ARGS   ?=

# Some virtual machines advertise AMX but hide a CPUID leaf; torch's bf16 matmul then dies with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: serve test test-slow lint format bench clean help

help:            ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.runtime: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; ridgeline needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: ridgeline needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

serve: $(VENV)/.runtime     ## serve the default model on 127.0.0.1:8000 (MODEL=…, ARGS='--port 9000')
	$(BIN)/ridgeline serve $(MODEL) $(ARGS)

test: lint                  ## every test but the slow and GPU ones
	$(BIN)/ridgeline models pull smollm2-135m
	$(BIN)/python -m pytest -rs -m 'not slow and not gpu' $(ARGS)

test-slow: $(VENV)/.dev     ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.dev          ## formatting, lint, layers, types
	$(BIN)/ruff format --check ridgeline tests benchmarks
	$(BIN)/ruff check ridgeline tests benchmarks
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(VENV)/.dev        ## rewrite the code in the project's format
	$(BIN)/ruff format ridgeline tests benchmarks
	$(BIN)/ruff check --fix ridgeline tests benchmarks

bench: $(VENV)/.dev         ## the CPU engine benchmark: a table and JSON
	$(BIN)/python benchmarks/engine_cpu.py $(ARGS)

clean:                      ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
