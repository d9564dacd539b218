# make run      environment + the default run          make lint    ruff and mypy
# make test     quick tests                            make bench   benchmarks (slow, prints numbers)
# make test-full  every test                           make clean   remove the environment and caches
# PYTHON=/path/to/python3.11 make run    picks the interpreter of the environment.
# ARGS="model=t5_tiny" make run          adds overrides to the default run.

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help run test test-full lint bench clean env dev-env

VENV ?= .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
RECORDED := pyproject.toml constraints.txt
ARGS ?=
PYTEST_ARGS ?=
# The first interpreter that is new enough and can make an environment.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3 python; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)

help:
	@sed -n '1,5p' Makefile

$(PY):
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer with venv was found. Install it (on Debian: python3-venv), or name it: PYTHON=/path/to/python3.11 make run"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# One stamp each, older than any change of what it was made from.
$(VENV)/.env-made: $(RECORDED) | $(PY)
	@echo "Installing the packages (the first time: some minutes, mostly torch) ..."
	$(PIP_INSTALL) --editable .
	@touch $@

$(VENV)/.dev-env-made: $(VENV)/.env-made
	$(PIP_INSTALL) --editable '.[tensorboard,flights,images,optuna,dev]'
	@touch $@

env: $(VENV)/.env-made
dev-env: $(VENV)/.dev-env-made

run: env
	@$(BIN)/fsdp-launch $(ARGS)

test: dev-env
	$(PY) -m pytest $(PYTEST_ARGS)

test-full: dev-env
	$(PY) -m pytest --full $(PYTEST_ARGS)

lint: dev-env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: dev-env
	@for b in benchmarks/*.py; do echo "== $$b"; $(PY) "$$b" || exit 1; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
