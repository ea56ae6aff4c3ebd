# One-word commands. Each makes its own set-up: python3 >= 3.11, make and a package registry are enough.
SHELL := /bin/sh
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/dev.lock
TOOLS := $(VENV)/.tools
READY := $(VENV)/.ready

.PHONY: help setup up test check lock bench demo soak docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

setup: $(READY) ## make .venv with the locked packages and the project itself (again when pyproject.toml or the lock changed)

up: $(READY) ## run a local log (ARGS="..." go to `llog up`)
	@$(BIN)/llog up $(ARGS)

test: $(READY) ## check, then every suite, fast first (SUITE=unit, SUITE="unit sim": only those)
	@$(BIN)/python -m devtools.suites $(SUITE)

check: $(READY) ## format, lint, types, import layers, freshness of the generated docs
	@$(BIN)/python -m devtools.suites check

lock: $(TOOLS) ## regenerate requirements/dev.lock from pyproject.toml (ARGS=--upgrade: take newer releases)
	@$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
		--custom-compile-command "make lock" --quiet $(ARGS) -o $(LOCK)

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
$(READY): pyproject.toml $(LOCK) | $(TOOLS)
	@echo "installing $(LOCK) into $(VENV) (the first time takes a minute or two)"
	@VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/uv pip sync --quiet $(LOCK) || \
		{ echo "uv could not install the lock; trying pip" >&2; $(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(LOCK); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@
