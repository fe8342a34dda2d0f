# Everything a person or CI needs, one word each. `make help` lists it.
# Nothing outside .venv and outputs/ is written; deleting both gives a fresh machine back.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= $(shell for v in 3.11 3.12 3.13; do command -v python$$v >/dev/null && python$$v -c 'import venv, ensurepip' 2>/dev/null && { echo python$$v; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-$(shell cat requirements.lock requirements-test.lock pyproject.toml doctor/pyproject.toml 2>/dev/null | sha256sum | cut -c1-12)
BOOK := $(VENV)/.book-$(shell sha256sum docs/requirements.txt 2>/dev/null | cut -c1-12)
PROFILE ?=
PORT ?= 8888
JOBS ?=
NOTEBOOKS ?=
WORKERS ?= 2
KILLS ?= 200
SEED ?= 0
# nbval is for notebooks alone: to import it takes each process a second.
PYTEST = env OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:nbval -n $(WORKERS) --dist worksteal
DOCTOR = doctor/tests
export JUPYTER_PREFER_ENV_PATH := 1
export HF_HUB_DISABLE_TELEMETRY := 1
# Containers like to set it. Each of hundreds of processes would then compile all of our sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env run demo pitfalls lab book test test-doctor test-notebooks test-all torture refresh lint lock bench clean clean-env

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP)  ## set up .venv from requirements.lock and requirements-test.lock (once per lock)

$(STAMP):
	@test -n "$(PYTHON)" || { echo "make env: needs Python 3.11 to 3.13 with venv (Debian: apt-get install python3 python3-venv)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock -r requirements-test.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e ./doctor
	@rm -f $(VENV)/.stamp-*; touch $@

run: env  ## run every notebook headlessly, as many at once as fit; PROFILE=full or gpu, JOBS=1 for one by one
	$(BIN)/nblib run --all $(if $(PROFILE),--profile $(PROFILE)) $(if $(JOBS),--jobs $(JOBS))

demo: env  ## a minute: a frozen adapter, the check that names it, the doctor; ends with a page to open
	cd notebooks && ../$(BIN)/python -m lessons.demo

pitfalls: env  ## the catalogue of pitfalls, by symptom
	@cd notebooks && ../$(BIN)/python -m lessons.pitfalls

lab: env  ## open JupyterLab on 127.0.0.1 with its token; PORT=8888
	@$(BIN)/python -c "import socket,sys; s=socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1); e=s.connect_ex(('127.0.0.1',$(PORT))); sys.exit('make lab: port $(PORT) is in use on 127.0.0.1; choose another, e.g. make lab PORT=8899' if e==0 else 0)" || exit 2
	$(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --ServerApp.port=$(PORT) --ServerApp.port_retries=0 --ServerApp.root_dir=$(CURDIR) --LabApp.default_url=/lab/tree/notebooks/00_setup.ipynb $(if $(filter 0,$(shell id -u)),--allow-root)

book: env $(BOOK)  ## the notebooks and documents as a site with search: outputs/book/index.html
	$(BIN)/python -m sphinx -b html -c docs -d outputs/book-cache -q -W --keep-going . outputs/book
	@echo "open outputs/book/index.html"

$(BOOK):
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@rm -f $(VENV)/.book-*; touch $@

test: env  ## after each change, minutes: units, properties, parity, the doctor, hygiene of notebooks
	$(PYTEST) -m "not slow and not base and not kernel and not browser and not gpu"

test-doctor: env  ## the tests of the doctor alone, with every program of its bench
	$(PYTEST) $(DOCTOR)

test-notebooks: env  ## run notebooks again and compare their checked cells: those changed since BASE=HEAD, or NOTEBOOKS="01 10"
	$(BIN)/python tests/validate.py $(NOTEBOOKS)

test-all: env $(BOOK)  ## before a merge: everything; ends with the ten slowest (tests/run_all.py)
	$(BIN)/python tests/run_all.py --workers $(WORKERS)

torture: env  ## kill any process at any time, go on, compare with runs that nobody killed; KILLS=200 SEED=0 ONLY=13
	$(BIN)/python tests/torture.py --kills $(KILLS) --seed $(SEED) $(if $(ONLY),--only '$(ONLY)') --json outputs/torture.json

refresh: env  ## re-execute notebooks on their defaults and store the outputs: all, or NOTEBOOKS="00 10"
	$(BIN)/python -m nbworkbook.refresh $(NOTEBOOKS)

lint: env  ## ruff over code and notebooks: rules and layout
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# What a run needs, and what only tests need. torch's own wheel pins its CUDA packages; listing them here would install
# gigabytes beside a CPU build.
COMPILE = uv pip compile --universal --no-header --no-annotate --python-version 3.11 -q pyproject.toml
RUN = --extra workbook --extra data --extra four-bit --extra adapters
lock:  ## write requirements.lock and requirements-test.lock again from pyproject.toml (needs uv)
	$(COMPILE) $(RUN) --constraint <(echo torch==2.13.0) | grep -vE '^(cuda-|nvidia-[^m]|triton)' > requirements.lock
	$(COMPILE) $(RUN) --extra test --constraint requirements.lock | grep -vE '^(cuda-|nvidia-[^m]|triton)' | grep -vxFf requirements.lock > requirements-test.lock

bench: env  ## throughput and memory against the HF Trainer and a bare loop (minutes)
	$(BIN)/python tests/benchmarks.py

clean:  ## delete runs (not the base model, not corpora, not published results)
	find outputs -mindepth 1 -maxdepth 1 ! -name README.md ! -name published ! -name base ! -name corpora -exec rm -rf {} +

clean-env:  ## delete .venv, caches and the stored base model
	rm -rf $(VENV) outputs/base .pytest_cache .ruff_cache *.egg-info
