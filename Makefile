# Two commands: `make report` (or `make report BOX=name`) and `make test`. Both set up the environment in .venv first, once.

PYTHON ?= python3
BOX ?= cpu-smollm2
PY = .venv/bin/python
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1
export DO_NOT_TRACK = 1

# The walk's stdout as it is, then the path of its report; a failed walk leaves a report too.
LAST_LINE = import json, sys; text = sys.stdin.read().rstrip(); print(text); print(json.loads(text.splitlines()[-1])["report"])

.PHONY: report test lab clean setup setup-test

report: setup
	@out=$$($(PY) -m fieldbook run "params/$(BOX).yml"); status=$$?; \
	[ -z "$$out" ] || printf '%s\n' "$$out" | $(PY) -c '$(LAST_LINE)' 2>/dev/null || \
	[ $$status -ne 0 ] || { echo "make report: the walk named no report" >&2; status=1; }; \
	exit $$status

test: setup-test
	$(PY) -m ruff check .
	@# The unit tests on two cores, file by file; servers one after the other, since they need both.
	$(PY) -m pytest -n 2 --dist loadfile tests/unit $(ARGS)
	$(PY) -m pytest tests/live $(ARGS)
	@# Strict: a recorded box gives the same outputs everywhere. Lax: a live walk, of which only the tagged cells are the same.
	@reports=$$(mktemp -d); export FIELDBOOK_REPORTS="$$reports"; \
	$(PY) -m pytest --nbval tests/golden/cpu-smollm2-replay && $(PY) -m pytest --nbval-lax tests/golden/cpu-smollm2-quick; \
	status=$$?; rm -rf "$$reports"; exit $$status

lab: setup
	cd notebooks && ../$(PY) -m jupyterlab --MultiKernelManager.default_kernel_name=fieldbook $(ARGS)

setup:
	@$(PYTHON) tools/setup_env.py

setup-test:
	@$(PYTHON) tools/setup_env.py --extras test

# Reports stay: they are what the user came for.
clean:
	rm -rf .venv .venv.lock .pytest_cache .ruff_cache build lib/*.egg-info data/models/cache
