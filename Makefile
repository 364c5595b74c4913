# Nothing to install by hand: every target prepares .venv first. `constraints.txt` pins what is installed here; people
# who install the package elsewhere keep their own torch.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup run test test-all lint check format bench clean

setup: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'sparsona needs Python 3.11 or newer')"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

run: setup  ## compare five methods on the embedded digits; a table and a report
	$(BIN)/sparsona compare

test: setup  ## the suite
	$(BIN)/python -m pytest -n 2

test-all: setup  ## the suite, and more kill points and seeds of what it has already
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

lint: setup  ## format, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test  ## everything; the suite runs the code in README and examples

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Contenders that have an environment of their own, as benchmarks/requirements.txt says; the others are left out.
CONTENDERS := $(foreach name,pfl flower fedlab,$(if $(wildcard .venv-$(name)/bin/python),--python $(name)=.venv-$(name)/bin/python))

bench: setup  ## what the engine costs over a bare loop, what dropped filters save, and a round against other people's code
	$(BIN)/python benchmarks/overhead.py --repeats 9 --epochs 2 --out benchmarks/results/overhead.json
	$(BIN)/python benchmarks/gates.py --out benchmarks/results/gates.json
	$(BIN)/python benchmarks/compare.py --out benchmarks/results/compare.json $(CONTENDERS)
	$(BIN)/python benchmarks/draw.py benchmarks/results/compare.json docs/performance.md

clean:
	rm -rf .venv
