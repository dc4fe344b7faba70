# make demo · make test · make check · make lint; each sets up .venv by itself. make check: what to run while writing, in
# three minutes. make test-jax-oldest, test-jax-newest: the ends of the supported range of JAX, in environments of their
# own. make bench: what is measured, not tested, in environments of its own too; make bench BENCH=--quick shows in two
# minutes that all of it works. make fuzz SEEDS=0-2000: random networks compared over the frameworks; SEED=123: one of
# them again. make mutants COUNT=20: random small faults in the library, and whether the tests notice; SEED=17, SEEDS=5-9.
# make docs: the documentation site in out/docs/html, checked; the extra "docs" is installed at the first time.
# make zoo: public models moved between frameworks, and judged; writes docs/measurements/port_zoo.md in some minutes.
# make downstream: tests and programs of public packages with polyamp put in; writes docs/measurements/downstream.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export TF_CPP_MIN_LOG_LEVEL ?= 3
export JAX_PLATFORMS ?= cpu

.PHONY: demo test check lint bench fuzz mutants soak zoo downstream docs test-jax-oldest test-jax-newest clean

demo: $(STAMP)
	$(BIN)/polyamp demo

test: $(STAMP)
	$(BIN)/python tests/run.py

check: $(STAMP)
	$(BIN)/python tests/run.py --check

lint: $(STAMP)
	$(BIN)/python tests/run.py --only lint

bench: $(STAMP)
	$(BIN)/polyamp bench $(BENCH)

SEEDS ?= 0-200

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seeds $(or $(SEED),$(SEEDS)) $(FUZZ)

COUNT ?= 20

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --seeds $(or $(SEED),$(if $(filter file,$(origin SEEDS)),0-$(COUNT),$(SEEDS))) $(MUTANTS)

soak: $(STAMP)
	$(BIN)/python -m tests.soak $(SOAK)

zoo: $(STAMP)
	$(BIN)/python -m tests.porting.public.zoo --write

DOWNSTREAM_GROUPS := torch tensorflow jax

downstream: $(DOWNSTREAM_GROUPS:%=.venv-downstream-%/.installed)
	.venv-downstream-torch/bin/python -m tests.downstream --write $(DOWNSTREAM)

.venv-downstream-%/.installed: pyproject.toml constraints.txt tests/downstream/packages/*.py
	$(PYTHON) -m venv .venv-downstream-$*
	.venv-downstream-$*/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
	    --constraint constraints.txt --editable ".[$*,testing]" $$($(PYTHON) -m tests.downstream --requirements $*)
	touch $@

docs: $(VENV)/.docs-installed
	$(BIN)/python docs/site/build.py

JAX_SUITES := conformance-jax conformance-jax-bits backend-jax doctest-jax

test-jax-oldest:
	$(PYTHON) -m venv .venv-jax-oldest
	.venv-jax-oldest/bin/python -m pip install --disable-pip-version-check --quiet \
	    --constraint constraints-jax-oldest.txt --editable ".[jax,dev]"
	.venv-jax-oldest/bin/python tests/run.py --only $(JAX_SUITES)

test-jax-newest:
	$(PYTHON) -m venv .venv-jax-newest
	.venv-jax-newest/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --upgrade-strategy eager \
	    --editable ".[jax,dev]"
	.venv-jax-newest/bin/python tests/run.py --only $(JAX_SUITES)

clean:
	rm -rf $(VENV) .venv-jax-oldest .venv-jax-newest .venv-bench-* .venv-downstream-* out build dist

# --no-compile: of 20,000 modules fewer than half are imported, and Python compiles each when it first is.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt \
	    --editable ".[torch,tensorflow,jax,lightning,accelerate,demo,examples,dev]"
	touch $(STAMP)

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@
