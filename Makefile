# Everything runs in one virtual environment; name another place with `make VENV=...`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2

# One thread per process: the tests start processes of their own, and ranks share the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test check lint wheel zoo venv clean

demo: venv  ## the main job on real weights and images
	$(BIN)/python examples/demo.py

test: venv  ## every test that CI runs
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

wheel: venv  ## build, install beside the tree's dependencies, and import from outside the tree
	VENV=$(VENV) bash tests/check_wheel.sh

check: lint test wheel

zoo: venv  ## all timm models with BatchNorm; takes hours, and goes on where it stopped
	$(BIN)/python -m model_zoo_tests.structure
	$(BIN)/python -m model_zoo_tests.fold_zoo --jobs 2

venv: $(VENV)/.ready
	@$(BIN)/python -I -c 'import bnconvert, pathlib, sys; sys.exit(pathlib.Path(bnconvert.__file__).parent.parent != pathlib.Path.cwd())' 2>/dev/null \
	  || $(BIN)/pip install --quiet --no-deps --no-build-isolation -e .

$(VENV)/.ready: pyproject.toml tests/specimens.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet 'setuptools>=77' wheel
	$(BIN)/pip install --quiet --no-build-isolation -e '.[test,dev]'
	$(BIN)/pip install --quiet --no-deps -r tests/specimens.txt
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
