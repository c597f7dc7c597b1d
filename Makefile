# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` need only Python 3.10+, g++ and make: they set up everything else in $(VENV).
#
#   make demo          train a small language model on files of this machine and follow the loss of every channel
#   make test          build, then the GoogleTest and pytest suites
#   make test-cuda     build the CUDA kernels for many GPUs, then the gates on them and their tests under cudasim; no GPU
#                      (SIMULATE="9.0-one 9.0-two": only these runs of tests/cuda/simulate.sh)
#   make lint          clang-format and ruff
#   make format        let them rewrite the sources
#   make docs          the documentation, in build/docs; warnings are errors
#   make clean         remove builds and virtual environments
#
# An importable torch >= 2.8 is used as it is, else torch==2.13.0 is installed. Choose another with
# `make test TORCH=torch==2.14.1 VENV=.venv-2.14`. SEGSCATTER_CUDA, TORCH_CUDA_ARCH_LIST, CMAKE_ARGS and MAX_JOBS are passed on.

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
DEFAULT_TORCH := torch==2.13.0
export MAX_JOBS ?= $(shell nproc 2>/dev/null || echo 2)

PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
# Tools installed into the virtual environment come first.
export PATH := $(abspath $(VENV))/bin:$(PATH)
HAS_TORCH := import sys, torch; sys.exit(tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8))
WHERE_TORCH := import pathlib, torch; print(pathlib.Path(torch.__file__).parents[1])
WHERE_PACKAGES := import sysconfig; print(sysconfig.get_path("purelib"))

.PHONY: demo test test-cpp test-python test-cuda build lint format docs clean

demo: build $(VENV)/demo
	$(PY) examples/demo

test: test-cpp test-python

test-cpp: build
	@echo "== C++ tests"
	$(PY) tests/cpp/run.py

test-python: build
	@echo "== Python tests"
	$(PY) -m pytest -n $(MAX_JOBS) --dist loadfile

# The PTX serves the simulator, the machine code the gates. Needs a CUDA torch and nvcc.
test-cuda: export TORCH_CUDA_ARCH_LIST ?= 7.5+PTX 8.0+PTX 8.6 8.9 9.0+PTX 10.0 12.0+PTX
test-cuda: export SEGSCATTER_CUDA := ON
test-cuda: build
	@echo "== gates on what nvcc made"
	PYTHONPATH=python $(PY) -m pytest -q tests/gates
	PYTHON=$(abspath $(PY)) tests/cuda/simulate.sh $(SIMULATE)

# CMake and ninja decide what is out of date, so this always runs.
build: $(VENV)/tools
	@echo "== building segscatter"
	@$(PY) setup.py --quiet build_ext --inplace
	@[ -f $(VENV)/installed ] || $(PIP) --no-build-isolation --no-deps --editable .
	@touch $(VENV)/installed

$(VENV)/python:
	@echo "== virtual environment $(VENV)"
	@if [ -z "$(TORCH)" ] && $(PYTHON) -c '$(HAS_TORCH)' 2>/dev/null; then \
	  echo "using the torch that $(PYTHON) imports" && $(PYTHON) -m venv $(VENV) && \
	  $(PYTHON) -c '$(WHERE_TORCH)' > "$$($(PY) -c '$(WHERE_PACKAGES)')/outer.pth"; \
	else \
	  $(PYTHON) -m venv $(VENV) && echo "installing $(or $(TORCH),$(DEFAULT_TORCH)) (minutes on a slow line)" && $(PIP) "$(or $(TORCH),$(DEFAULT_TORCH))"; \
	fi
	@touch $@

$(VENV)/tools: $(VENV)/python tests/requirements.txt
	@echo "== build and test tools"
	@$(PIP) -r tests/requirements.txt
	@touch $@

$(VENV)/demo: $(VENV)/python examples/demo/requirements.txt
	@$(PIP) -r examples/demo/requirements.txt
	@touch $@

$(VENV)/lint: $(VENV)/python tests/requirements-lint.txt
	@$(PIP) -r tests/requirements-lint.txt
	@touch $@

CXX_SOURCES = $(shell git ls-files '*.h' '*.cpp' '*.cuh' '*.cu')

lint: $(VENV)/lint
	ruff check .
	ruff format --check .
	clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/lint
	ruff format .
	ruff check --fix .
	clang-format -i $(CXX_SOURCES)

$(VENV)/docs: $(VENV)/python docs/requirements.txt
	@$(PIP) -r docs/requirements.txt
	@touch $@

docs: build $(VENV)/docs
	$(PY) -m sphinx -q -W --keep-going docs build/docs

clean:
	rm -rf build .venv* demo-output
