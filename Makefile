# `make demo` and `make test` need Python 3.11 to 3.13, pip and make; everything else they fetch themselves.
PYTHON ?= python3
VENV ?= .venv
OUT ?= runs/demo
# Sizes of the demo: trajectories traced, problems compared.
TRACES ?= 64
PROBLEMS ?= 32
# Processes that run the tests.
WORKERS ?= 2

PY := $(VENV)/bin/python
# A changed size or backbone makes the demo's traces anew instead of stopping it.
STORE := trace.shard_size=32 trace.replace=true
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-slow lint clean

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else f"need Python 3.11 to 3.13, this is {v[0]}.{v[1]}: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

demo: $(INSTALLED)
	$(PY) trace_gen/generate.py trace=masked trace.limit=$(TRACES) trace.out=$(OUT)/masked $(STORE)
	$(PY) train/lbs.py reuse=true trace.limit=$(TRACES) trace.out=$(OUT)/masked $(STORE) out=$(OUT)/lbs
	$(PY) trace_gen/generate.py trace=replay trace.limit=$(TRACES) trace.out=$(OUT)/replay $(STORE) router.lbs=$(OUT)/lbs/export
	$(PY) train/lps.py reuse=true trace.limit=$(TRACES) trace.out=$(OUT)/replay $(STORE) router.lbs=$(OUT)/lbs/export out=$(OUT)/lps
	$(PY) eval/compare.py reuse=true 'methods=[sequential,threshold,lbs,lps,eb_decode,oracle]' limit=$(PROBLEMS) router.lbs=$(OUT)/lbs/export router.lps=$(OUT)/lps/export out=$(OUT)/compare
	@echo "routers:  $(OUT)/lbs/export  $(OUT)/lps/export"
	@echo "pictures: $(OUT)/compare/accuracy.png  $(OUT)/compare/commit_steps.png"

test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile

test-slow: $(INSTALLED)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow

lint: $(INSTALLED)
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) runs outputs multirun
