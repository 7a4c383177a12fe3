# Two commands for a fresh machine with python3: `make quickstart` and `make test`. Both make their own environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart test lint rules clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(STAMP)

quickstart: $(STAMP)
	$(BIN)/emerge verify configs/quickstart.yaml

test: $(STAMP)
	$(BIN)/python -m pytest -n 2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

rules: $(STAMP)
	$(BIN)/emerge rules check

clean:
	rm -rf $(VENV) build dist emerge-out .pytest_cache .mypy_cache .ruff_cache
