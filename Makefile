# Every target works from a bare checkout: the environment is made on first use and kept until pyproject.toml changes.
#   PYTHON=...  the interpreter to start from (3.11 or newer)
#   JOBS=2       test files that run at a time; many start several processes of their own
#   RANKS_PER_GPU=1  how many ranks of `make test-gpu` may share a GPU where there are too few of them
#   BASE=REF     what `make check` compares with (default: HEAD, or main where nothing differs); SECONDS=20: tests it runs
#   SOAK=1/6     the piece of `make soak` to run (default 1/1: all)
#   TORCH=cpu   small CPU wheels of torch (about 200 MB); TORCH=default: what pip chooses (CUDA on Linux, about 3 GB)

TORCH ?= default
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
SOAK ?= 1/1
SECONDS ?= 20
TESTED_TORCH := torch<2.14# what the numbers of golden runs and planted bugs were recorded with
COMPAT ?= 5.16.1 5.17.0 5.23.0
COMPAT_TORCH ?= 2.11.0 2.15.0
PARITY := tests/parity tests/hf/test_parity.py tests/hf/test_vision.py
.DEFAULT_GOAL := help
.PHONY: help setup quickstart check test pytest lint format bench soak mutants test-gpu compat

help:
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

setup: $(VENV)/.setup-$(TORCH) ## make .venv with the package and its test dependencies (TORCH=cpu|default)

$(VENV)/.setup-$(TORCH): pyproject.toml tools/install.py
	@test -n "$(PYTHON)" || { echo "make setup needs Python 3.11 or newer; name one: make setup PYTHON=/path/to/python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python tools/install.py --torch $(TORCH) '.[test,lint]' '$(TESTED_TORCH)'
	@rm -f $(VENV)/.setup-*; touch $@

$(VENV)/.quickstart: $(VENV)/.setup-$(TORCH)
	@$(BIN)/python tools/install.py --torch $(TORCH) '.[quickstart]' '$(TESTED_TORCH)'
	@touch $@

quickstart: $(VENV)/.quickstart ## train a real pretrained model by RL into runs/quickstart, and show what it learned
	@$(BIN)/python -m examples.quickstart

test: setup ## what CI runs: style, types and the test suite, together: types use one core alone
	@$(MAKE) --no-print-directory -j2 lint pytest

# Bytecode is written, or each of the many programs that tests start would compile our modules anew.
pytest: setup
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -m "not gpu and not soak" -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations=15

check: setup ## what a change needs: lint of the changed files and the tests that reach them, within SECONDS; prints what it leaves out
	@$(BIN)/python -m tools.check $(if $(BASE),--base $(BASE)) --seconds $(SECONDS) --jobs $(JOBS)

lint: setup ## style, types and the direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/python -m tools.style_check
	@$(BIN)/lint-imports
	@$(BIN)/mypy

format: setup ## apply the formatter
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: setup ## benchmarks: one table, and JSON in bench/results
	@$(BIN)/python -m bench

soak: setup ## long tests, or the piece SOAK=I/N of them; adds a row to tests/soak-results.md
	@env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -m "soak and not gpu" --piece $(SOAK) --record-soak -n $(JOBS) --dist worksteal --durations=15

mutants: setup ## plants each bug of tests/mutants in a copy of the tree and runs the test that must fail
	@$(BIN)/python -m tests.mutants.run --write --jobs $(JOBS)

test-gpu: setup ## the same numbers on a GPU
	@$(BIN)/python -m pytest -m gpu tests/gpu

compat: $(COMPAT:%=compat-%) $(COMPAT_TORCH:%=compat-torch-%) ## parity of both engines under other versions of transformers and torch

compat-%:
	@test -x .venv-compat-$*/bin/python || $(PYTHON) -m venv .venv-compat-$*
	@.venv-compat-$*/bin/python tools/install.py --torch $(TORCH) '.[test]' 'transformers==$*' '$(TESTED_TORCH)'
	@.venv-compat-$*/bin/python -m pytest -m "not gpu and not soak" $(PARITY)

# Includes what a failed step leaves, where FSDP2's internals are reset.
compat-torch-%:
	@test -x .venv-compat-torch-$*/bin/python || $(PYTHON) -m venv .venv-compat-torch-$*
	@.venv-compat-torch-$*/bin/python tools/install.py --torch $(TORCH) '.[test]' 'torch==$*'
	@.venv-compat-torch-$*/bin/python -m pytest -m "not gpu and not soak" $(PARITY) tests/unit/test_library.py tests/distributed/test_guards.py
