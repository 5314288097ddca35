# The two commands of the README are `make quickstart` and `make test`; each sets up .venv on first use.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: quickstart test test-slow lint learning-check starter clean

$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON): version is older than 3.11; expected Python 3.11 or newer (set PYTHON=...)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.test: $(VENV)/.runtime
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

quickstart: $(VENV)/.runtime
	$(BIN)/etude quickstart $(ARGS)

test: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/python -m pytest -n 2 $(ARGS)

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/mypy --strict src

learning-check: $(VENV)/.runtime
	$(BIN)/etude eval learning-check $(ARGS)

starter: $(VENV)/.runtime
	$(BIN)/etude model starter $(ARGS)

clean:
	rm -rf $(VENV) runs .cache
