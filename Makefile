# `make demo` and `make test` need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install test demo docs benchmarks clean

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

# In the order of names: the slow campaign of faults begins, and no core waits for it in the end.
test: install
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations=15

DEMO_KERNELS := --config.train.epochs=8 --config.train.eval_every_epochs=2

demo: install
	rm -rf out/demo_*
	$(BIN)/python -m tpugraphs_jax.data.synthetic --out out/demo_kernels --scale medium \
	  --collections tile:xla --limit 150
	$(BIN)/python run_tile.py --config=configs/tile.py:recommended \
	  --data_root=out/demo_kernels/npz --workdir=out/demo_tile $(DEMO_KERNELS)
	$(BIN)/python run_layout.py --config=configs/layout.py:own,recommended \
	  --data_root=data/own/npz --workdir=out/demo_layout
	@echo 'look at out/demo_tile/report.html and out/demo_layout/report.html'

# The documentation as a site in out/site; warnings are errors.
docs: install
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	$(BIN)/python -m mkdocs build --quiet

benchmarks: install
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf $(VENV) out/demo_* build *.egg-info
