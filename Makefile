# Every target does all of its own set-up. The environment (11 GB) is built once and shared by every clone: `make env`.

PYTHON ?= python3
RUN := .venv/bin/python
export HF_HUB_OFFLINE := 1

.PHONY: help env demo test lint format plot patches-check

help:            ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

env:             ## build the environment and print its python as the last line
	@$(PYTHON) -m scripts.make_env

.venv: FORCE
	@$(PYTHON) -m scripts.make_env > /dev/null

demo: .venv      ## play one agent session on stock SGLang and with intentkv, side by side
	@$(RUN) -m intentkv.cli demo

test: lint       ## linters, type check, import contract, and every test
	@$(RUN) -m pytest

lint: .venv      ## ruff, mypy and the import contract
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@.venv/bin/lint-imports

format: .venv    ## rewrite the sources in the one format
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

plot: .venv      ## draw the results of agent evaluations under docs/results
	@$(RUN) scripts/plot_results.py

patches-check: .venv  ## compare the hooks of patches/ with the installed SGLang
	@$(RUN) scripts/patches_check.py

FORCE:
