# `make demo` and `make test` need Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

LANES := test-browser test-faults test-hosts test-systems test-runs test-docs

STARTED := $(shell date +%s)
TOOK = $$(($$(date +%s) - $(STARTED))) s

.PHONY: install lint test test-all $(LANES) demo docs wheel dist benchmarks clean

install: $(VENV)/.installed

# uv takes a third of the time of pip. Where it fails, pip tries: uv does not read pip's settings,
# which may name a mirror.
define INSTALL
$(BIN)/python -m uv pip install --quiet $(1) || $(BIN)/python -m pip install --quiet $(1)
endef

# A bare Debian or Ubuntu has Python without `ensurepip`, which `venv` needs.
$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { apt-get update -qq && apt-get install -y -qq python3-venv; } || \
	  { echo 'error: install python3-venv first (apt-get install python3-venv)'; exit 1; }
	$(PYTHON) -m venv $(VENV)
	-$(BIN)/python -m pip install --quiet --upgrade pip uv
	$(call INSTALL,--editable '.[test]')
	touch $@
	@echo "installation took $(TOOK)"

# Format, style, imports, docstrings, their references and types, with the settings in pyproject.toml;
# and the files of .github, without network.
SCHEMA := $(BIN)/check-jsonschema -q --builtin-schema vendor
lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tools.references
	$(BIN)/zizmor --quiet --offline --strict-collection .
	$(SCHEMA).github-workflows .github/workflows/*.yml
	$(SCHEMA).github-issue-forms .github/ISSUE_TEMPLATE/[!c]*.yml
	$(SCHEMA).dependabot .github/dependabot.yml

# In the order of names: slow files begin early, so that no core waits for them at the end.
# WORKERS=0 runs tests in one process.
WORKERS ?= 2
PYTEST := -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations=10

# More threads of linear algebra wait for each other in loops, which take the core of another test.
# Plugins of pytest import NumPy, which reads the variable, before tests/conftest.py.
export OPENBLAS_NUM_THREADS ?= 1

# All tests except those of the lanes in tests/conftest.py. `make test-all` runs everything.
test: install
	$(BIN)/python $(PYTEST) --lane=quick

# One lane.
test-faults test-systems test-runs test-docs: test-%: install
	$(BIN)/python $(PYTEST) --lane=$*

# Tests with Beam and with a local bucket, in an environment that adds these packages to those of
# $(VENV): the other tests run without them.
HOSTS := out/hosts
HOSTS_PACKAGES := apache-beam 'moto[server]' s3fs
test-hosts: install
	$(PYTHON) -m venv --without-pip $(HOSTS)
	packages=$$(realpath $(VENV)/lib/python3*/site-packages); \
	  cd $(HOSTS)/lib/python3*/site-packages; \
	  echo "import site; site.addsitedir('$$packages')" > beside.pth
	$(BIN)/python -m uv pip install --quiet --python $(HOSTS)/bin/python $(HOSTS_PACKAGES) || \
	  $(HOSTS)/bin/python -m pip install --quiet $(HOSTS_PACKAGES)
	$(HOSTS)/bin/python $(PYTEST) --lane=hosts

# Pages in Chromium.
test-browser: install
	command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { apt-get update -qq && apt-get install -y -qq chromium; }
	$(call INSTALL,'playwright>=1.50')
	$(BIN)/python $(PYTEST) --lane=browser

test-all: test $(LANES)

DEMO_KERNELS := --config.train.epochs=8 --config.train.eval_every_epochs=2

# More flags of both runs: make demo DEMO=--config.train.epochs=2
demo: install
	rm -rf out/demo_*
	$(BIN)/python -m tpugraphs_jax.synthetic --out out/demo_kernels --scale medium \
	  --collections tile:xla --limit 150
	$(BIN)/python run_tile.py --config=configs/tile.py:recommended \
	  --data_root=out/demo_kernels/npz --workdir=out/demo_tile $(DEMO_KERNELS) $(DEMO)
	$(BIN)/python run_layout.py --config=configs/layout.py:own-outputs_v6e,times \
	  --data_root=data/own/npz --workdir=out/demo_layout --do=train --noreport $(DEMO)
	$(BIN)/python run_layout.py --do=evaluate,predict --split=test --workdir=out/demo_layout
	@$(BIN)/python -m tpugraphs_jax.report --verdict out/demo_tile
	@$(BIN)/python examples/demo.py out/demo_layout
	@echo "make demo took $(TOOK), with installation; it drew out/demo_tile/report.html and \
	out/demo_layout/report.html"

# The documentation as a site in out/site, which needs no network; warnings are errors. To read it with
# search: .venv/bin/python -m http.server -d out/site
docs: install
	$(call INSTALL,--editable '.[docs]')
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

# The package in one file, out/tpugraphs_jax-VERSION-py3-none-any.whl: for Colab, and other machines.
wheel: install
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir out .

# Wheel and sdist of a release in out/dist. VERSION, where it is given, must be that of the package.
# REPOSITORY_URL is the one place where the address of the project stands: packages and the
# documentation have it where it is given.
dist: install
	$(if $(VERSION),grep -xF '__version__ = "$(VERSION)"' tpugraphs_jax/version.py || \
	  { echo 'error: VERSION=$(VERSION) is not in tpugraphs_jax/version.py'; exit 1; })
	rm -rf out/dist && mkdir -p out/dist
	printf '[metadata]\nurl = %s\n' "$$REPOSITORY_URL" > out/url.cfg
	$(BIN)/python -m pip install --quiet build
	DIST_EXTRA_CONFIG=$(CURDIR)/out/url.cfg $(BIN)/python -m build --outdir out/dist

# make benchmarks BENCHMARKS='layout_step gst' runs two of them.
benchmarks: install
	$(BIN)/python -m benchmarks.run_all $(BENCHMARKS)

clean:
	rm -rf $(VENV) $(HOSTS) out/demo_* build *.egg-info
