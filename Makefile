# make demo · make test · make lint; each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export TF_CPP_MIN_LOG_LEVEL ?= 3
export JAX_PLATFORMS ?= cpu

.PHONY: demo test lint clean

demo: $(STAMP)
	$(BIN)/polyamp demo

test: $(STAMP)
	$(BIN)/python tests/run.py

lint: $(STAMP)
	$(BIN)/python tests/run.py --only lint

clean:
	rm -rf $(VENV) out build dist

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt \
	    --editable ".[torch,tensorflow,jax,cli,examples,dev]"
	touch $(STAMP)
