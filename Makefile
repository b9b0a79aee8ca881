# make setup   the environment in .venv, made once and again when pyproject.toml changes
# make demo    what weft does, in a minute, without a GPU
# make test    every test that a laptop can run in minutes; make lint: style and types
# make test-slow   every mutant and planted fault, exhaustive exploration, compilation for every GPU,
#   whole models, and all cases of which `make test` runs a few: two hours on two cores
# make test-gpu   the tests that need GPUs, 2 or 4 on one host; what needs more is left out, and said;
#   benchmarks/gpu_suite.py runs several at a time, and saves a row for each
# make docs   the blocks of pages that say what the code says, and the documents as a site, in site/
# make test-versions   the emulator and the language on other Tritons; VERSIONS=3.8.0 chooses
#
# TORCH and TRITON choose other versions, e.g. `make setup TRITON=triton==3.9.0`.

PYTHON ?= python3
TORCH  ?= torch==2.13.0
TRITON ?= triton==3.6.0
JOBS   ?= auto
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.weft-ready
ARGS   ?=
VERSIONS ?=

.PHONY: setup demo test test-slow test-gpu test-versions docs lint format clean
.DEFAULT_GOAL := setup

setup: $(STAMP)

# Where torch with CUDA or ROCm is already importable it is used as it is, with its Triton:
# a second one would be large and might not know the machine's driver.
$(STAMP): pyproject.toml
	@if [ ! -x $(BIN)/python ]; then \
	    if $(PYTHON) -c "import torch; assert torch.version.cuda or torch.version.hip" 2>/dev/null; \
	    then echo "setup: using the torch that is installed"; \
	        $(PYTHON) -m venv --system-site-packages $(VENV); \
	    else $(PYTHON) -m venv $(VENV); fi; \
	fi
	@$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)"
	@$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install -q "$(TRITON)"
	@$(BIN)/python -m pip install -q -e ".[dev]"
	@touch $@

demo: $(STAMP)
	@$(BIN)/python -m weft demo

test: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "not slow" -q $(ARGS)

# Kernels that wait for each other must not share GPUs with a second test's: first the tests that two
# GPUs are enough for, each pair of GPUs with a worker of its own, then one by one what needs more.
test-gpu: $(STAMP)
	@$(BIN)/python -m weft doctor
	@set -e; gpus=$$($(BIN)/python -c "import torch; print(torch.cuda.device_count())"); \
	pairs=$$(( gpus / 2 > 0 ? gpus / 2 : 1 )); \
	run="$(BIN)/python -m pytest -m gpu -rs --durations=10 --timeout 400 $(ARGS)"; \
	$$run -n $$pairs --dist worksteal --gpu-tests pairs; \
	if [ $$gpus -gt 2 ]; then $$run --gpu-tests larger; fi

test-slow: $(STAMP)
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow or hypothesis" -q --durations=12 $(ARGS)

test-versions: $(STAMP)
	@TEST_PYTHON=$(BIN)/python JOBS=$(JOBS) ARGS="$(ARGS)" .ci/versions $(VERSIONS)

docs: $(STAMP)
	@$(BIN)/python docs/generate
	@$(BIN)/python -m mkdocs build --strict --site-dir site

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@if command -v node >/dev/null && $(BIN)/pyright --version >/dev/null 2>&1; \
	then $(BIN)/pyright; \
	else echo "lint: pyright is left out: it needs node, and fetches itself once"; fi

format: $(STAMP)
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
