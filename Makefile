SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
EXTRAS ?= test,dev,quant
INSTALLED := .venv/.installed-$(EXTRAS)
export UV_HTTP_TIMEOUT ?= 300

PYTHON ?=
N ?= 2
RECIPE ?= recipes/digits.yaml
ARGS ?=

.PHONY: help setup train test test-slow test-learning test-gpu slurm-packages lint format docs constraints

help:
	@echo 'make setup        Python 3.12 environment in .venv with everything pinned (PYTHON=... names the interpreter)'
	@echo '                  EXTRAS=test,dev,quant,gpu: with what a GPU can use; 3rdparty/README.md: with a Megatron of your own'
	@echo 'make train        train RECIPE=recipes/digits.yaml on N=2 processes; ARGS="seed=2 run_dir=runs/s2" overrides keys'
	@echo 'make test         tests that take seconds; ARGS="-k packing" goes to pytest'
	@echo 'make test-slow    kill tests, a real Slurm, more layouts: half an hour'
	@echo 'make test-learning   whole recipes, each to its target'
	@echo 'make test-gpu     tests that need an NVIDIA GPU'
	@echo 'make slurm-packages   as root on Debian: the Slurm that tests of slurm/ start; they are skipped without it'
	@echo 'make lint         ruff check, ruff format --check, shellcheck'
	@echo 'make format       what ruff can mend by itself'
	@echo 'make docs         remakes the generated tables in docs/'
	@echo 'make constraints  pins the indirect dependencies anew after a change of pyproject.toml'

setup: $(INSTALLED)

train: setup
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node $(N) -m megarl.train $(RECIPE) $(ARGS)

test: setup
	$(BIN)/python -m pytest -m "not slow and not learning and not gpu" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not learning and not gpu" $(ARGS)

test-learning: setup
	$(BIN)/python -m pytest -m "learning and not gpu" $(ARGS)

test-gpu: setup
	$(BIN)/python -m pytest -m "gpu" $(ARGS)

slurm-packages:
	@if PATH=$$PATH:/usr/sbin command -v slurmctld >/dev/null; then :; \
	elif [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	  echo 'megarl: no Slurm, and only root can install it with apt-get: its tests will be skipped' >&2; \
	else \
	  apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge; \
	fi

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/shellcheck slurm/*.sh .ci/run

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup
	$(BIN)/python -m tests.test_docs

# Of releases only.  In pyproject.toml the override of megatron-core hides its version, which is said once more.
constraints: $(BIN)/uv
	@$(if $(SUBMODULES),echo 'megarl: pins releases: git submodule deinit --all first' >&2; exit 1)
	$(BIN)/uv pip compile pyproject.toml --all-extras --python $(BIN)/python \
	  -c <(grep -o 'megatron-core==[^"]*' pyproject.toml) \
	  --no-emit-index-url --no-header --no-annotate --quiet --output-file constraints.txt

# Submodules that are checked out, and the releases whose place they take (as in setup.py).  They are editable: what runs
# is what is checked out.
SUBMODULES := $(wildcard 3rdparty/Megatron-LM/pyproject.toml 3rdparty/Megatron-Bridge/pyproject.toml)
RELEASES := $(SUBMODULES:3rdparty/Megatron-LM/%=megatron-core)
RELEASES := $(RELEASES:3rdparty/Megatron-Bridge/%=megatron-bridge)

# uv and not pip, because pip cannot leave out what Megatron Bridge asks for in vain ([tool.uv] in pyproject.toml).
# A folder is newer, too, when a submodule was emptied.
$(INSTALLED): pyproject.toml setup.py constraints.txt $(wildcard 3rdparty/*) $(SUBMODULES) | $(BIN)/uv
	$(BIN)/uv pip install --python $(BIN)/python -c <(sed '$(RELEASES:%=/^%==/d;)' constraints.txt) --compile-bytecode \
	  -e '.[$(EXTRAS)]'$(if $(SUBMODULES), --override <(printf -- '-e %s\n' $(abspath $(dir $(SUBMODULES)))))
	@touch $@

$(BIN)/uv: | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv

# Debian's python3.12 may lack ensurepip, and pyenv's shim of that name may be for a version that is not active: asked.
$(BIN)/pip:
	@for python in $(PYTHON) python3.12 python3 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python3 \
	    "$$(uv python find 3.12 2>/dev/null || true)"; do \
	  if "$$python" -c 'import sys, ensurepip; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
	    echo "$$python -m venv .venv"; exec "$$python" -m venv --clear .venv; \
	  fi; \
	done; \
	echo 'megarl: no Python 3.12 (with ensurepip) on PATH, in pyenv or in uv: install one, or make setup PYTHON=/path/to/it' >&2; \
	exit 1
