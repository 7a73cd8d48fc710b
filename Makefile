# Every target does its own set-up. `make` alone lists them.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# One more than cores: doors and servers are waited for as often as they compute.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(4, 1 + len(os.sched_getaffinity(0))))' 2>/dev/null || echo 2)

# Workers share the cores out: threads that wait for each other cost a busy machine most of its time.
# Files in their order: those of unit, small and quick, fill the workers up at the end.
SHARED := OMP_NUM_THREADS=1 $(BIN)/pytest tests -n $(WORKERS) --dist loadfile --no-loadscope-reorder
BUILD_EXTENSION := import sys; from scalewise.hardware import DeviceKind; \
  from scalewise.strategies.deepspeed_ops import build_extension; \
  build_extension(sys.argv[1], DeviceKind.cpu)
NATIVE_ONLY := from scalewise.hardware import DeviceKind, Hardware, resolve_for_machine; \
  print("precision=fp32" * resolve_for_machine(Hardware(device=DeviceKind.cpu)).emulates_bf16)
USUAL := "not exhaustive and not gpu and not timed"

.DEFAULT_GOAL := help
.PHONY: docs lint matrix bench help install demo check test coverage exhaustive gpu browser native slurm lock clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 20

install: $(READY) ## make .venv and install the locked versions into it

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "scalewise needs Python 3.11 or newer; say which: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## train small models on this machine's CPU, in bf16 too where it has it, and report
	$(BIN)/scalewise train experiment=demo sweep=precision_by_layout hardware=cpu \
	  $$($(BIN)/python -c '$(NATIVE_ONLY)')

lint: $(READY) ## ruff, mypy on src, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

check: lint ## lint and unit tests: a few minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -q -n $(WORKERS)

test: lint docs browser slurm ## everything CI runs
	$(SHARED) -m $(USUAL)
	$(BIN)/pytest tests -m "timed and not exhaustive and not gpu"

docs: $(READY) ## build the documentation site into site/, broken links being errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

coverage: $(READY) browser slurm ## the same, counting lines of src: at least 85 %, in twice the time
	rm -f .coverage .coverage.*
	$(SHARED) -m $(USUAL) --cov=scalewise --cov-report=term:skip-covered --cov-fail-under=85

exhaustive: $(READY) browser native slurm ## the long cases that CI leaves out
	$(SHARED) -m exhaustive

gpu: $(READY) ## the tests that need a CUDA device
	$(BIN)/pytest tests -m gpu

matrix: $(READY) native ## run every layout with every option, and write experiments/records/cpu/compatibility
	SCALEWISE_RECORD=1 $(BIN)/pytest tests/numerics/test_compatibility.py -m "exhaustive or not exhaustive"

bench: $(READY) ## measure links and overhead, and write experiments/records (slow_link: Linux, root)
	$(BIN)/scalewise bench collectives record=true
	$(BIN)/scalewise bench parallel record=true
	$(BIN)/scalewise bench sweep record=true
	$(BIN)/scalewise bench slow_link record=true || [ "$$(id -u)" != 0 ]

browser: # the report's tests open pages in Chromium; where it can be installed, it is
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else echo "no Chromium here: the browser tests are skipped"; fi

native: $(READY) # DeepSpeed's own code, compiled for this machine; to swap to disk it wants libaio
	@ldconfig -p | grep -q libaio || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends libaio-dev >/dev/null; \
	  else echo "no libaio here: what swaps to disk is skipped"; fi
	@for name in cpu_adam $$(ldconfig -p | grep -q libaio && echo async_io); do \
	  $(BIN)/python -c "$(BUILD_EXTENSION)" $$name; done

slurm: # sweeps are tested under a Slurm of their own; where it can be installed, it is
	@[ -x /usr/sbin/slurmctld ] || command -v slurmctld >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; \
	  else echo "no Slurm here: its tests are skipped"; fi

lock: $(READY) ## write requirements.lock anew from what .venv holds
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > requirements.lock

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
