# Each target does its own set-up: a virtual environment in $(VENV), installed once and again only when
# pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: run test slow check format clean

run: $(READY)
	$(BIN)/exssnet run split-digits --method exssnet+kkt

# One thread per worker: two threads on small layers are slower than one. Without the slow tests it takes minutes.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m "not slow"

slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist worksteal -m slow

check: $(READY)
	$(BIN)/ruff check src tests benchmarks studies
	$(BIN)/ruff format --check src tests benchmarks studies
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports --no-logo

format: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks studies
	$(BIN)/ruff format src tests benchmarks studies

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
