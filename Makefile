# make demo    a real run with planted faults, watched; under 3 minutes once set up
# make demo-fleet   the same on two nodes without a shared disk: broker, shippers and join, some of them killed
# make test    every promise in its short form             make quick   what needs no process of its own: the edit loop
# make test-all   those, and the long forms beside them    make lint    ruff        make types   mypy --strict
# make trainers   the tests on real trainers (Hugging Face, Lightning, DeepSpeed, Megatron, ...), installed first
# make docs    the site, into build/site; broken links and pages that nothing leads to are errors
# PYTHON=... chooses the interpreter (3.11 or newer); PIP_FLAGS=... is handed to every pip install.

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3 python; do $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP_FLAGS ?=
PYTEST_FLAGS ?=
DEMO_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.sentinel-setup
TRAINERS := $(VENV)/.sentinel-trainers
DOCS := $(VENV)/.sentinel-docs
# Five workers keep two cores at work: half of what the tests take is waiting for processes. One worker has all tests of a
# file, so that what they share is made once: its reference trainings, its server that ranks are forked off.
SUITE := $(BIN)/python -m pytest --ignore tests/trainers -n 5 --dist loadfile --no-loadscope-reorder

# Some hundred processes start in the tests: none of them compiles Sentinel anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-fleet test quick test-long test-all trainers trainers-setup docs lint types setup check clean

demo: $(STAMP)
	$(BIN)/sentinel demo $(DEMO_FLAGS)

demo-fleet: $(STAMP)
	$(BIN)/sentinel demo --fleet $(DEMO_FLAGS)

test: $(STAMP)
	$(SUITE) -m "not long" $(PYTEST_FLAGS)

quick: $(STAMP)
	$(SUITE) -n 3 -m "not long and not slow" --ignore tests/end_to_end --ignore tests/layouts --ignore tests/collect --ignore tests/native \
		--ignore tests/deploy --hypothesis-profile quick $(PYTEST_FLAGS)

# What `make test` leaves out, and properties on more examples than it draws.
test-long: $(STAMP)
	$(SUITE) -m "long or property" --hypothesis-profile all $(PYTEST_FLAGS)

test-all: test test-long

# The tests of a file share their trainings: one worker has them all.
trainers: $(TRAINERS)
	$(BIN)/python -m pytest -m trainer -n 3 --dist loadfile tests/trainers $(PYTEST_FLAGS)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

check: lint types test docs demo

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt setup.py $(wildcard sentinel/native/*.[ch])
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name it with PYTHON=..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_FLAGS) torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

$(DOCS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_FLAGS) --editable '.[dev,docs]'
	@touch $@

trainers-setup: $(TRAINERS)

# DeepSpeed has no wheel: built for the CPU, without compiled operators, against the torch that is there.
$(TRAINERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_FLAGS) torch==2.13.0 --editable '.[dev,trainers]' setuptools wheel ninja py-cpuinfo
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --constraint constraints.txt $(PIP_FLAGS) --no-build-isolation torch==2.13.0 deepspeed
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
