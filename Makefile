# `make help` lists what there is. Nothing is installed outside this directory, except by scripts/ensure-servers.
.DEFAULT_GOAL := help
.PHONY: help run test check bench sim sim-placement sim-warm chaos chaos-leases chaos-pools e2e lock clean ready python servers

PYTHON ?= python3
# More arguments for pytest, e.g. `make test ARGS="-x -k lease"`.
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-emit-index-url \
	--custom-compile-command "make lock" pyproject.toml

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.runtime ## start the whole system here, with nothing else installed (PORT=8008 DATA_DIR=.data)
	@exec $(BIN)/gpuorch dev $(if $(PORT),--port $(PORT)) $(if $(DATA_DIR),--data-dir "$(DATA_DIR)")

test: ready ## all tests, against private MariaDB, Redis, Valkey and Prometheus servers (ARGS="-x -k lease")
	$(BIN)/python -m tests $(ARGS)

check: ready ## format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest tests/unit tests/contracts $(ARGS)

bench: ready ## measure throughput, and its ratio to what the machine can do
	$(BIN)/python -m tests.bench $(ARGS)

sim: $(VENV)/.dev ## how long jobs wait by agent and priority: a flood, mixed sizes, deadlines, a slow lane (ARGS="--plot order.svg")
	$(BIN)/python -m tests.sim.order $(ARGS)

sim-placement: $(VENV)/.dev ## how much of a production cluster each placement policy can use (ARGS="--seeds 3"; needs ../shared/data)
	$(BIN)/python -m tests.sim.placement $(ARGS)

sim-warm: $(VENV)/.dev ## how often models are loaded and how long jobs wait, on a production trace (ARGS="--gpus 8 --plot warm.svg"; needs ../shared/data)
	$(BIN)/python -m tests.sim.warm $(ARGS)

chaos: ready ## kill, freeze and cut a cluster under load, then check every invariant (ARGS="--minutes 60 --seed 7")
	$(BIN)/python -m tests.chaos $(ARGS)

chaos-leases: ready ## 64 clients lease GPUs of a stand-in driver that fail and fill up (ARGS="--seed 7")
	$(BIN)/python -m tests.chaos.leases $(ARGS)

chaos-pools: ready ## change 20 pools at random while nodes and slots die; they must converge (ARGS="--minutes 5 --seed 7")
	$(BIN)/python -m tests.chaos.pools $(ARGS)

e2e: ready ## drive the installed commands as a user would
	$(BIN)/pytest -m e2e $(ARGS)

lock: $(VENV)/.dev ## write the lock files again after a change of pyproject.toml (ARGS=--upgrade for newer versions)
	$(COMPILE) --extra build --output-file requirements.lock $(ARGS)
	$(COMPILE) --extra build --extra dev --constraint requirements.lock --output-file requirements-dev.lock $(ARGS)

clean: ## remove the virtual environment and caches; data stays
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# What tests need, side by side: the one is busy with a processor, the other with the network and the disk. Nothing else
# here may run beside anything, whatever --jobs says: goals share one virtual environment, and tests the processors.
ready: python
	@$(MAKE) --no-print-directory --jobs 2 SIDE_BY_SIDE=yes $(VENV)/.dev servers
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif

servers:
	@scripts/ensure-servers

# The stamps below make a second call start at once; a changed lock file or pyproject.toml installs again.
define install
@echo "Installing $< into $(VENV); the first time takes about half a minute."
@$(PIP) install --quiet --no-deps "$$(grep '^pip==' $<)"
@$(PIP) install --no-deps --no-compile --requirement $<
@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
@touch $@
endef

$(VENV)/.runtime: requirements.lock pyproject.toml $(VENV)/.python
	$(install)

$(VENV)/.dev: requirements-dev.lock pyproject.toml $(VENV)/.python
	$(install)

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed, e.g.: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }

$(VENV)/.python: | python
	@echo "Creating $(VENV) with $$($(PYTHON) --version)."
	@$(PYTHON) -m venv --clear $(VENV) \
		|| { echo "The module venv does not work; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@
