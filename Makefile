# Each target works on a fresh machine by itself: it makes .venv, installs, and runs.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test lint bench clean

install: .venv/installed

.venv/installed: requirements-cpu.txt requirements-dev.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

demo: install
	$(BIN)/python demo.py $(DEMO_FLAGS)

test: install
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install
	$(BIN)/python benchmarks/bench_grading.py

clean:
	rm -rf .venv outputs .pytest_cache .ruff_cache .mypy_cache .hypothesis
