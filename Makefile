# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

.PHONY: demo test test-cache test-sidecar interop check format bench stress screenshots clean

demo: $(INSTALLED)
	$(BIN)/kvevents demo

# Two at a time, as long as each other: the cache with what looks at streams, and the sidecar. What each says comes at its end.
test: check
	$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-cache test-sidecar

test-cache: $(INSTALLED)
	$(BIN)/pytest -o cache_dir=.pytest_cache/cache tests/hicache tests/tools

test-sidecar: $(INSTALLED)
	$(BIN)/pytest -o cache_dir=.pytest_cache/sidecar --ignore=tests/hicache --ignore=tests/tools --ignore=tests/interop

# Against the real consumers and engines, each in an environment of its own below KVEVENTS_INTEROP_HOME.
# Those that cannot be installed are skipped. Writes the table of docs/consumers.md.
interop: $(INSTALLED)
	tests/interop/install.sh || true
	rm -f .pytest_cache/conformance.jsonl && mkdir -p .pytest_cache
	KVEVENTS_CONFORMANCE=.pytest_cache/conformance.jsonl $(BIN)/pytest -o cache_dir=.pytest_cache/interop -rs tests/interop
	$(BIN)/python tests/interop/conformance.py .pytest_cache/conformance.jsonl

check: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Beside the real publishers and caches of SGLang and vLLM, in an environment of their own below BENCH_HOME
# (2.4 GB); without them where they cannot be installed. ARGS="NAME… --quick" measures less.
ARGS ?=
bench: $(INSTALLED)
	BENCH_PYTHON="$${BENCH_PYTHON:-$(CURDIR)/$(BIN)/python}" benchmarks/kit/install.sh || echo "going on without those peers"
	$(BIN)/python -m benchmarks $(ARGS)

# Faults at random, by seed, for three quarters of SECONDS; then the model tests. See docs/stress.md.
SECONDS ?= 1500
SEED ?= 1
RUNS ?= 0
stress: $(INSTALLED)
	$(BIN)/python tests/integration/stress.py --models --seconds $(SECONDS) --seed $(SEED) --runs $(RUNS)

# docs/images, from real runs.
screenshots: $(INSTALLED)
	$(BIN)/python docs/screenshots.py

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
