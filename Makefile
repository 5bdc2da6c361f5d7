# Commands for developers. `make demo` and `make test` work on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# With Flower 1.39, sites use gRPC; `make test-newest` installs the newest Flower, with which they use HTTP.
FLOWER := flwr[simulation]<1.40
NEWEST := .venv-newest

.PHONY: help install demo test test-newest slow fuzz lint format types proto proto-check reference constraints constraints-check docker-lock bench gpu docs docs-links notebook clean

help:            ## list all targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*##/ —/'

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]' '$(FLOWER)'
	touch $@

install: $(STAMP) ## create the virtual environment with the development dependencies

demo: install    ## train ten clients with five architectures, and a local baseline; writes a report
	$(BIN)/fedhet run felo --preset demo --against local

test: install lint types proto-check ## run lint, types and tests, like CI
	$(BIN)/python -m pytest -m 'not slow' --numprocesses logical --dist loadgroup --ignore tests/test_gpu.py
	$(BIN)/python -m pytest -m 'not slow' tests/test_gpu.py

$(NEWEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet --editable '.[dev]'
	touch $@

test-newest: $(NEWEST)/.installed ## run all tests of deployments with the newest Flower, in a second environment
	$(NEWEST)/bin/python -m pytest --numprocesses logical --dist loadgroup $(patsubst %,tests/test_%.py,transport deploy \
	  deploy_tutorial hosts doctor docker operation signed connection nodes certs packaging flower_app masking_deployed)

slow: install    ## run the longer tests
	$(BIN)/python -m pytest -m slow

fuzz: install    ## check that a million corrupted replies are rejected or satisfy the contract
	FEDHET_FUZZ=1000000 $(BIN)/python -m pytest --timeout 0 tests/test_fuzz.py
	$(BIN)/python -m benchmarks.fuzz_folders build/fuzz --count 100000

lint: install    ## check style, import layers, dead code and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/vulture
	$(BIN)/codespell --dictionary=- --dictionary docs/words.txt

format: install  ## format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install   ## check types with mypy (strict)
	$(BIN)/mypy

proto: install   ## generate code from the .proto file
	@mkdir -p build/proto
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=build/proto --pyi_out=build/proto proto/fedhet/v1/knowledge.proto
	cp build/proto/fedhet/v1/knowledge_pb2.py build/proto/fedhet/v1/knowledge_pb2.pyi fedhet/_generated/

proto-check: install ## check that the generated code matches the .proto file
	@mkdir -p build/proto
	@$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=build/proto --pyi_out=build/proto proto/fedhet/v1/knowledge.proto
	@for f in knowledge_pb2.py knowledge_pb2.pyi; do cmp build/proto/fedhet/v1/$$f fedhet/_generated/$$f || { echo "run: make proto"; exit 1; }; done

reference: install ## generate the reference pages, method pages and Flower's run config from the code, and the claims from the tables
	$(BIN)/python -m tools.reference
	$(BIN)/python -m tools.results
	@touch $(STAMP)  # The run config in pyproject.toml does not affect the environment.

# uv is a dependency of Flower. The image uses Linux and Python 3.11; amd64 and arm64 share the same pins.
COMPILE = $(BIN)/uv pip compile --quiet --custom-compile-command 'make constraints' --no-annotate --generate-hashes \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --output-file
WANTED := build/wanted.txt

$(WANTED): pyproject.toml docker/wanted.py Makefile
	@mkdir -p build
	@$(BIN)/python docker/wanted.py image build > $@
	@echo 'flwr<1.40' > build/constraints.in
	@echo 'flwr>=1.40' > build/newest.in

constraints: install $(WANTED) ## pin the newest compatible versions of the image's packages in docker/*.txt
	$(COMPILE) docker/constraints.txt --upgrade $(WANTED) build/constraints.in
	$(COMPILE) docker/newest.txt --upgrade $(WANTED) build/newest.in
	@echo 'cryptography>=50,<51' > build/overrides.in
	$(COMPILE) docker/overrides.txt --upgrade --no-deps build/overrides.in

constraints-check: install $(WANTED) ## check that docker/constraints.txt and docker/newest.txt match pyproject.toml
	@for pins in constraints newest; do cp docker/$$pins.txt build/$$pins.txt; \
	$(COMPILE) build/$$pins.txt $(WANTED) build/$$pins.in > build/uv.log || { cat build/uv.log; exit 1; }; \
	cmp build/$$pins.txt docker/$$pins.txt || { echo "run: make constraints"; exit 1; }; done

BASE_TAG := python:3.11-slim-bookworm

docker-lock:     ## pin the current digest of the base image in docker/Dockerfile
	docker pull --quiet $(BASE_TAG)
	digest=$$(docker image inspect --format '{{index .RepoDigests 0}}' $(BASE_TAG) | sed 's/.*@//') \
	&& test -n "$$digest" \
	&& sed -i.before "s|$(BASE_TAG)@sha256:[0-9a-f]*|$(BASE_TAG)@$$digest|" docker/Dockerfile && rm docker/Dockerfile.before
	@grep '^ARG IMAGE=' docker/Dockerfile

bench: install   ## run the benchmarks and print ratios
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.training_loop
	$(BIN)/python -m benchmarks.evaluation
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.allocator
	$(BIN)/python -m benchmarks.engine_overhead
	$(BIN)/python -m benchmarks.round
	$(BIN)/python -m benchmarks.conformal_step
	$(BIN)/python -m benchmarks.cvae_share
	$(BIN)/python -m benchmarks.voting
	$(BIN)/python -m benchmarks.payload
	$(BIN)/python -m benchmarks.encoding_step
	$(BIN)/python -m benchmarks.flower_alone
	$(BIN)/python -m benchmarks.server_memory
	$(BIN)/python -m benchmarks.many_clients
	$(BIN)/python -m benchmarks.data_memory
	$(BIN)/python -m benchmarks.knowledge_share
	$(BIN)/python -m benchmarks.model_pool

gpu: install     ## run the benchmarks on an accelerator, in parts of a few minutes
	$(BIN)/python -m benchmarks.gpu

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

docs: $(VENV)/.docs ## build the documentation in build/docs/index.html; fails on dead links
	$(BIN)/sphinx-build -W --keep-going -b html docs build/docs
	@echo build/docs/index.html

docs-links: $(VENV)/.docs ## check the external links of the documentation
	$(BIN)/sphinx-build -b linkcheck docs build/links

notebook: install ## execute examples/fedhet.ipynb and store its outputs
	OMP_NUM_THREADS=1 $(BIN)/python tests/test_notebook.py

clean:           ## remove build outputs and runs, except .venv
	rm -rf build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
