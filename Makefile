# Tasks. `make` or `make help` lists them; each is safe to run twice.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv/bin
export OMP_NUM_THREADS ?= 1

help:  ## list the tasks
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup:  ## make .venv with everything needed to build, serve and test
	@scripts/setup.sh

demo: setup  ## build TinyFlash, serve it with the real Triton server, ask it questions
	@OMP_NUM_THREADS=2 $(VENV)/python -m examples.demo

# Reordered, files of few tests come last, and some of the longest tests are alone in theirs.
test: lint  ## lint, types and every test that this machine can run
	$(VENV)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: setup  ## ruff and strict mypy
	$(VENV)/ruff check .
	$(VENV)/ruff format --check .
	$(VENV)/mypy

bench: setup  ## cost of the host side: admission of a long prompt, one scheduler step
	$(VENV)/python benchmarks/cpu/admission.py --tokens 855040
	$(VENV)/python benchmarks/cpu/scheduler_step.py --requests 256

soak: setup  ## twenty minutes of mixed traffic with faults; nothing may leak or be lost
	@rm -rf runs/soak
	$(VENV)/python benchmarks/load/soak.py --minutes 20 --out runs/soak.json

load: setup  ## 256 concurrent streams through the real server for two minutes
	@rm -rf runs/load
	$(VENV)/python benchmarks/load/load.py --out runs/load.json

plans: setup  ## TensorRT plans of TinyFlash, which need no GPU to build (a minute)
	@rm -rf runs/tinyflash-plans
	$(VENV)/dsv41-build engine --checkpoint_dir examples/tinyflash/checkpoint \
	  --output_dir runs/tinyflash-plans --plans
	$(VENV)/dsv41-build inspect --engine runs/tinyflash-plans

format: setup  ## rewrite the code in the project's format
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

clean:  ## remove what the tasks made, .venv aside
	rm -rf build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

.PHONY: help setup demo test lint bench soak load plans format clean
