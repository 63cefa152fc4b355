# Everything here sets itself up: a virtual environment in .venv, the packages it needs, the compiled library.
# Needed on the machine: Python 3.11 or newer with venv, a C++20 compiler, make.
#
#   make demo     optimise example models, compare with the originals, time both
#   make test     the test suite, without slow rows that run nothing that others do not run
#   make thorough those rows
#   make lint     ruff and mypy
#   make sanitize the kernel tests, those of the provider, and random calls on a library built with address and
#                 undefined-behaviour sanitizers
#   make sanitize-fuzz  only the random calls; SANITIZED_FUZZ="operators plan_bytes --seconds 300" says which and how long
#   make neon     the kernels cross-compiled for aarch64 and, where qemu-user is, checked against the plain reference
#   make wheels   wheels for Linux and Windows on x86-64 and arm64, and a source distribution, in build/wheels; the library
#                 for macOS is compiled and examined; where qemu-user is, a sample of the tests on the aarch64 wheel
#   make windows  the tests of the wheel for Windows, in a Windows Python that Wine runs; the programs in C++ and Node as
#                 programs for Windows; the kernels and the provider on older releases of ONNX Runtime for Windows.
#                 WINDOWS="tests/face" says which tests instead of all, WINDOWS=--sample takes five minutes
#   make release  all that a release needs but publishing it: checks, pages, wheels, a trial of one, and a list of the rest
#   make bench    measure the kernels beside other libraries and the machine's limits; BENCH="all --quick" says how
#   make fuzz     search for faults with random cases; FUZZ="graphs --seconds 600 --seed 7" says which and how long
#   make docs     the pages of docs/ as a site in build/docs
#   make compat   what make thorough does; the tests of the library, and the kept graphs, on older releases of ONNX Runtime;
#                 the execution provider on all releases that can load it, and in packages that make their own sessions (the recipes of
#                 docs/recipes.md; two of them need 9 GB of memory); other tools on fused graphs; rewritten graphs in
#                 OpenVINO and, where npm is, in onnxruntime-web; programs in C++ and Node; what we declare of ONNX
#                 Runtime's C interface beside its headers; sharded models in processes of MPI; where Wine and the wheel
#                 for Windows are, a sample of make windows; a sample of make sweep
#   make sweep    export, convert, fuse and compare models of other collections (torch, transformers ...; hours at first);
#                 ROWS='^(bert|llama)$$' says which architectures
#   make clean    remove what the above made
#
# PYTHON=... chooses the interpreter; CXX_AARCH64=... the compiler of make neon, QEMU_AARCH64=... its emulator,
# CHECK_ROUNDS=... how many random problems it tries.

PYTHON ?= python3
CXX ?= c++
VENV := .venv
BIN := $(abspath $(VENV))/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
BENCH := all
FUZZ := all --seconds 600
SANITIZED_FUZZ := operators plan_bytes --seconds 300
OLD_RUNTIMES := 1.20.1 1.23.2
SWEEP_VENVS := $(VENV)-sweep $(VENV)-optimum $(VENV)-convert
PROVIDER_RUNTIMES := 1.23.2 1.24.4 1.25.1 1.26.0 1.27.0 1.28.0 1.29.0 1.30.0 1.31.1
# Folders with ONNX Runtime's headers, besides those of the packages that make compat loads.
HEADERS := $(wildcard /usr/include/onnxruntime)
RUNTIMES := $(sort $(OLD_RUNTIMES) $(PROVIDER_RUNTIMES))
# What an installation compiles or copies; the rest is read where it is.
NATIVE := $(wildcard lowering/ort/csrc/*.* lowering/ort/csrc/*/*.* lowering/ort/csrc/*/*/*.* fa_compiler/everywhere/*.pth)

.PHONY: demo test thorough sanitize sanitize-fuzz sanitized neon windows wheels release lint bench fuzz docs compat sweep clean

demo: $(VENV)/.package
	$(BIN)/python examples/demo.py

# Whoever keeps Python from writing bytecode would compile all sources again in each program that the tests start.
unexport PYTHONDONTWRITEBYTECODE

# worksteal: what lies side by side in a file shares sessions and results of the reference.
test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not thorough"

thorough: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --dist worksteal -m thorough

# The runtime is not built with sanitizers, so theirs has to be loaded first; Python's own leaks are not ours. The random
# problems of the tests are left to the search, which has them, too: each time the next ones.
SANITIZED := build/sanitize
WITH_SANITIZERS = ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1:print_summary=1:abort_on_error=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	FA_COMPILER_TEST_LIBRARY=$(abspath $(SANITIZED))/libfa_compiler_ort.so
sanitize: sanitized
	$(WITH_SANITIZERS) $(BIN)/python -m pytest -q --capture=sys tests/lowering -k "not library and not random"
	$(WITH_SANITIZERS) $(BIN)/python -m pytest -q --capture=sys tests/face/test_provider.py tests/face/test_plan.py -k "not script"
	$(MAKE) sanitize-fuzz

sanitize-fuzz: sanitized
	$(WITH_SANITIZERS) $(BIN)/python -m tools.fuzz $(SANITIZED_FUZZ) --state $(SANITIZED)/fuzz

sanitized: $(VENV)/.test
	$(BIN)/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -S lowering/ort/csrc -B $(SANITIZED) -DFA_SANITIZE=ON
	$(BIN)/cmake --build $(SANITIZED)

CXX_AARCH64 ?= aarch64-linux-gnu-g++
QEMU_AARCH64 ?= $(shell command -v qemu-aarch64-static || command -v qemu-aarch64)
export CXX_AARCH64 QEMU_AARCH64
neon: $(VENV)/.tools
	PATH="$(BIN):$$PATH" lowering/ort/csrc/neon.sh build/neon

wheels: $(VENV)-wheels/.wheels
	@echo "four wheels: the first time 4 to 10 minutes on two cores, later only what has changed is compiled"
	$(VENV)-wheels/bin/python .ci/wheels/build.py
	$(VENV)-wheels/bin/python .ci/wheels/macos.py
	PYTHON=$(VENV)-wheels/bin/python .ci/wheels/run_aarch64.sh build/wheels/*_aarch64.whl build/aarch64

WINDOWS :=
# Releases for Windows beside the newest one, where the whole suite runs, and what runs on them.
WINDOWS_RUNTIMES := $(if $(WINDOWS),,1.20.1 1.23.2 1.26.0 1.28.0)
WINDOWS_TESTS := tests/face/test_provider.py tests/face/test_plan.py tests/lowering/test_library.py tests/lowering/test_decode.py \
	tests/lowering/test_flash_attention_score.py tests/lowering/test_linear.py
# The wheel is built first: what is compiled already is not compiled again.
windows: $(VENV)-wheels/.wheels build/hosts/.hosts
	$(VENV)-wheels/bin/python .ci/wheels/build.py win_amd64
	$(VENV)-wheels/bin/python -m tools.compat.windows --programs build/hosts/node_modules $(WINDOWS)
	set -e; for version in $(WINDOWS_RUNTIMES); do \
		echo "onnxruntime $$version for Windows"; \
		$(VENV)-wheels/bin/python -m tools.compat.windows --runtime $$version $(WINDOWS_TESTS); \
	done

# Its first part ends in a minute if a version, a date or a commit is missing.
release: $(VENV)/.test
	$(BIN)/python -m tools.release before
	$(MAKE) lint test thorough docs wheels
	$(VENV)-wheels/bin/python -m tools.release after

bench: $(VENV)/.bench
	$(BIN)/python -m bench $(BENCH)

fuzz: $(VENV)/.test $(VENV)/.search
	$(BIN)/python -m tools.fuzz $(FUZZ)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet . || { echo "error: run $(VENV)/bin/ruff format ." >&2; exit 1; }
	$(BIN)/mypy

docs: $(VENV)-docs/.docs
	$(VENV)-docs/bin/sphinx-build -W --keep-going -q docs build/docs
	@echo "build/docs/index.html"

# Files for Ascend are made without ONNX Runtime, which only judges them there: the newest one does.
compat: $(VENV)/.test $(RUNTIMES:%=$(VENV)-%/.test) $(VENV)-tools/.tools $(VENV)-packages/.packages $(VENV)-optimum/.sweep \
		$(VENV)-mpi/.mpi $(VENV)-wheels/.wheels build/web/.web build/hosts/.hosts build/headers/.headers
	$(BIN)/python -m pytest -q -n 2 --dist worksteal -m thorough
	$(BIN)/python -m tools.compat.check_abi build/hosts build/headers $(HEADERS)
	set -e; for version in $(OLD_RUNTIMES); do \
		echo "onnxruntime $$version"; \
		PYTHONPATH="$(CURDIR)" $(VENV)-$$version/bin/python -m pytest -q -n 2 tests/lowering --ignore tests/lowering/ascend; \
	done
	set -e; for version in $(PROVIDER_RUNTIMES); do \
		echo "the provider in onnxruntime $$version"; \
		PYTHONPATH="$(CURDIR)" $(VENV)-$$version/bin/python -m pytest -q -n 2 tests/face/test_provider.py tests/face/test_plan.py \
			tests/passes/ir/test_signatures.py; \
	done
	$(BIN)/python -m tools.compat.check_versions --versions $(OLD_RUNTIMES)
	PYTHONPATH="$(CURDIR)" $(VENV)-tools/bin/python -m tools.compat.check_tools
	PYTHONPATH="$(CURDIR)" $(VENV)-tools/bin/python -m tools.compat.check_runtimes
	if [ -d build/hosts/node_modules ]; then PYTHONPATH="$(CURDIR)" $(BIN)/python -m tools.compat.check_hosts build/hosts/node_modules; fi
	PYTHONPATH="$(CURDIR)" $(VENV)-packages/bin/python -m tools.compat.check_packages packages
	PYTHONPATH="$(CURDIR)" $(VENV)-optimum/bin/python -m tools.compat.check_packages optimum
	PYTHONPATH="$(CURDIR)" $(VENV)-mpi/bin/python -m pytest -q tests/parallel/test_mpi.py
	$(VENV)-wheels/bin/python -m tools.compat.windows --if-there --sample --programs build/hosts/node_modules
	$(MAKE) sweep ROWS='$(SAMPLE)'

# What is in build/sweep already is not made again. ROWS=REGEX chooses the architectures that are exported, SWEEP="--only
# REGEX" what is judged, and --again REGEX what is judged anew. make compat takes the architectures of SAMPLE.
ROWS :=
SAMPLE := ^(bart|bert|llama|qwen3|t5|vit)$$
SWEEP :=
sweep: $(VENV)/.package $(VENV)-sweep/.sweep $(VENV)-optimum/.sweep $(VENV)-convert/.sweep
	$(VENV)-sweep/bin/python -m tools.sweep.export --state build/sweep --only '$(ROWS)'
	$(VENV)-optimum/bin/python -m tools.sweep.export --state build/sweep --collections optimum --only '$(ROWS)'
	$(VENV)-convert/bin/python -m tools.sweep.convert --state build/sweep
	PYTHONPATH="$(CURDIR)" $(BIN)/python -m tools.sweep.report --state build/sweep --details $(SWEEP)

clean:
	rm -rf $(VENV) $(RUNTIMES:%=$(VENV)-%) $(VENV)-tools $(VENV)-packages $(VENV)-mpi $(VENV)-docs $(VENV)-wheels \
		$(SWEEP_VENVS) build

# The build tools live in the environment, so that a rebuild after an edit takes a second.
$(VENV)/.tools:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is missing or older than 3.11; set PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) has no venv; install it (Debian: apt install python3-venv) or set PYTHON" >&2; exit 1; }
	@command -v $(CXX) >/dev/null || \
		{ echo "error: no C++ compiler $(CXX); install one (Debian: apt install g++) or set CXX" >&2; exit 1; }
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) "scikit-build-core>=1.0" cmake ninja
	@touch $@

# make demo needs the variants of the kernels that this machine takes. Everything else has all of them, as a wheel does. Both
# keep their objects in build/, so that none is compiled twice.
INSTALL := PATH="$(BIN):$$PATH" $(BIN)/python tools/visible_install.py
$(VENV)/.package: $(VENV)/.tools pyproject.toml $(NATIVE)
	@echo "installing the package into $(VENV), with the kernels for this machine"
	@$(INSTALL) --variants native --no-compile
	@touch $@

WITH_EXTRAS := $(VENV)/.test $(VENV)/.bench $(VENV)/.search
$(WITH_EXTRAS): $(VENV)/.tools pyproject.toml $(NATIVE)
	@echo "installing the package into $(VENV), with the kernels for all machines"
	@$(INSTALL) --extra $(@:$(VENV)/.%=%)
	@touch $(VENV)/.package $@

# An environment with other ONNX tools and OpenVINO; it uses the library that .venv built.
$(VENV)-tools/.tools: pyproject.toml
	$(PYTHON) -m venv $(VENV)-tools
	$(VENV)-tools/bin/python -m pip install --quiet --disable-pip-version-check onnxruntime onnx onnx-ir networkx \
		numpy ml_dtypes sympy onnxsim onnxslim onnxconverter-common openvino
	@touch $@

# An environment with a compiler for other processors and older systems.
$(VENV)-wheels/.wheels: pyproject.toml
	$(PYTHON) -m venv $(VENV)-wheels
	$(VENV)-wheels/bin/python -m pip install --quiet --disable-pip-version-check build "scikit-build-core>=1.0" cmake \
		ninja ziglang auditwheel pyelftools pefile macholib twine
	@touch $@

# Environments of the sweep, with pinned versions. torchvision comes along, has to fit torch exactly, and is not needed.
$(VENV)-sweep/.sweep: tools/sweep/requirements.txt
$(VENV)-optimum/.sweep: tools/sweep/requirements-optimum.txt
$(VENV)-convert/.sweep: tools/sweep/requirements-convert.txt
$(SWEEP_VENVS:%=%/.sweep):
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	$(@D)/bin/python -m pip uninstall --quiet --disable-pip-version-check --yes torchvision
	@touch $@

# An environment with MPI; it uses the library that .venv built.
$(VENV)-mpi/.mpi: pyproject.toml
	$(PYTHON) -m venv $(VENV)-mpi
	$(VENV)-mpi/bin/python -m pip install --quiet --disable-pip-version-check mpi4py mpich onnxruntime onnx onnx-ir \
		networkx numpy ml_dtypes rich pytest pytest-xdist hypothesis
	@touch $@

# An environment with packages that make sessions of their own, and with what makes their models. torch has a fixed version
# there, because the newest one may be a build for GPUs, of several gigabytes.
$(VENV)-packages/.packages: tools/compat/requirements-packages.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# An environment with Sphinx, and with what the documented functions import.
$(VENV)-docs/.docs: pyproject.toml
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check sphinx myst-parser furo
	@touch $@

build/web/.web:
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then npm install --prefix $(@D) --no-save --silent onnxruntime-web; \
		else echo "npm is missing: onnxruntime-web is left out"; fi
	@touch $@

# What the programs in other languages need: ONNX Runtime for Node, and its headers for C++, of the newest release that
# npm has them of.
build/hosts/.hosts:
	@mkdir -p $(@D)
	@if command -v npm >/dev/null; then npm install --prefix $(@D) --no-save --silent --ignore-scripts onnxruntime-node \
		com.github.asus4.onnxruntime; else echo "npm is missing: the programs in C++ and Node are left out"; fi
	@touch $@

# ONNX Runtime's headers of older releases than build/hosts has: 1.17 is in amd-quark, 1.26 in this version of the other.
build/headers/.headers: $(VENV)/.tools
	@mkdir -p $(@D)
	$(PIP) --no-deps --upgrade --target $(@D)/amd-quark amd-quark
	@if command -v npm >/dev/null; then npm install --prefix $(@D) --no-save --silent --ignore-scripts \
		com.github.asus4.onnxruntime@0.4.8; else echo "npm is missing: only the headers of amd-quark are compared"; fi
	@touch $@

# An environment with an older runtime; it uses the library that .venv built.
$(VENV)-%/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --disable-pip-version-check onnxruntime==$* \
		onnx onnx-ir networkx numpy ml_dtypes rich pytest pytest-xdist hypothesis argcomplete
	@touch $@
