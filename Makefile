# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each sets up .venv by itself; PYTHON chooses the interpreter (3.11 or newer), TORCH the torch requirement.

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready

.PHONY: demo test check unit bench soak clean

demo: $(READY)
	$(BIN)/python tools/demo.py --folder demo

test: check unit

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest -n auto $(PYTEST_ARGS)

bench: $(READY)
	$(BIN)/python tools/bench_loader.py
	$(BIN)/python tools/bench_preprocess.py

soak: $(READY)  # kills by the dozen, some ten minutes; SOAK_ARGS='--ranks 2 --seed 7'
	$(BIN)/python tools/soak.py --folder soak $(SOAK_ARGS)

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev,plot]"
	touch $(READY)

clean:
	rm -rf $(VENV) demo soak
