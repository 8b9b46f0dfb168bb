# `make demo` and `make test` need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install test demo benchmarks clean

install: $(VENV)/.installed

# A bare Debian or Ubuntu has Python without the module that makes environments.
$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq python3-venv; } || \
	  { echo 'error: install python3-venv first (apt-get install python3-venv)'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile

demo: install
	rm -rf out/demo_*
	$(BIN)/python -m tpugraphs_jax.data.synthetic --out out/demo_data
	$(BIN)/python run_tile.py --config=configs/tile.py:ci --data_root=out/demo_data/npz \
	  --workdir=out/demo_tile
	$(BIN)/python run_layout.py --config=configs/layout.py:xla-random,ci \
	  --data_root=out/demo_data/npz --workdir=out/demo_layout

benchmarks: install
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) out/demo_* build *.egg-info
