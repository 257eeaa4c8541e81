PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TESTS_AT_ONCE ?= 2
SOAK_MINUTES ?= 60

.PHONY: help install demo check test test-long soak-sim soak-inputs test-families test-clients test-gpu bench chaos soak figures bench-peers bench-gpu proto format clean

help:            ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

install: $(STAMP)  ## create .venv with everything in it
$(STAMP): pyproject.toml
	@echo "Installing kvrelay, its dependencies and its tools into $(VENV): PyPI's default torch on Linux carries CUDA (gigabytes); for the CPU build set PIP_EXTRA_INDEX_URL to the index of PyTorch's CPU wheels"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: $(STAMP)   ## start a cluster, stream three answers, print their ledgers, stop
	$(BIN)/kvrelay demo

check: $(STAMP)  ## ruff, mypy, import-linter
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(STAMP)   ## every test that needs no GPU, two files at a time; TESTS_AT_ONCE=0: one
	$(BIN)/python -m tests.run --numprocesses=$(TESTS_AT_ONCE) --dist=loadfile --no-loadscope-reorder

test-long: $(STAMP)  ## the long versions of tests, which `make test` leaves out
	$(BIN)/python -m tests.run --long --numprocesses=$(TESTS_AT_ONCE) --dist=loadfile --no-loadscope-reorder

soak-sim: $(STAMP)  ## simulated clusters with every fault at any moment, new seeds; SOAK_MINUTES=60
	$(BIN)/python -m tests.sim.soak --minutes $(SOAK_MINUTES)

soak-inputs: $(STAMP)  ## 100,000 cases of any input to a router's APIs: no crash, no 5xx
	$(BIN)/python -m tests.inputs.soak --cases 100000

test-families: $(STAMP)  ## every causal family of transformers: its tokens, or a named refusal
	$(BIN)/pytest tests/families --numprocesses=$(TESTS_AT_ONCE)

test-clients: $(STAMP)  ## unmodified clients of others against a real cluster; installs them first
	$(BIN)/pytest tests/clients -m clients

test-gpu: $(STAMP)  ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

bench: $(STAMP)  ## the benchmarks of this machine, with their limits and peers
	$(BIN)/python -m bench.engine.speed
	$(BIN)/python -m bench.engine.agreement
	$(BIN)/python -m bench.engine.sampler
	$(BIN)/python -m bench.kvpool.collate
	$(BIN)/python -m bench.kvpool.codec_loss
	$(BIN)/python -m bench.kvpool.canary
	$(BIN)/python -m bench.serving.serve
	$(BIN)/python -m bench.serving.overload
	$(BIN)/python -m bench.serving.qos
	$(BIN)/python -m bench.changes.drain
	$(BIN)/python -m bench.changes.flips
	if command -v haproxy; then $(BIN)/python -m bench.changes.rolling; fi
	$(BIN)/python -m bench.kvpool.host_tier
	$(BIN)/python -m bench.engine.ranks.tensor
	$(BIN)/python -m bench.engine.ranks.pipeline
	$(BIN)/python -m bench.engine.loading
	$(BIN)/python -m bench.kvpool.directory
	$(BIN)/python -m bench.router.decisions
	$(BIN)/python -m bench.router.trace_request
	$(BIN)/python -m bench.router.metrics
	$(BIN)/python -m bench.router.wire
	$(BIN)/python -m bench.router.loop_lag
	$(BIN)/python -m bench.serving.prefix_live
	$(BIN)/python -m bench.transfer
	$(BIN)/python -m bench.transfer --handoff
	$(BIN)/python -m bench.transfer --profile build/handoff-cpu.json
	$(BIN)/python -m bench.transfer --steady 10000
	$(BIN)/python -m bench.transfer.checkpoint

chaos: $(STAMP)  ## faults under load for 20 minutes: what fails, what pauses, what is left
	$(BIN)/python -m bench.chaos --minutes 20

soak: $(STAMP)   ## 100,000 aborted requests in 30 minutes: nothing stays held, nothing grows
	$(BIN)/python -m bench.chaos.soak --minutes 30 --aborts 100000

figures: $(STAMP)  ## measure the figures of the README's table again (hours; bench-peers first)
	$(BIN)/python -m bench.figures

bench-peers: $(STAMP)  ## install the peer engines, each in its own environment
	$(PYTHON) -m bench.peers

bench-gpu: $(STAMP)  ## the benchmarks that need a CUDA device
	$(BIN)/python -m bench.engine.speed --device cuda
	$(BIN)/python -m bench.kvpool.collate --device cuda
	$(BIN)/python -m bench.transfer --device cuda
	$(BIN)/python -m bench.transfer --device cuda --handoff
	$(BIN)/python -m bench.transfer --device cuda --profile build/handoff-cuda.json

proto: $(STAMP)  ## regenerate the committed gRPC stubs
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto --pyi_out=proto proto/kvrelay/v1/*.proto
	rm proto/kvrelay/v1/counters_pb2_grpc.py proto/kvrelay/v1/peer_pb2_grpc.py proto/kvrelay/v1/pool_pb2_grpc.py  # messages only, no service

format: $(STAMP)  ## format and fix what ruff can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:           ## remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build *.egg-info
