# Every target does all of its set-up: a virtual environment in .venv with the pinned packages of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup demo test test-fast test-slurm soak lint clean

setup: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	$(BIN)/wmse demo

test: setup lint
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder  # more workers than cores: many tests wait

# while editing: what takes less than two seconds each
test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" tests/numerics tests/unit tests/data

# on a real SLURM cluster, which it installs (Debian packages) and starts on this machine; as root
test-slurm: setup
	tests/slurm/cluster/install.sh
	$(BIN)/python -m pytest tests/slurm -n 4 --dist worksteal

# kills runs at random for MINUTES and compares each with an uninterrupted one: make soak MINUTES=60
MINUTES ?= 10
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.soak --minutes $(MINUTES)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv runs build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
