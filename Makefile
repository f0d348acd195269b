# make demo: a comparison that runs here in minutes.   make test: every check but the slow tests.
PYTHON ?= python3
# Test processes side by side; each uses one thread.
WORKERS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# One thread for each process: small matrix calls collapse when threads contend for cores.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: demo test lint slow bench docs clean

demo: $(READY)
	$(BIN)/coterie compare configs/demo.yaml --methods local-only,fedit,flexlora,fedpa-lora --seeds 0 --workers 2

test: lint
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

slow: $(READY)
	$(ONE_THREAD) $(BIN)/python -m pytest -m slow

bench: $(READY)
	$(BIN)/python benchmarks/table.py --json bench.json

docs: $(READY)
	$(BIN)/python tools/deviations.py docs/deviations.md
	$(BIN)/python tools/methods_page.py docs/methods.md

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV); the first time this takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
	find src tests tools -type d -name __pycache__ -prune -exec rm -rf {} +
