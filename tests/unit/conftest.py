"""What several unit tests need: the live default box as a dictionary, and a way to run the command line in this process."""

import contextlib
import copy
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from fieldbook import params as params_module
from fieldbook import paths, processes, show
from fieldbook.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
DEFAULT_BOX = yaml.safe_load((ROOT / "params" / "cpu-smollm2.yml").read_text())


@pytest.fixture(autouse=True)
def at_root(monkeypatch):
    """The checkout under test is the one these tests lie in, whatever the environment says; no server belongs to another's walk."""
    monkeypatch.setenv("FIELDBOOK_ROOT", str(ROOT))
    for name in ("FIELDBOOK_OWNER", "FIELDBOOK_NESTED", "FIELDBOOK_REPORTS", "FIELDBOOK_MODEL_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sections():
    """The sections of params/cpu-smollm2.yml, free to change."""
    return copy.deepcopy(DEFAULT_BOX)


@pytest.fixture
def changed():
    """Params of the default box with some keys changed: changed({'engine.max_model_len': 2000})."""

    def make(changes=None):
        document = copy.deepcopy(DEFAULT_BOX)
        for dotted, value in (changes or {}).items():
            *way, last = dotted.split(".")
            place = document
            for part in way:
                place = place.setdefault(part, {})
            place[last] = value
        return params_module.validate(document, "test")

    return make


@pytest.fixture
def command(capsys):
    """Run one fieldbook command here: (exit status, stdout, stderr)."""

    def run(*words):
        capsys.readouterr()
        try:
            status = main([str(word) for word in words])
        except SystemExit as leaving:
            status = leaving.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def spawned():
    """Start processes that are killed at the end of the test, with their whole session."""
    started = []

    def start(argv, **options):
        process = subprocess.Popen([str(word) for word in argv], start_new_session=True, **options)
        started.append(process)
        return process

    yield start
    for process in started:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if os.getsid(int(entry.name)) == process.pid:
                        os.kill(int(entry.name), 9)
                except (ProcessLookupError, PermissionError):
                    pass
        process.kill()
        process.wait()


@pytest.fixture
def supervised(spawned, tmp_path, monkeypatch):
    """Start supervisors with a server of ours. The temporary folder of one that a test kills goes with the test's."""
    from fakeserver import Supervised

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    made = []

    def start(**options):
        made.append(Supervised(spawned, tmp_path, **options))
        return made[-1]

    yield start
    for one in made:
        if text := one.state().get("server"):
            processes.end_session(processes.parse(text), 0)
        # A supervisor that is killed could not tidy up.
        until(lambda one=one: one.supervisor.poll() is not None)


def until(condition, timeout_s=8.0):
    """Wait for a condition; its last value."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.03)
    return value


def guide(name):
    """docs/<name>.md with every run of white space a single blank, so that what it says is found wherever its lines end."""
    return " ".join((ROOT / "docs" / f"{name}.md").read_text().split())


def least_seconds(call, below, refusal=None):
    """CPU seconds of the first call that takes less than `below`, else the least of the tries.

    On a borrowed core stolen time counts as ours, and so does a garbage collection of the whole session: once is no proof of slowness.
    """
    taken = []
    for _ in range(3):
        start = time.process_time()
        with contextlib.suppress(*[refusal] if refusal else []):
            call()
        taken.append(time.process_time() - start)
        if taken[-1] < below:
            break
    return min(taken)


def runs(pid):
    """True while a process with this pid runs and is not a zombie. Read from /proc here, so that the library is not its own witness."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def python(code, *arguments):
    """argv of a Python one-off."""
    return [sys.executable, "-c", code, *map(str, arguments)]


def walk_in_process(box, folder):
    """The run folder of a recorded box: the notebooks' own cells run here, without kernels and charts. box: its params."""
    folder.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIELDBOOK_ROOT", str(ROOT))
        patch.setattr(show, "chart", lambda *_: None)
        patch.setattr(show, "drawing", lambda *_: None)
        (folder / "params.yml").write_text(yaml.safe_dump(box.model_dump(), sort_keys=False))
        for name in paths.STATIONS:
            document = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
            cells = ["".join(cell["source"]) for cell in document["cells"] if cell["cell_type"] == "code"]
            space = {**box.model_dump(), "run_dir": str(folder)}
            with contextlib.redirect_stdout(io.StringIO()):
                for source in cells[1:]:
                    exec(source, space)
    return folder
