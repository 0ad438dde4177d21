# Everything that a fresh clone needs: `make` lists it. Each target sets itself up, once, in .venv.

# The first of these that is new enough and can make virtual environments; or name one: make PYTHON=/path/to/python3.12
PYTHONS := python3.11 python3.12 python3.13 python3 python
CAN_RUN := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format docs bench simulate chaos lock clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile
	@echo
	@echo "  ARGS are handed on:  make demo ARGS='--speed 600'   make test ARGS='tests/unit -x'   make bench ARGS='--json figures.json'"

setup: .venv/.ready ## Install duetasks and all it needs into .venv; the other targets do it by themselves

demo: .venv/.ready ## A day of real flights: boarding calls scheduled, moved, cancelled; the agent killed in the middle
	@$(PY) -m pipeline.cli demo $(ARGS)

test: check ## Check, then run every test; a real Kafka is started for them
	@$(PY) -m pytest $(ARGS)

check: .venv/.ready ## Lint, format, types and layers: all that can be told without running it
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m mypy
	@$(PY) -m pyright --pythonpath $(PY)
	@.venv/bin/lint-imports

format: .venv/.ready ## Write the code as `make check` wants it
	@$(PY) -m ruff check --fix-only --quiet
	@$(PY) -m ruff format

docs: .venv/.ready ## Write the parts of the reference that follow from the code
	@$(PY) docs/generate.py

lock: .venv/.ready ## Write requirements.lock anew from pyproject.toml (installs uv into .venv)
	@$(PY) -m pip install --quiet --disable-pip-version-check uv
	@$(PY) -m uv pip compile pyproject.toml --extra embedded --extra dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-emit-find-links --quiet -o requirements.lock

bench: .venv/.ready ## Measure this machine, beside the plain loop as the ceiling; about four minutes
	@$(PY) -m pipeline.cli bench $(ARGS)

simulate: .venv/.ready ## The code on virtual time with every fault, by seed, for two minutes; ARGS='--for 1h' for longer
	@$(PY) -m pipeline.cli simulate $(or $(ARGS),--for 2m)

chaos: .venv/.ready ## Kill and freeze real processes at work, count what is lost, doubled, early, wrong; ARGS='--help' tells more
	@$(PY) -m tests.chaos $(ARGS)

clean: ## Remove what was installed, built and cached here; data folders of duetasks stay
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: .venv/.dependencies pyproject.toml
	@$(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

.venv/.dependencies: requirements.lock
	@python='$(PYTHON)'; \
	if [ -z "$$python" ]; then \
	  for each in $(PYTHONS); do \
	    if $$each -c '$(CAN_RUN)' 2>/dev/null; then python=$$each; break; fi; \
	  done; \
	fi; \
	if ! { [ -n "$$python" ] && "$$python" -c '$(CAN_RUN)' 2>/dev/null; }; then \
	  echo "duetasks needs Python 3.11, 3.12 or 3.13 with its venv module (python3-venv on Debian and Ubuntu): install one, or name it: make PYTHON=/path/to/python3.12" >&2; \
	  exit 1; \
	fi; \
	if ! .venv/bin/python -c '$(CAN_RUN)' 2>/dev/null; then "$$python" -m venv --clear .venv; fi
	@echo "Installing the dependencies into .venv: once, a minute or two" >&2
	@$(PY) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@
