# Two commands are all that a newcomer needs: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

# Tests and demo start many Python processes: none should compile again what it imports.
export PYTHONDONTWRITEBYTECODE :=

SOAKS := soak-cluster soak-crash soak-events soak-handoff soak-http soak-link soak-log soak-models soak-mover soak-simulation soak-socket

.PHONY: demo demo-cluster demo-vllm test test-cluster test-compiled test-vllm lint soak $(SOAKS) mutants wheel clean

$(VENV)/.ready: requirements/run.txt requirements/stores.txt requirements/tokenizers.txt requirements/dev.txt pyproject.toml setup.py $(wildcard kvstore/mover/*.[ch])
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing pinned requirements into $(VENV) (the first time takes a minute or two)"
	@$(BIN)/pip install --quiet --no-compile -r requirements/dev.txt
	@$(BIN)/pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

demo: $(VENV)/.ready
	@$(BIN)/python -m bench demo $(ARGS)

demo-cluster: $(VENV)/.ready
	@$(BIN)/python -m bench demo-cluster $(ARGS)

# One process more than two cores, for tests also wait; each costs 11 s of CPU before its first
# test. ARGS=-n0 runs the tests in this one.
TESTERS := $(shell test $$(nproc) -lt 4 && echo 3 || echo 4)
test: lint
	@$(BIN)/python -m pytest -m "not soak and not vllm and not cluster" -n $(TESTERS) --dist worksteal $(ARGS)

# The tests of the state and the node, with that core as `make wheel` compiles it.
test-compiled: $(VENV)/.ready
	@$(BIN)/python -m tests.compiled

# Several nodes as real processes, and real servers of etcd and Redis: about three minutes. Servers
# that are not installed are unpacked from Debian's packages outside the clone.
test-cluster: $(VENV)/.ready
	@-$(BIN)/python -m bench.store_programs >/dev/null
	@-$(BIN)/python -m bench.mooncake_wheel
	@$(BIN)/python -m pytest tests/cluster_processes -m "cluster and not soak" -n auto --maxprocesses 2 $(ARGS)

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

# Tests that look for minutes, by what they look for (tests/soaks.py). Each says first how long it
# takes. ARGS="--soak-seconds 20" lets fuzzers look only so long.
soak: $(VENV)/.ready
	@$(BIN)/python -m pytest -m soak $(ARGS)

$(SOAKS): soak-%: $(VENV)/.ready
	@$(BIN)/python -m pytest --soak $* $(ARGS)

# One-line faults, each applied to a copy of the tree: the tests named beside it must fail.
mutants: $(VENV)/.ready
	@$(BIN)/python -m tests.mutants.run $(ARGS)

# The core compiled: two minutes, and gcc. Folders of their own, for what was built before would be
# packed too.
wheel: $(VENV)/.ready
	@rm -rf build/compiled
	@KVSTORE_COMPILE=1 $(BIN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:
	rm -rf $(VENV) build dist *.egg-info
