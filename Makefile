# Two commands: `make report` (or `make report BOX=name`) and `make test`. Both set up the environment in .venv first, once.

PYTHON ?= python3
BOX ?= cpu-smollm2
PY = .venv/bin/python
export HF_HUB_OFFLINE = 1
export VLLM_NO_USAGE_STATS = 1
export DO_NOT_TRACK = 1

# The walk's stdout as it is, then the path of its report; a failed walk leaves a report too.
LAST_LINE = import json, sys; text = sys.stdin.read().rstrip(); print(text); print(json.loads(text.splitlines()[-1])["report"])

# Boxes that replay without a server; the two field reports and the H200 among them are what `make gallery` shows.
RECORDED = cpu-smollm2-replay a100-x8-glm53 cmp170hx-x3 h200-x1-replay

# Live tests that measure nothing and start no server.
BESIDE = tests/live/test_jupyterlab.py tests/live/test_patch_releases.py tests/live/test_patch_transport.py tests/live/test_site.py

.PHONY: report gallery test golden lab clean setup setup-test

report: setup
	@out=$$($(PY) -m fieldbook run "params/$(BOX).yml"); status=$$?; \
	[ -z "$$out" ] || printf '%s\n' "$$out" | $(PY) -c '$(LAST_LINE)' 2>/dev/null || \
	[ $$status -ne 0 ] || { echo "make report: the walk named no report" >&2; status=1; }; \
	exit $$status

# Two published field reports and a recorded run of an H200, walked without a GPU: what a finished report looks like.
gallery: setup
	@for box in cmp170hx-x3 a100-x8-glm53 h200-x1-replay; do $(PY) -m fieldbook run params/$$box.yml >/dev/null || exit 1; done; echo reports/index.html

# Makes the golden notebooks again and says cell by cell what changed.
golden: setup-test
	@$(PY) tools/golden.py $(ARGS)

test: setup-test
	$(PY) -m ruff check .
	@# The unit tests on two cores, file by file; servers one after the other, since they need both.
	$(PY) -m pytest -n 2 --dist loadfile -m "not bar" tests/unit $(ARGS)
	@# What only downloads, or looks at pages, side by side; `pytest -m bar` is for a quiet machine.
	$(PY) -m pytest -n 2 --dist loadfile -m "not bar" $(BESIDE) $(ARGS)
	$(PY) -m pytest tests/live -m "not bar" $(BESIDE:%=--ignore=%) $(ARGS)
	@# Strict: a recorded box gives the same outputs everywhere, two boxes at a time. Lax: a live walk, of which only the tagged cells are the same.
	@reports=$$(mktemp -d); export FIELDBOOK_REPORTS="$$reports"; \
	printf '%s\n' $(RECORDED) | xargs -P 2 -I BOX $(PY) -m pytest -q -p no:cacheprovider --nbval tests/golden/BOX && \
	$(PY) -m pytest --nbval-lax tests/golden/cpu-smollm2-quick; \
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
