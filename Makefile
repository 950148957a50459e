# Two commands do everything on a fresh machine with Python 3.11+ and a C++ compiler:
#   make demo    environment, install, the whole job on the bundled model and corpora
#   make test    environment, install, all default tests and checks

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test check slow clean

demo: $(READY)
	$(BIN)/agreement demo

test: $(READY) check
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

slow: $(READY)
	$(BIN)/python -m pytest -m slow

# The engine is compiled here: about five minutes on two cores.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: agreement needs Python 3.11 or newer; set PYTHON=..." >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "error: no C++ compiler; the engine is compiled at install: apt-get install g++ (or set CXX=...)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "installing; the engine compiles for about five minutes"
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) runs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
