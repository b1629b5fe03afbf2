# make env | train | test | clean; plain `make` says what each does.
# Wants Python 3.11 or 3.12 with venv; everything else goes into .venv.

VENV := .venv
PY := $(VENV)/bin/python
CONFIG := configs/quickstart.py
WORKDIR := runs/quickstart
ARGS :=

# $(call tag,PYTHON): py311 or py312 if that interpreter runs and can make a venv, else empty.
# Found by running it: a shim on the PATH may exist and still fail.
TELL := import sys, venv, ensurepip; print("py%d%d" % sys.version_info[:2])
tag = $(filter py311 py312,$(shell $(1) -c '$(TELL)' 2>/dev/null))
find_python = $(firstword $(foreach p,python3.11 python3.12 python3,$(if $(call tag,$(p)),$(p))))

# The venv's own version; empty when the venv is missing or broken.
HAVE := $(filter py311 py312,$(shell $(PY) -c 'import pip; $(TELL)' 2>/dev/null))

# Without PYTHON=..., a sound venv stays as it is; a new one takes the first interpreter that will do.
PYTHON ?=
ifneq ($(PYTHON),)
TAG := $(call tag,$(PYTHON))
else ifneq ($(HAVE),)
TAG := $(HAVE)
override PYTHON := $(shell $(PY) -c 'import sys; print(sys._base_executable)')
else
override PYTHON := $(find_python)
TAG := $(if $(PYTHON),$(call tag,$(PYTHON)))
endif
LOCK := $(if $(TAG),locks/$(TAG).txt)

# The JAX backend: cpu, cuda or tpu; the venv remembers its last choice.
HAD := $(if $(HAVE),$(shell cat $(VENV)/.jax 2>/dev/null))
JAX ?= $(or $(HAD),cpu)
jax_extra_cuda := cuda13
jax_extra_tpu := tpu
EXTRA := $(jax_extra_$(JAX))

# A venv that is broken, of another Python or with another accelerator's plugins is made anew.
SOUND := $(if $(HAVE),$(if $(filter $(TAG),$(HAVE)),$(if $(filter-out cpu $(JAX),$(HAD)),,yes)))

PIP_INSTALL = $(PY) -m pip install -q --disable-pip-version-check
ENV := $(VENV)/.stamp-env
BACKEND := $(VENV)/.stamp-jax-$(JAX)
TEST := $(VENV)/.stamp-test

.PHONY: help env train test clean FORCE
.DELETE_ON_ERROR:

help:
	@echo 'make env     set up .venv from locks/ (JAX=cpu, cuda or tpu; PYTHON=... to choose 3.11 or 3.12)'
	@echo 'make train   set up, then run CONFIG=$(CONFIG) in WORKDIR=$(WORKDIR) (ARGS=... adds flags)'
	@echo 'make test    set up with the test tools and torch, then run pytest (ARGS=... adds flags)'
	@echo 'make clean   remove build products and caches; .venv and runs stay'

env: $(BACKEND)

train: $(BACKEND)
	$(PY) -m bapo_jax.train --config=$(CONFIG) --workdir=$(WORKDIR) $(ARGS)

test: $(TEST)
	$(PY) -m pytest $(ARGS)

$(ENV): $(LOCK) requirements.txt $(if $(SOUND),,FORCE)
	@test -n '$(TAG)' || { echo 'No Python 3.11 or 3.12 with venv$(if $(PYTHON), at PYTHON=$(PYTHON)): install one, or name it with PYTHON=/path/to/python3.12' >&2; exit 1; }
	@case '$(JAX)' in cpu|cuda|tpu) ;; *) echo 'JAX=$(JAX): want cpu, cuda or tpu' >&2; exit 1;; esac
ifeq ($(SOUND),)
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
endif
	$(PIP_INSTALL) -r $(LOCK)
	@touch $@

$(BACKEND): $(ENV)
	@case '$(JAX)' in cpu|cuda|tpu) ;; *) echo 'JAX=$(JAX): want cpu, cuda or tpu' >&2; exit 1;; esac
	$(if $(EXTRA),$(PIP_INSTALL) -c $(LOCK) 'jax[$(EXTRA)]')
	@echo $(JAX) > $(VENV)/.jax
	@touch $@

$(TEST): $(BACKEND) requirements-test.txt
	$(PIP_INSTALL) -c $(LOCK) -r requirements-test.txt
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis
	find . \( -path ./.git -o -path './.venv*' -o -path ./runs \) -prune -o -type d -name __pycache__ -exec rm -rf {} +
