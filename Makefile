# The plain commands. Each does all the set-up it needs, in .venv of this checkout and nowhere else.
PYTHON ?= python3
comma := ,
VENV := .venv
BIN := $(VENV)/bin
# The files whose docstrings are the reference.
PUBLIC := $(addprefix src/stablenorm/,api/derivatives.py api/norms.py layer.py memory.py cli/__init__.py testing/asserts.py testing/families.py testing/fixed.py testing/judge.py testing/limits.py testing/plain.py threads.py oracle/__init__.py oracle/exact.py check/gradients.py check/norms.py check/results.py cost.py diagnosis/__init__.py diagnosis/methods.py)

.PHONY: help run test lint accuracy clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# What is compiled; without a compiler it is left out, and said so.
NATIVE := CMakeLists.txt $(wildcard src/stablenorm/native/*.cpp src/stablenorm/native/*.h)
# What .clang-format lays out.
CPP := $(foreach end,cpp h cu cuh,$(wildcard src/stablenorm/*/*.$(end) tests/*.$(end) tests/shim/*.$(end)))
ifeq ($(shell command -v $(or $(CXX),c++)),)
export STABLENORM_PURE := 1
endif

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Runs a command with a dot every two seconds, so that nobody takes it for one that hangs.
with_dots = @(while sleep 2; do printf .; done) & dots=$$!; trap "kill $$dots; echo" EXIT; printf '%s ' $(1); $(2)

# Re-made whenever pyproject.toml or a source is newer, so that a pull never leaves an old environment behind.
# NARROW: one instruction set more, which only the tests need.
$(VENV)/.run: pyproject.toml $(NATIVE)
	@test -z "$(STABLENORM_PURE)" || echo 'No C++ compiler is found: backend="native" is left out. Cure: apt-get install g++, or xcode-select --install, then make again.'
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; say which: make PYTHON=python3.12 ...")'
	@echo "Setting up $(VENV), once."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "pip>=25.1"
	$(call with_dots,'Compiling the kernels$(comma) about a minute on two cores',$(PIP) -e ".[plot]" -C cmake.define.NARROW=OFF)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(call with_dots,'Compiling and installing what the tests need$(comma) about a minute',$(PIP) -e . -C cmake.define.NARROW=ON --group dev)
	@touch $@

run: $(VENV)/.run  ## normalize the bundled real data, forward and backward, and check every number
	@echo 'Computing, timing and checking the bundled data: a few seconds.'
	@mkdir -p build
	@$(BIN)/stablenorm run --html build/run.html

test: $(VENV)/.dev  ## lint, types, import contract, tests, doctests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP)
	$(BIN)/lint-imports
	$(BIN)/numpydoc lint $(PUBLIC)
	$(BIN)/pytest -n 2 --dist worksteal

.PHONY: wheel format
format: $(VENV)/.dev  ## lay out Python, C++ and CUDA as `make test` asks
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# README's examples, run from the wheel alone: -I, lest this folder be found first.
wheel: $(VENV)/.dev  ## build sdist and wheel; install the wheel into an empty environment, run README there
	rm -rf build/wheel
	$(BIN)/python -m build --outdir build/wheel/dist
# Which C libraries it needs: those of every Linux of the last years, and no more.
	test $$(uname) != Linux || $(BIN)/auditwheel show build/wheel/dist/*.whl
	$(PYTHON) -m venv build/wheel/empty
	build/wheel/empty/bin/python -m pip install --quiet --disable-pip-version-check build/wheel/dist/*.whl
	cd build/wheel && empty/bin/python -I -m doctest -o ELLIPSIS -o NORMALIZE_WHITESPACE ../../README.md
	cd build/wheel && empty/bin/stablenorm run

# What each sanitizer runs. That of addresses looks at the heap alone, by calls: GCC 12 would take half an hour for the
# stack of what is inlined.
NATIVE_FLAGS := -std=c++17 -O1 -g -ffp-contract=off -fno-trapping-math -Wno-psabi -pthread -fno-sanitize-recover=all
ALONE := tests/kernels.cpp $(addprefix src/stablenorm/native/,tiles.cpp jobs.cpp pool.cpp memory.cpp)
INSTRUCTIONS := $(if $(filter x86_64,$(shell uname -m)),-mavx2 -mfma -mf16c)
.PHONY: kernels
kernels:  ## after a change of the kernels: compile one instruction set, and compare every bit: half a minute
	mkdir -p build
	$(CXX) $(filter-out -O1 -g,$(NATIVE_FLAGS)) -DALONE $(INSTRUCTIONS) -Isrc/stablenorm/native $(ALONE) -o build/kernels
	build/kernels | diff tests/kernels.txt -

.PHONY: sanitize
sanitize:  ## the kernels under sanitizers of memory, arithmetic and threads: 6 min
	mkdir -p build/sanitize
	$(call sanitized,memory,-fsanitize=address --param asan-stack=0 --param asan-instrumentation-with-call-threshold=0)
	$(call sanitized,arithmetic,-fsanitize=undefined -fno-sanitize=null$(comma)object-size$(comma)bounds)
	$(call sanitized,threads,-fsanitize=thread)
define sanitized
$(CXX) $(NATIVE_FLAGS) $(2) -DALONE $(INSTRUCTIONS) -Isrc/stablenorm/native $(ALONE) -o build/sanitize/$(1)
$(if $(filter threads,$(1)),,build/sanitize/$(1) | diff tests/kernels.txt -)
build/sanitize/$(1) threads
endef

.PHONY: docs figures
docs: $(VENV)/.dev  ## the documentation, into build/docs; no network needed
	$(BIN)/sphinx-build -W -n --keep-going -q -b html docs build/docs
	@echo "build/docs/index.html"

figures: $(VENV)/.dev  ## the picture of the first page: 1 min
	$(BIN)/python benchmarks/figures.py

accuracy: $(VENV)/.dev  ## the worst error of each input family and dtype, into docs: 5 min
	$(BIN)/python benchmarks/accuracy.py

.PHONY: keywords rounding
keywords: $(VENV)/.dev  ## what residuals and the other keywords cost, into docs: 1 min
	$(BIN)/python benchmarks/keywords.py

rounding: $(VENV)/.dev  ## what rounding="nearest" costs, into docs: 12 min, alone on the machine
	$(BIN)/python benchmarks/rounding.py

# The peers to be measured are no part of the package nor of its tests, so they live apart. One that
# cannot be installed is reported as missing by the benchmark.
BENCH := .venv-bench
BENCH_PIP := $(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check

$(BENCH)/.done: pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; say which: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(BENCH)
	$(BENCH_PIP) "pip>=25.1"
	-$(BENCH_PIP) torch==2.13.0
	$(BENCH_PIP) -e ".[plot]"
	-$(BENCH_PIP) onnxruntime onnx
	-$(BENCH_PIP) jax
	@touch $@

.PHONY: bench
bench: $(BENCH)/.done  ## speed beside the peers, into docs: 10 min; ARGS=--render: the page alone
	$(BENCH)/bin/python benchmarks/bench.py $(ARGS)
	$(BENCH)/bin/python benchmarks/keywords.py $(ARGS)

.PHONY: stability
stability: $(BENCH)/.done  ## what the peers lose on hard inputs, into docs: 2 min
	$(BENCH)/bin/python benchmarks/stability.py

.PHONY: scorecard judge
scorecard: $(BENCH)/.done  ## what the peers lose, held against limits that follow, into docs: 1 min
	$(BENCH)/bin/python benchmarks/scorecard.py $(ARGS)

judge: $(VENV)/.dev  ## the gates of the judge of kernels, into docs: 10 min
	PYTHONPATH=tests $(BIN)/python benchmarks/judge.py $(ARGS)

$(BENCH)/.shootout: $(BENCH)/.done
	-$(BENCH_PIP) autograd
	@touch $@

.PHONY: shootout
shootout: $(BENCH)/.shootout  ## our gradient checkers beside others, on 13 mistakes, into docs: 10 min
	$(BENCH)/bin/python benchmarks/shootout.py $(ARGS)

# What needs an NVIDIA GPU: CuPy, and the peers, in an environment of their own.
GPU := .venv-gpu
GPU_PIP := $(GPU)/bin/python -m pip install --quiet --disable-pip-version-check

$(GPU)/.done: pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed; say which: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(GPU)
	$(GPU_PIP) "pip>=25.1"
	$(GPU_PIP) -e ".[cuda,plot]" --group test
	-$(GPU_PIP) torch==2.13.0
	-$(GPU_PIP) liger-kernel
	-$(GPU_PIP) "quack-kernels[cu13]"
	@touch $@

.PHONY: gpu
gpu: $(GPU)/.done  ## on a machine with an NVIDIA GPU: check and time the CUDA kernels, into docs
	$(GPU)/bin/python benchmarks/gpu.py $(ARGS)

clean:  ## remove the environment and everything generated by tools
	rm -rf $(VENV) $(BENCH) $(GPU) build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
