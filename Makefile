# make demo | test | check | bench | clean. The first one sets up .venv; after that nothing needs the network
# but `adafuse models fetch`, which does nothing once the models are in the cache.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The first of these that is Python 3.11 or newer; or say make PYTHON=/path/to/python3.12
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
	$(shell $(p) -c 'import sys; sys.version_info >= (3, 11) and print("$(p)")' 2>/dev/null)))

BIN := .venv/bin
STAMP := .venv/.installed
OFFLINE := env HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
ONE_THREAD := OMP_NUM_THREADS=1
# Test processes at once. Each loads the models it needs: about 3 GB.
JOBS ?= 2

.PHONY: help .venv models demo test check format bench clean

help:
	@echo "make demo    a question answered by two real models, through LangChain and LlamaIndex"
	@echo "make test    all tests, those on the real models included"
	@echo "make check   ruff, mypy, import contracts"
	@echo "make bench   the benchmarks"
	@echo "make clean   remove .venv and what the tools left"

.venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt examples/requirements.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "No Python 3.11 or newer found; install one, or run: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is older than Python 3.11; run: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv .venv
	@echo "Installing into .venv; this takes a few minutes ..."
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	$(BIN)/pip install -qq --disable-pip-version-check --no-deps -r examples/requirements.txt
	@touch $@

models: $(STAMP)
	$(BIN)/adafuse models fetch --all

demo: models
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python examples/demo.py $(ARGS)

test: models
	$(OFFLINE) $(ONE_THREAD) $(BIN)/pytest -n $(JOBS) --dist loadfile $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict --no-warn-unused-configs -p adafuse_engine
	$(BIN)/mypy -p adafuse_integrations
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: models
	$(OFFLINE) $(ONE_THREAD) $(BIN)/python tests/benchmarks/run.py $(ARGS)

clean:
	rm -rf .venv build dist .benchmarks .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
