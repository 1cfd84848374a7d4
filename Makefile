# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

# Hundreds of processes are started by the tests: modules are compiled once, not by each of them.
unexport PYTHONDONTWRITEBYTECODE

TESTS := test-publisher test-tools test-cache test-stream
.PHONY: demo e2e test $(TESTS) interop deploy-check check format bench stress jitter screenshots docs package clean

demo: $(INSTALLED)
	$(BIN)/kvevents demo

# Two example engines with their sidecars behind a real vllm-router, which it installs below KVEVENTS_INTEROP_HOME.
ROUTER = $${KVEVENTS_INTEROP_HOME:-$$HOME/.cache/kvevents-interop}/venvs/vllm-router
e2e: $(INSTALLED)
	@tests/interop/install.sh vllm-router || { echo "make e2e: there is no vllm-router to be had here (see above), so nothing was run" >&2; exit 1; }
	$(BIN)/kvevents demo --router "$(ROUTER)/bin/vllm-router"

# Three at a time, the longest first: much of it is waiting. What each says comes at its end.
test: check
	$(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target $(TESTS)

test-publisher: $(INSTALLED)
	$(BIN)/pytest -o cache_dir=.pytest_cache/publisher tests/publisher

test-tools: $(INSTALLED)
	$(BIN)/pytest -o cache_dir=.pytest_cache/tools tests/tools

test-cache: $(INSTALLED)
	$(BIN)/pytest -o cache_dir=.pytest_cache/cache tests/hicache

# The stream's format, and all that is not in the folders above.
test-stream: $(INSTALLED)
	$(BIN)/pytest -o cache_dir=.pytest_cache/stream --ignore=tests/publisher --ignore=tests/tools --ignore=tests/hicache --ignore=tests/interop

# Against the real consumers and engines, each in an environment of its own below KVEVENTS_INTEROP_HOME.
# Those that cannot be installed are skipped. Writes the table of docs/consumers.md.
interop: $(INSTALLED)
	tests/interop/install.sh || true
	rm -f .pytest_cache/conformance.jsonl && mkdir -p .pytest_cache
	KVEVENTS_CONFORMANCE=.pytest_cache/conformance.jsonl $(BIN)/pytest -o cache_dir=.pytest_cache/interop -rs tests/interop
	$(BIN)/python tests/interop/conformance.py .pytest_cache/conformance.jsonl

# Images, manifests and alerts beside the tools that know such files, below KVEVENTS_INTEROP_HOME; those that cannot be
# had are skipped. (docker compose and kubectl are asked where they are installed.)
DEPLOY = $${KVEVENTS_INTEROP_HOME:-$$HOME/.cache/kvevents-interop}/deploy
deploy-check: $(INSTALLED)
	tests/deploy/install.sh || true
	PATH="$$PATH:$(DEPLOY)/bin" $(BIN)/pytest -o cache_dir=.pytest_cache/deploy -rs tests/deploy

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

# The tests of `make test`, while now one, now another of their processes stands still for up to 150 ms.
jitter: $(INSTALLED)
	$(BIN)/python tests/integration/jitter.py $(MAKE) --no-print-directory --jobs=3 --keep-going --output-sync=target $(TESTS)

# docs/images, from real runs.
screenshots: $(INSTALLED)
	$(BIN)/python docs/screenshots.py

# The documents as pages in build/docs, with a reference from docstrings; a warning is an error.
docs: $(VENV)/docs
	$(BIN)/mkdocs build --quiet --strict --config-file docs/site/mkdocs.yml

# Wheel and sdist in dist/, checked, and installed in fresh environments, with each extra alone. EXTRAS="publisher tools" for some.
package: $(VENV)/release
	$(BIN)/python tests/docs/package_check.py $(EXTRAS)

$(VENV)/docs $(VENV)/release: $(VENV)/%: $(INSTALLED)
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check -e '.[$*]'
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about 1.4 GB, most of it torch (more with a CUDA build); a minute or two, and pip is silent meanwhile"
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
