# Everything below needs make and Python 3.11 or newer with its venv module; nothing else has to be installed first.
#
#   make demo ARGS="--steps 10"     make test PYTEST_ARGS="-k norms"     make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Two workers: the tests keep themselves to one thread each.
PYTEST_ARGS ?= -n 2

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
REQUIREMENTS := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s %s\n", $$1, $$2 }' Makefile

demo: $(VENV)/.installed ## Train a small model under the tracker and look at its norms; ARGS="--help" lists the options
	$(VENV)/bin/scion-telemetry demo $(ARGS)

# A tracker under test talks to no server and opens no window.
test: export OMP_NUM_THREADS ?= 1
test: export WANDB_MODE ?= offline
test: export MPLBACKEND ?= Agg
test: $(VENV)/.installed-dev ## Run the tests; PYTEST_ARGS replaces "-n 2"
	$(VENV)/bin/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev ## Check style, format and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy -p scion_telemetry

clean: ## Remove the virtual environment, builds and caches; runs/ stays
	rm -rf $(VENV) build dist htmlcov .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than what decides the installation, or it is done again. The larger one serves both purposes.
$(VENV)/.installed: $(REQUIREMENTS) | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.installed-dev: $(REQUIREMENTS) | $(VENV)/bin/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(VENV)/.installed $@

$(VENV)/bin/python:
	@command -v $(PYTHON) > /dev/null || { \
	  echo "$(PYTHON) is not installed: name a Python 3.11 or newer, as in 'make demo PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1):" \
	    "name another one, as in 'make demo PYTHON=python3.12'." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
	  rm -f $@; \
	  echo "$(PYTHON) made no virtual environment. On Debian and Ubuntu: apt install python3-venv." >&2; exit 1; }
