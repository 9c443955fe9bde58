# The verbs of the project. Each makes its own virtual environment first; none needs anything but
# Python 3.11+, a C++ compiler and a package index.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2-135m
ARGS   ?=

# Some virtual machines advertise AMX but hide a CPUID leaf; torch's bf16 matmul then dies with SIGILL.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

CMAKE  = $(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN))/ninja --log-level=WARNING

.PHONY: serve native test test-isa test-native test-slow test-gpu lint format bench docs clean help

help:            ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.runtime: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; ridgeline needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: ridgeline needs Python 3.11 or newer" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt scikit-build-core cmake ninja
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable .
	@touch $@

# Triton 3.6.0 goes first and stays beside a CPU build of torch; a CUDA build replaces it by its own. Two clients go
# last, without their requirements: they ask for older packages than the other clients do, and run with the newer.
$(VENV)/.dev: $(VENV)/.runtime
	$(BIN)/pip install --quiet "triton==3.6.0; platform_system == 'Linux'"
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps instructor litellm
	@touch $@

$(VENV)/.docs: $(VENV)/.runtime
	$(BIN)/pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[docs]'
	@touch $@

serve: native               ## serve the default model on 127.0.0.1:8000 (MODEL=…, ARGS='--port 9000')
	$(BIN)/ridgeline serve $(MODEL) $(ARGS)

native: $(VENV)/.runtime    ## bring the native library up to date with its sources (RIDGELINE_NATIVE=0: do without)
ifneq ($(RIDGELINE_NATIVE),0)
	@$(CMAKE) -S native/editable -B native/editable >/dev/null
	@$(BIN)/cmake --build native/editable -- --quiet
endif

# The tests of one file stay together, for the engines and servers they share. Torch's threads sleep while they wait:
# with as many processes as cores, one that spins takes the core that the other needs.
test: lint native           ## every test but the slow and GPU ones, in two processes (ARGS='-n 0': in one)
	$(BIN)/ridgeline models pull smollm2-135m
	$(BIN)/ridgeline models pull all-minilm-l6-v2
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -rs -m 'not slow and not gpu' $(ARGS)

# What depends on the instruction set or the BLAS, once more with the ones of an AVX2-only machine. Each variable
# chooses for one library: the native one, numpy's OpenBLAS, torch's own kernels, its oneDNN and its MKL.
ISA_TESTS ?= tests/ops/test_cpu_library.py tests/quality tests/models/test_packed.py tests/models/test_encoder.py \
  tests/gateway/routing/test_evaluation.py tests/gateway/routing/test_prediction.py tests/engine/test_cuda_runner.py \
  tests/engine/test_determinism.py tests/engine/test_native_runner.py tests/engine/test_families.py
test-isa: $(VENV)/.dev native  ## the tests that depend on the instruction set, on AVX2 alone
	@if grep -q '^flags' /proc/cpuinfo 2>/dev/null && ! grep -qw avx512f /proc/cpuinfo; then \
	  echo "make: this CPU has no AVX-512: make test has run on AVX2 already"; exit 0; fi; \
	RIDGELINE_ISA=avx2 OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	  OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not gpu' $(ISA_TESTS) $(ARGS)

# The plain tests are of the very objects that `make native` builds. UBSan only traps beside another sanitizer, which
# halves the time to compile the kernels; make test-native SANITIZERS=undefined says what it found, and where.
SANITIZERS ?= address,undefined thread
test-native: native         ## the kernels' tests, per instruction set: plain, with ASan and UBSan, with TSan
	@$(CMAKE) -S native/editable -B native/editable -DRL_TESTS=ON
	@failed=0; for kind in plain $(SANITIZERS); do \
	  if [ $$kind = plain ]; then build=native/editable tests=build/native; \
	  else tests=build/test-$$(echo $$kind | tr , -) build=$$tests; \
	    $(CMAKE) -S native -B $$build -DRL_TESTS=ON -DRL_SANITIZE=$$kind || exit 1; fi; \
	  $(BIN)/cmake --build $$build --target rl_tests -- --quiet && \
	  $(BIN)/ctest --parallel 2 --test-dir $$tests --output-on-failure --no-tests=error $(ARGS) || failed=1; \
	done; exit $$failed

test-slow: $(VENV)/.dev native ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: $(VENV)/.dev native ## the tests that need a CUDA device, and the kernels' tests, compiled for it
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "make: torch sees no CUDA device" >&2; exit 1; }
	$(BIN)/python -m pytest -rs tests/ops/cuda $(ARGS)
	$(BIN)/python -m pytest -rs -m gpu $(ARGS)

lint: $(VENV)/.dev          ## formatting, lint, layers, types
	$(BIN)/ruff format --check ridgeline tests benchmarks examples docs/site
	$(BIN)/ruff check ridgeline tests benchmarks examples docs/site
	$(BIN)/lint-imports
	$(BIN)/mypy

format: $(VENV)/.dev        ## rewrite the code in the project's format
	$(BIN)/ruff format ridgeline tests benchmarks examples docs/site
	$(BIN)/ruff check --fix ridgeline tests benchmarks examples docs/site

bench: $(VENV)/.dev native  ## the CPU engine benchmark: a table and JSON
	$(BIN)/python benchmarks/engine_cpu.py $(ARGS)

# Not --quiet: it would hide the warnings, and --strict would count none.
docs: $(VENV)/.docs         ## the documentation site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:                      ## remove the virtual environment, the builds and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	rm -f ridgeline/ops/cpu/libridgeline_native.*
	find native/editable -mindepth 1 -not -name CMakeLists.txt -delete
