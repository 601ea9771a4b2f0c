# Two commands are all that a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo test lint soak clean

$(VENV)/.ready: requirements/run.txt requirements/dev.txt pyproject.toml setup.py kvstore/_mover.c kvstore/_xxh3.h
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned requirements into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/pip install --quiet -r requirements/dev.txt
	@$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(VENV)/.ready
	@$(BIN)/python -m bench demo $(ARGS)

test: lint
	@$(BIN)/python -m pytest -m "not soak" $(ARGS)

lint: $(VENV)/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

soak: $(VENV)/.ready
	@$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
