# Everything from a fresh checkout with only git, make and Python: `make demo`, `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# The ends of the supported range; `make versions` runs the tests marked `versions` on both.
OLDEST := tensorflow-cpu==2.20.0 keras==3.12.0
NEWEST := tensorflow-cpu<2.22 keras<3.16
VERSION_TESTS := tests
VERSION_VENVS := .venvs/oldest .venvs/newest

export TF_CPP_MIN_LOG_LEVEL ?= 2

.PHONY: demo test oracle coverage lint format types docs-check versions bench lock clean help

help:
	@echo "make demo        train the digits on two replicas (recipes/digits.toml)"
	@echo "make test        run the tests"
	@echo "make oracle      the oracle's longer tables: precisions, optimizers, remainders"
	@echo "make coverage    run the tests and show the lines no test reaches"
	@echo "make lint        ruff check and ruff format --check, sizes of modules and functions"
	@echo "make format      let ruff rewrite what it can"
	@echo "make types       pyright"
	@echo "make docs-check  links in README.md and docs/"
	@echo "make versions    tests on the oldest and newest TensorFlow and Keras"
	@echo "make bench       engines side by side; writes benchmarks/reports (about an hour; BENCH_ARGS narrows it)"
	@echo "make clean       remove environments and caches (not runs/)"

# Keyed on what decides the contents of the environment, so that a later `make` does not reinstall.
$(STAMP): requirements.lock pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

demo: $(STAMP)
	$(BIN)/lockstep train recipes/digits.toml

# A process a core: tracing is Python, of which a process runs one thread at a time.
test: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal $(PYTEST_ARGS)

oracle: $(STAMP)
	$(BIN)/python -m pytest -n auto --dist worksteal -m oracle tests/oracle $(PYTEST_ARGS)

coverage: $(STAMP)
	$(BIN)/python -m pytest --cov --cov-report=term $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/check_sizes.py src benchmarks

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python --level error

docs-check: $(STAMP)
	$(BIN)/python tools/check_docs.py README.md CHANGELOG.md CONTRIBUTING.md docs

.venvs/oldest/.installed: SPEC = $(OLDEST)
.venvs/newest/.installed: SPEC = $(NEWEST)
.venvs/%/.installed: pyproject.toml Makefile
	$(PYTHON) -m venv --clear .venvs/$*
	.venvs/$*/bin/python -m pip install --quiet --disable-pip-version-check -e . pytest pytest-xdist hypothesis $(foreach spec,$(SPEC),'$(spec)')
	@touch $@

versions: $(VERSION_VENVS:%=%/.installed)
	@for venv in $(VERSION_VENVS); do \
		$$venv/bin/python tools/print_versions.py && \
		$$venv/bin/python -m pytest -n auto --dist worksteal -m versions $(VERSION_TESTS) || exit 1; \
	done

# Peers get environments of their own in .venvs. BENCH_ARGS="--workloads mlp --engines lockstep,one-core --rounds 1 --steps 20"
bench: $(STAMP)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# The lock file is made with uv; installing needs only pip.
lock:
	bash tools/make_lock.sh

clean:
	rm -rf .venv .venvs .pytest_cache .ruff_cache .hypothesis .coverage htmlcov build dist
	find src tests tools examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
