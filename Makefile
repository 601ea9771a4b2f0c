# Two commands are all that a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: demo demo-vllm test test-vllm lint soak soak-events soak-http soak-link soak-log soak-mover mutants clean

$(VENV)/.ready: requirements/run.txt requirements/dev.txt pyproject.toml setup.py kvstore/_mover.c kvstore/_xxh3.h
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned requirements into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/pip install --quiet -r requirements/dev.txt
	@$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(VENV)/.ready
	@$(BIN)/python -m bench demo $(ARGS)

test: lint
	@$(BIN)/python -m pytest -m "not soak and not vllm" $(ARGS)

# Real vLLM engines, in an environment of their own outside the clone, made when it is absent.
test-vllm: $(VENV)/.ready
	@VLLM_PYTHON=$$($(BIN)/python -m bench.vllm_environment) && export VLLM_PYTHON && \
	  $(BIN)/python -m pytest tests/vllm --timeout 300 $(ARGS)

demo-vllm: $(VENV)/.ready
	@$(BIN)/python -m bench demo-vllm $(ARGS)

lint: $(VENV)/.ready
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

soak: $(VENV)/.ready
	@$(BIN)/python -m pytest -m soak --timeout 3600 $(ARGS)

# About eleven minutes: whatever is sent to those who read events, and to the Conductor over HTTP.
soak-events: $(VENV)/.ready
	@$(BIN)/python -m pytest -m soak tests/conductor/test_event_fuzz.py tests/conductor/test_strange_engines.py $(ARGS)

soak-link: $(VENV)/.ready
	@echo "about ten minutes: who runs next in a client that is cut off, closed and cut off again"
	@$(BIN)/python -m pytest -m soak tests/client $(ARGS)

soak-http: $(VENV)/.ready
	@echo "about twenty minutes: operations in any order, and whatever is sent over HTTP"
	@$(BIN)/python -m pytest -m soak tests/admin/test_fuzz.py $(ARGS)

soak-log: $(VENV)/.ready
	@echo "about ten minutes: whatever may lie in the directories of the SSD log"
	@$(BIN)/python -m pytest -m soak tests/ssd/test_fuzz.py $(ARGS)

soak-mover: $(VENV)/.ready
	@echo "about two minutes: random jobs on the native mover under sanitizers"
	@$(BIN)/python -m pytest -m soak tests/test_mover_sanitized.py $(ARGS)

# One-line faults, each applied to a copy of the tree: the tests named beside it must fail.
mutants: $(VENV)/.ready
	@$(BIN)/python -m tests.mutants.run $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
