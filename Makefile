# Everything a newcomer needs: `make demo` runs the main job, `make test` passes the tests.
PY := .venv/bin/python
.DEFAULT_GOAL := help

help:            ## what there is
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup:           ## install what is needed, build the C parts; safe to repeat
	@./scripts/setup

demo: setup      ## eight rollouts in real sandboxes through all five services
	@$(PY) -m demo

test: setup      ## every tier of tests
	@./scripts/test

lint: setup      ## types, style, import rules
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && .venv/bin/lint-imports

chaos: setup     ## the long fault runs: 20 seeds per fault point, ten minutes of edge restarts
	@$(PY) -m tests.chaos

docs: setup      ## write the generated pages again
	@$(PY) -m scripts.messages > docs/messages.md && $(PY) -m scripts.glossary

clean:           ## remove what was built
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis demo/out bench/out

.PHONY: help setup demo test lint chaos docs clean
