# Every verb of this repository. `make help` lists them.
#
#   make demo PYTHON=python3.12        another interpreter
#   make test JOBS=4                   test files side by side, each with servers of its own
#   make demo PIP_FLAGS="..."          extra flags for pip, e.g. the index of PyTorch's CPU builds

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
JOBS ?= 1
BIN := $(VENV)/bin
# Tests and the demo must never wait for a model hub.
export HF_HUB_OFFLINE ?= 1
export HF_DATASETS_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help demo test test-gpu check acceptance bench render clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        YAML -> server -> questions -> verdict, on this machine's CPU"
	@echo "make test        the tests (no GPU needed)"
	@echo "make test-gpu    what runs on a GPU, on one"
	@echo "make check       ruff, mypy, configs, rendered CI files"
	@echo "make acceptance  the long runs (marker slow)"
	@echo "make bench       the tables of docs/benchmarks.md"
	@echo "make render      write the CI pipelines from the configs"

# One stamp for each set of extras, so that the demo does not wait for the test tools.
$(VENV)/.server: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[server]'
	touch $@

$(VENV)/.dev: $(VENV)/.server
	$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[server,lm-eval,test,dev]'
	touch $@

demo: $(VENV)/.server
	$(BIN)/python -m pytest evalsuite --config config-cpu.txt

# The same everywhere: a GPU that is here is for test-gpu, whose kernels are not interpreted.
test: export CUDA_VISIBLE_DEVICES =
test: export HIP_VISIBLE_DEVICES =
test: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not slow" --timeout=300 $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist loadfile) tests

test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not slow" --timeout=600 tests/gpu $(wildcard tests/serve/test_triton_*.py) tests/serve/test_flashinfer_attention.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/evalsuite validate configs --strict
	$(BIN)/evalsuite ci render --check

acceptance: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m slow tests --timeout=0

bench: $(VENV)/.dev
	mkdir -p results
	$(BIN)/moeserve bench peers --rounds 5 --soak 8 --save-result results/bench-cpu.json

render: $(VENV)/.dev
	$(BIN)/evalsuite ci render

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis results
