# make demo   train on a Megatron dataset made from the Python standard library, stop, resume
# make test   the tests
# make help   the rest

PYTHON ?=
VENV := .venv
REFERENCE := .venv-reference
RUN := $(VENV)/bin/python
JOBS ?= 2

.PHONY: help demo test test-long test-reference lint docs install install-reference clean

help:
	@echo "make demo              tokenize, build indices, train 20 steps on the CPU with a resume (first time: a few minutes)"
	@echo "make test              unit and integration tests"
	@echo "make test-long         faults and fuzzing for longer (20 minutes; as root also full and read-only disks)"
	@echo "make test-reference    live comparison with megatron-core (needs Python 3.11; installs torch and megatron-core)"
	@echo "make lint              ruff and pyrefly"
	@echo "make docs              HTML documentation in docs/_build"
	@echo "make install           only the environment $(VENV); PYTHON=/path/to/python chooses another Python >= 3.12"
	@echo "make clean             remove environments, builds and the demo's output"

demo: install
	$(RUN) end_to_end/demo.py

test: install
	$(RUN) -m pytest -q -n $(JOBS) --dist=worksteal tests/unit tests/integration

test-long: install
	FAULT_ROUNDS=100 FUZZ_SECONDS=$${FUZZ_SECONDS:-600} HYPOTHESIS_PROFILE=long $(RUN) -m pytest -q tests/faults \
	  tests/unit/mmap_guard_test.py tests/unit/mmap_faults_test.py tests/unit/mmap_fuzz_test.py \
	  tests/integration/mapped_file_test.py tests/unit/kda_*_test.py tests/integration/kda_*_test.py

test-reference: install-reference
	HF_HUB_OFFLINE=1 $(REFERENCE)/bin/python -m pytest -q -p no:cacheprovider tests/reference -o python_files='*_reference.py'

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pyrefly check

docs: install
	$(RUN) -m pip install -q -c constraints.txt -e '.[docs]'
	$(RUN) -m sphinx -W -b html docs docs/_build/html

install: $(VENV)/installed

$(VENV)/installed: pyproject.toml constraints.txt hatch_build.py
	@python=$$(PYTHON="$(PYTHON)" sh tools/find_python.sh 3.12 3.13 3.14) || exit 1; \
	echo "Installing into $(VENV) with $$python"; \
	test -x $(RUN) || "$$python" -m venv $(VENV)
	$(RUN) -m pip install -q -c constraints.txt -e '.[test]'
	@touch $@

install-reference: $(REFERENCE)/installed

$(REFERENCE)/installed: tests/reference/requirements.txt
	@python=$$(PYTHON="$(REFERENCE_PYTHON)" sh tools/find_python.sh 3.11) || exit 1; \
	test -x $(REFERENCE)/bin/python || "$$python" -m venv $(REFERENCE)
	$(REFERENCE)/bin/python -m pip install -q -r tests/reference/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) $(REFERENCE) build dist docs/_build demo_output .pytest_cache .ruff_cache .hypothesis
