# One-word commands. Each makes its own set-up: python3 >= 3.11, make and a package registry are enough.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/dev.lock
RUNTIME_LOCK := requirements/runtime.lock
RUNTIME_EXTRAS := broker keyed oxia postgres sql
TOOLS := $(VENV)/.tools
RUNTIME := $(VENV)/.runtime
READY := $(VENV)/.ready
# Everything contains what running needs: once it is installed, it stays.
UP := $(if $(findstring --pipeline,$(ARGS)),$(READY),$(firstword $(wildcard $(READY)) $(RUNTIME)))
COMPILE := $(BIN)/uv pip compile pyproject.toml --universal --python-version 3.11 --custom-compile-command "make lock" --quiet

.PHONY: help setup up test check lock bench demo soak docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv with all locked packages and the project itself (again when pyproject.toml or the lock changed)

up: $(UP) ## run a local log, with only the packages that it needs (ARGS="..." go to `llog up`; ARGS=--pipeline installs Spark)
	@$(BIN)/llog up $(ARGS)

test: $(READY) ## check, then every suite, fast first (SUITE=unit, SUITE="unit sim": only those)
	@$(BIN)/python -m devtools.suites $(SUITE)

check: $(READY) ## format, lint, types, import layers, docs (fresh, wrapped, links)
	@$(BIN)/python -m devtools.suites check

lock: $(TOOLS) ## regenerate both locks in requirements/ from pyproject.toml (ARGS=--upgrade: take newer releases)
	@$(COMPILE) --all-extras $(ARGS) -o $(LOCK)
	@$(COMPILE) $(addprefix --extra ,$(RUNTIME_EXTRAS)) --constraints $(LOCK) -o $(RUNTIME_LOCK)

bench: $(READY) ## run the benchmarks (ARGS="..." go to `python -m bench`)
	@$(BIN)/python -m bench $(ARGS)

demo: $(READY) ## show the log at work, end to end (ARGS="..." go to `llog demo`)
	@$(BIN)/llog demo $(ARGS)

soak: $(READY) ## search new schedules of the simulation for an hour (ARGS="..." go to `llog simulate` instead)
	@$(BIN)/llog simulate $(or $(ARGS),--seed $$(date +%s) --seeds 1000000 --seconds 3600)

docs: $(READY) ## regenerate the docs that are made from the code
	@$(BIN)/python -m devtools.docs

clean: ## remove caches and build output (not .venv, not your data)
	@rm -rf build dist artifacts .mypy_cache .ruff_cache .hypothesis .pytest_cache .import_linter_cache spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# A venv that could not be finished is removed again, so that the next run does not trip over half of one.
$(TOOLS):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "llog needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing): install one, or name it with make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || \
		{ rm -rf $(VENV); echo "'$(PYTHON) -m venv $(VENV)' failed: install the venv module of your Python (Debian: python3-venv) and check that this directory is writable" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	@touch $@

# uv does not read pip's configuration. Where only pip knows the way to a registry, pip installs the same pins.
$(RUNTIME): $(RUNTIME_LOCK)
$(READY): $(LOCK)
$(RUNTIME) $(READY): pyproject.toml | $(TOOLS)
	@echo "installing $(filter %.lock,$^) into $(VENV) (the first time takes a minute or two)"
	@rm -f $(RUNTIME) $(READY)
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip sync --quiet $(filter %.lock,$^) || \
		{ echo "uv could not install the lock; trying pip" >&2; $(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(filter %.lock,$^); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@
