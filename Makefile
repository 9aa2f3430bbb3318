# Every target does all of its own set-up. The environment (11 GB) is built once and shared by every clone: `make env`.

PYTHON ?= python3
RUN := .venv/bin/python
export HF_HUB_OFFLINE := 1

.PHONY: help env demo test test-gpu lint format bench fuzz soak plot patches-check train-head

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

test-gpu: .venv  ## on a machine with a GPU: every attention backend, with and without graphs; then the benchmarks
	@$(RUN) -m pytest tests/gpu
	@$(RUN) scripts/bench.py gpu_serving gpu_kernels gpu_decode

lint: .venv      ## ruff, mypy and the import contract
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@.venv/bin/lint-imports

format: .venv    ## rewrite the sources in the one format
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

bench: .venv     ## every benchmark in a small configuration: results and plots under docs/results
	@$(RUN) scripts/bench.py

plot: .venv      ## draw the results of agent evaluations under docs/results
	@$(RUN) scripts/plot_results.py

FUZZ_STEPS ?= 100000

fuzz: .venv      ## random lives of the real cache, FUZZ_STEPS=100000 steps; what fails stays in build/fuzz
	@INTENTKV_FUZZ_STEPS=$(FUZZ_STEPS) $(RUN) -m pytest tests/property/test_reclaim_machine.py -q \
		--hypothesis-profile=fuzz --durations=0 --disable-warnings

SOAK_MINUTES ?= 30

soak: .venv      ## mixed agents on a real server for SOAK_MINUTES=30: memory, counters, throughput; kept in docs/results/soak.json
	@$(RUN) scripts/soak.py --minutes $(SOAK_MINUTES)

HEAD := build/head
TRAIN_TRACES ?= 120
HELD_OUT_TRACES ?= 24

train-head: .venv  ## train a residual head for SmolLM2-135M and compare it with the rule, on held-out sessions
	@rm -rf $(HEAD)
	@$(RUN) scripts/make_traces.py --world harbour --world festival --seed 1 --count $(TRAIN_TRACES) --out $(HEAD)/train.jsonl
	@$(RUN) scripts/make_traces.py --world greenhouse --seed 1001 --count $(HELD_OUT_TRACES) --out $(HEAD)/held-out.jsonl
	@model=$$($(RUN) -m intentkv.evals.model) && for part in train held-out; do \
		$(RUN) scripts/build_dataset.py --traces $(HEAD)/$$part.jsonl --model $$model --out $(HEAD)/$$part || exit 1; done && \
		$(RUN) scripts/train_residual_head.py --data $(HEAD)/train --held-out $(HEAD)/held-out --model $$model \
		--out $(HEAD)/head.safetensors

patches-check: .venv  ## compare the hooks of patches/ with the installed SGLang
	@$(RUN) scripts/patches_check.py

FORCE:
