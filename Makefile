# Nothing to install by hand: every target prepares .venv first. `constraints.txt` chooses the versions, and
# `requirements.lock` has the hashes of their files; people who install the package elsewhere keep their own torch.
PYTHON ?= python3
BIN := .venv/bin
# Each process has a half of the tests, and takes from the other when it is done: few fixtures of files are made twice.
TWO := -n 2 --dist worksteal
# An image may forbid Python to keep what it compiled: then each of the many processes of the tests compiles it again.
export PYTHONDONTWRITEBYTECODE :=
LOCKS := pyproject.toml constraints.txt requirements.lock pip.lock

# A new environment: pip itself, then everything but torch by its hash, then torch, whose build is the machine's affair.
# pip would compile 16,000 files one after another, which takes longer than the rest; here all cores do, and what few
# processes import is left to the first that does. A file that does not compile is a template, as pip takes it, too.
RARE := tests|testing|_inductor|_dynamo|distributed|graph_objs|debugpy|fontTools|mypy|mypyc|networkx|pip|setuptools|sqlalchemy
define environment
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'sparsona needs Python 3.11 or newer')"
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r pip.lock
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps -r requirements.lock
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt torch
	$(1)/bin/python -m compileall -qq -j 0 -x '/($(RARE))/' $(1)/lib || true
endef

.PHONY: help setup lock sbom run picture quick test test-all test-cluster test-flower test-kernels fuzz lint check format docs notebooks bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*  ## ' $(MAKEFILE_LIST) | sed 's/:.*  ## /\t/' | expand -t 14

setup: .venv/ready  ## .venv with everything the other targets need

.venv/ready: $(LOCKS)
	$(call environment,.venv)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	$(BIN)/python -m pip check
	touch $@

lock:  ## requirements.lock and pip.lock anew, after a change of constraints.txt or of what pyproject.toml requires
	test -x $(BIN)/python || $(MAKE) setup
	$(BIN)/python -P supply/lock.py

sbom: setup  ## what is installed here, as CycloneDX: sbom.cdx.json
	$(BIN)/python -P supply/sbom.py sbom.cdx.json

run: setup  ## compare the papers' systems with three baselines on the embedded digits: a table and a report
	$(BIN)/sparsona compare --config examples/digits.toml --jobs 2

picture: setup  ## README's picture of the report, of the comparison of `make run`; needs a Chromium
	rm -rf runs/picture
	$(BIN)/sparsona compare --config examples/digits.toml --jobs 2 --out runs/picture
	$(BIN)/python docs/report_picture.py runs/picture

quick: setup  ## what to run after every edit: the suite without its long tests, 90 s on two cores
	$(BIN)/python -m pytest $(TWO) -m "not slow and not network and not cluster and not flower and not long"

test: setup  ## the suite, about eight minutes on two cores
	$(BIN)/python -m pytest $(TWO)

test-all: setup  ## the suite, and more kill points, methods and seeds of what it has already
	$(BIN)/python -m pytest $(TWO) -m "not network and not cluster and not flower"

test-cluster: .venv-cluster/ready  ## the tests of --executor ray, in an environment of their own
	.venv-cluster/bin/python -m pytest -m cluster -W ignore::ResourceWarning  # Ray leaves files to the collector

.venv-cluster/ready: $(LOCKS)
	$(call environment,.venv-cluster)
	.venv-cluster/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt -e ".[dev,cluster]"
	touch $@

test-flower: .venv-test-flower/ready  ## a run through Flower, in an environment of its own
	.venv-test-flower/bin/python -m pytest tests/deploy/test_flower.py -m flower -W ignore::DeprecationWarning  # typer's

# Flower holds packages back that others need newer: its pins stand before those of constraints.txt.
.venv-test-flower/ready: $(LOCKS) constraints-flower.txt
	$(PYTHON) -m venv .venv-test-flower
	.venv-test-flower/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes -r pip.lock
	awk -F== 'NR == FNR { mine[tolower($$1)] = 1; print; next } !(tolower($$1) in mine)' constraints-flower.txt constraints.txt > .venv-test-flower/constraints.txt
	.venv-test-flower/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-test-flower/constraints.txt torch numpy
	.venv-test-flower/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-test-flower/constraints.txt --build-constraint constraints.txt -e ".[dev,flower]"
	touch $@

test-kernels: .venv-kernels/ready  ## the kernels for GPUs, without one: in Triton's interpreter, and built for an H100
	PYTHONPATH=$(CURDIR)/.venv-kernels $(BIN)/python -m pytest $(TWO) tests/gpu

.venv-kernels/ready: .venv/ready constraints-kernels.txt
	rm -rf .venv-kernels
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target .venv-kernels -c constraints-kernels.txt triton
	touch $@

FUZZ ?= 1000000
fuzz: setup  ## mutated messages for the decoder and the gate: a million, or FUZZ=10000000; 2,000 bad command lines
	$(BIN)/python tests/wire/test_fuzz.py $(FUZZ)
	$(BIN)/python -m pytest -q -n 0 -m slow tests/cli/test_generated_input.py

lint: setup  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test docs  ## everything that must pass before a change is merged

format: setup  ## format, and fix what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup  ## the site, in docs/_build/index.html; a warning is an error
	$(BIN)/python -m sphinx -b html -W --keep-going -q docs docs/_build

notebooks: setup  ## run the notebooks of the docs anew, and store what they show
	$(BIN)/python docs/run_notebooks.py

# Contenders that have an environment of their own, as benchmarks/requirements.txt says; the others are left out.
CONTENDERS := $(foreach name,pfl flower fedlab,$(if $(wildcard .venv-$(name)/bin/python),--python $(name)=.venv-$(name)/bin/python))

bench: setup  ## the engine against a bare loop, what dropped filters save, a round against other people's code
	$(BIN)/python benchmarks/overhead.py --repeats 9 --epochs 2 --out benchmarks/results/overhead.json
	$(BIN)/python benchmarks/gates.py --out benchmarks/results/gates.json
	$(BIN)/python benchmarks/compare.py --out benchmarks/results/compare.json $(CONTENDERS)
	$(BIN)/python benchmarks/draw.py benchmarks/results/compare.json docs/performance.md

clean:  ## remove what make made
	rm -rf .venv .venv-cluster .venv-test-flower .venv-kernels docs/_build sbom.cdx.json
