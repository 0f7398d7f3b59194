# make demo   decode a real text through a small model whose indexer runs on keysieve, and draw what it selects
# make test   everything a machine without a GPU can check
# make docs   README's table, the pictures and the site (build/site); make dist: wheel and sdist
#
# Both build .venv on first use. PYTHON picks the interpreter (3.11 to 3.13), PIP_ARGS goes to every pip install (an
# index with a CPU build of torch, for instance), JOBS is how many test processes run side by side.
PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
VENV ?= .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint unit docs dist gpu-test clean help

help:
	@sed -n '1,3p' Makefile | cut -c3-

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] <= (3, 13) else "keysieve needs Python 3.11 to 3.13, this is %d.%d: run make PYTHON=python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_ARGS) -c constraints.txt -e '.[gpu,demo,docs,test]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/keysieve demo $(DEMO_ARGS)

test: lint unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.ready
	$(BIN)/pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

docs: $(VENV)/.ready
	$(BIN)/python tools/error_table.py
	$(BIN)/python tools/layout_pictures.py
	$(BIN)/keysieve bench figures
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/site
	@echo "the site: build/site/index.html"

dist: $(VENV)/.ready
	$(BIN)/python -m build --no-isolation --outdir dist .

gpu-test: $(VENV)/.ready
	$(BIN)/pytest tests/gpu $(PYTEST_ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis out
