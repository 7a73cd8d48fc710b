# Every target installs what it needs. `make` alone lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Two more workers than cores, because tests often wait for subprocesses and servers.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(6, 2 + len(os.sched_getaffinity(0))))' 2>/dev/null || echo 2)

# One thread per worker: more threads only wait for each other.
# Files in order of their names: the short files of tests/unit come last and balance the workers.
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

install: $(READY) ## create .venv and install the locked versions

$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "scalewise requires Python 3.11 or newer; set it: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(READY) ## train small models on the CPU, also in bf16 if it is supported, and report
	$(BIN)/scalewise train experiment=demo sweep=precision_by_layout hardware=cpu \
	  $$($(BIN)/python -c '$(NATIVE_ONLY)')

lint: $(READY) ## ruff, mypy on src, import contracts, codespell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/codespell

check: lint ## lint and unit tests; takes a few minutes
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -q -n $(WORKERS)

test: lint docs browser slurm ## everything CI runs
	$(SHARED) -m $(USUAL)
	$(BIN)/pytest tests -m "timed and not exhaustive and not gpu"

docs: $(READY) ## build the documentation site in site/; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

coverage: $(READY) browser slurm ## `make test` with line coverage of src, at least 85 %; takes twice as long
	rm -f .coverage .coverage.*
	$(SHARED) -m $(USUAL) --cov=scalewise --cov-report=term:skip-covered --cov-fail-under=85

exhaustive: $(READY) browser native slurm ## long tests that CI skips
	$(SHARED) -m exhaustive

gpu: $(READY) ## tests that require a CUDA device
	$(BIN)/pytest tests -m gpu

matrix: $(READY) native ## run every strategy with every option; writes experiments/records/cpu/compatibility
	SCALEWISE_RECORD=1 $(BIN)/pytest tests/numerics/test_compatibility_matrix.py -m "exhaustive or not exhaustive"

bench: $(READY) ## measure links, overhead and components; writes experiments/records (slow_link: Linux, root)
	$(BIN)/scalewise bench all
	$(BIN)/scalewise bench collectives record=true
	$(BIN)/scalewise bench parallel record=true
	$(BIN)/scalewise bench sweep record=true
	$(BIN)/scalewise bench slow_link record=true || [ "$$(id -u)" != 0 ]

browser: # install Chromium for the report tests, if possible
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	  else echo "Chromium is not installed: browser tests are skipped"; fi

native: $(READY) # compile the extensions of DeepSpeed; swapping to disk requires libaio
	@ldconfig -p | grep -q libaio || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends libaio-dev >/dev/null; \
	  else echo "libaio is not installed: tests that swap to disk are skipped"; fi
	@for name in cpu_adam $$(ldconfig -p | grep -q libaio && echo async_io); do \
	  $(BIN)/python -c "$(BUILD_EXTENSION)" $$name; done

slurm: # install Slurm for the sweep tests, if possible
	@[ -x /usr/sbin/slurmctld ] || command -v slurmctld >/dev/null || \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends slurm-wlm munge >/dev/null; \
	  else echo "Slurm is not installed: its tests are skipped"; fi

lock: $(READY) ## write requirements.lock from the versions in .venv
	$(BIN)/python -m pip freeze --exclude-editable --exclude pip | sed 's/^\(torch==[0-9.]*\)+.*/\1/' > requirements.lock

clean: ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
