# make demo · make test · make check · make lint; each sets up .venv by itself. make check: what to run while writing, in
# three minutes. make test-jax-oldest, test-jax-newest, and so for core, torch, tensorflow: the ends of the supported
# range, in environments of their own. make bench: what is measured, not tested, in environments of its own too; make bench BENCH=--quick shows in two
# minutes that all of it works. make fuzz SEEDS=0-2000: random networks compared over the frameworks; SEED=123: one of
# them again. make mutants COUNT=20: random small faults in the library, and whether the tests notice; SEED=17, SEEDS=5-9.
# make release: sdist and wheel in dist, checked, and not uploaded; RELEASE=--draft while the changelog is unreleased.
# make api-diff SINCE=COMMIT: what broke in the public API since a commit, or since the last tag.
# make docs: the documentation site in out/docs/html, checked; the extra "docs" is installed at the first time.
# make zoo: public models moved between frameworks, and judged; writes docs/measurements/data/port_zoo.md in some minutes.
# make downstream: tests and programs of public packages with polyamp put in; writes docs/measurements/downstream.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

export TF_CPP_MIN_LOG_LEVEL ?= 3
export JAX_PLATFORMS ?= cpu

.PHONY: demo test check lint bench fuzz mutants soak zoo downstream docs release api-diff clean

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

# Another Python: make test-core-newest PYTHON=python3.13.
ENDS := core torch tensorflow jax
core_EXTRAS := testing,parity
torch_EXTRAS := torch,dev
tensorflow_EXTRAS := tensorflow,dev
jax_EXTRAS := jax,dev
core_SUITES := conformance-reference
torch_SUITES := conformance-torch backend-torch doctest-torch
tensorflow_SUITES := conformance-tensorflow backend-tensorflow doctest-tensorflow
jax_SUITES := conformance-jax conformance-jax-bits backend-jax doctest-jax
OLDEST := $(ENDS:%=test-%-oldest)
NEWEST := $(ENDS:%=test-%-newest)

.PHONY: $(OLDEST) $(NEWEST)

$(OLDEST): test-%-oldest:
	$(PYTHON) -m venv .venv-$*-oldest
	.venv-$*-oldest/bin/python -m pip install --disable-pip-version-check --quiet \
	    --constraint constraints-$*-oldest.txt --editable ".[$($*_EXTRAS)]"
	.venv-$*-oldest/bin/python tests/run.py --only $($*_SUITES)

$(NEWEST): test-%-newest:
	$(PYTHON) -m venv .venv-$*-newest
	.venv-$*-newest/bin/python -m pip install --disable-pip-version-check --quiet --upgrade --upgrade-strategy eager \
	    --editable ".[$($*_EXTRAS)]"
	.venv-$*-newest/bin/python tests/run.py --only $($*_SUITES)

clean:
	rm -rf $(VENV) .venv-*-oldest .venv-*-newest .venv-bench-* .venv-downstream-* out build dist

# --no-compile: of 20,000 modules fewer than half are imported, and Python compiles each when it first is.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt torch
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt \
	    --editable ".[torch,tensorflow,jax,lightning,accelerate,demo,examples,dev]"
	touch $(STAMP)

release: $(VENV)/.release-installed
	$(BIN)/python -m tests.release $(RELEASE)

api-diff: $(VENV)/.release-installed
	$(BIN)/python -m tests.release --api $(if $(SINCE),--since $(SINCE))

$(VENV)/.release-installed: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[release]"
	touch $@

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@
