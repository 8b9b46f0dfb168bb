# `make demo` and `make test` need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install test demo benchmarks clean

install: $(VENV)/.installed

# Debian splits venv off; a virtualenv from the user's site-packages does as well.
$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

test: install
	$(BIN)/python -m pytest

demo: install
	$(BIN)/python run_tile.py --config=configs/tile.py:ci --workdir=out/demo_tile
	$(BIN)/python run_layout.py --config=configs/layout.py:xla-random,ci --workdir=out/demo_layout

benchmarks: install
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) out build *.egg-info
