"""`fieldbook serve` with real vLLM: what listens where, who may ask, what is written down, and what it says when a worker is killed.

Two servers run beside each other: one comes to serve and loses a worker then, the other loses one while it loads. Neither disturbs the other.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from fieldbook import patches, paths, processes, watching

pytestmark = pytest.mark.live

QUICK = paths.root() / "tests" / "params" / "quick.yml"
# From the evidence until it is named.
NAMED_S = 10
SECRETS = {"FIELDBOOK_TEST_KEY": "sk-test-key-that-must-not-be-seen", "HF_TOKEN": "hf_tokenthatmustnotbeseen1"}


def until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


class Serve:
    """A `fieldbook serve` of the quick box as a shell starts it."""

    def __init__(self, folder, *words):
        self.folder = folder
        folder.mkdir()
        self.out, self.err = (folder / "out").open("w+"), (folder / "err").open("w+")
        environment = {**os.environ, **SECRETS, "FIELDBOOK_REPORTS": str(folder / "reports")}
        command = [sys.executable, "-m", "fieldbook", "serve", str(QUICK), "--json", *words]
        self.process = subprocess.Popen(command, stdout=self.out, stderr=self.err, env=environment)

    def said(self):
        return (self.folder / "err").read_text()

    def document(self):
        """The one document on stdout, once it is whole."""
        try:
            return json.loads((self.folder / "out").read_text())
        except ValueError:
            return None

    def state_file(self):
        return next((self.folder / "reports").rglob("servers/server.json"), None)

    def session(self):
        """Pids of the server's processes by what they call themselves; empty before it runs."""
        file = self.state_file()
        state = json.loads(file.read_text()) if file else {}
        if state.get("status") != "running":
            return {}
        leader = processes.parse(state["server"])
        titles = {pid: watching.title_of(pid) for pid in processes.session_members(leader)}
        # What a worker starts has its title until it has become something else: the worker is the one whose parent has another.
        return {title: pid for pid, title in titles.items() if title != titles.get(processes.parent_of(pid))}

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


@pytest.fixture
def serve(tmp_path):
    made = []

    def start(name, *words):
        made.append(Serve(tmp_path / name, *words))
        return made[-1]

    yield start
    for one in made:
        one.end()
        one.out.close()
        one.err.close()


def listening(pids):
    return [c.laddr.ip for pid in pids for c in psutil.Process(pid).net_connections("inet") if c.status == "LISTEN"]


def test_a_server_that_serves_and_one_that_dies_beside_it(quick, serve):
    patches.apply(patches.vllm_tree(), "cpu-eager-pp")
    shared_before = set(os.listdir("/dev/shm"))
    good = serve("good", "--set", "server.api_key=$FIELDBOOK_TEST_KEY", "--set", "server.extra_env={HF_TOKEN: $HF_TOKEN}")
    bad = serve("bad")

    # Killed as soon as there is a worker to kill: it has not loaded its weights then.
    assert until(lambda: "VLLM::Worker_PP1" in bad.session(), 120), bad.said()
    # Seen by the supervisor once before it is gone.
    time.sleep(2)
    os.kill(bad.session()["VLLM::Worker_PP1"], 9)
    killed = time.monotonic()
    words = "VLLM::Worker_PP1 (process "
    assert until(lambda: words in bad.said(), NAMED_S) and time.monotonic() - killed < NAMED_S, bad.said()
    assert bad.process.wait(40) == 1 and "died: not for lack of memory" in bad.said(), bad.said()

    document = until(good.document, 180)
    assert document, good.said()
    assert document["bootlog"]["pool_tokens"] == 46_592 and document["refused"] == "" and document["escaped"] == []
    assert [phase for phase, _ in document["phases"]][-1] == "first token" and document["layers_per_stage"] == [15, 15]
    assert [(row["rank"], row["wrong"]) for row in document["live_code"]] == [(0, ""), (1, "")]

    # Only this machine reaches it, and only with the key.
    pids = good.session()
    assert set(listening(pids.values())) == {"127.0.0.1"}
    assert httpx.get(document["url"] + "/v1/models").status_code == 401
    key = {"Authorization": f"Bearer {SECRETS['FIELDBOOK_TEST_KEY']}"}
    assert httpx.get(document["url"] + "/v1/models", headers=key).status_code == 200
    command_lines = b" ".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids.values()).decode()
    assert not [secret for secret in SECRETS.values() if secret in command_lines]

    # A worker that is killed while it serves.
    os.kill(pids["VLLM::Worker_PP0"], 9)
    killed = time.monotonic()
    words = "fieldbook: serve: the server ended: VLLM::Worker_PP0"
    assert until(lambda: words in good.said(), NAMED_S) and time.monotonic() - killed < NAMED_S, good.said()
    assert good.process.wait(40) == 1

    for one in (good, bad):
        state = json.loads(one.state_file().read_text())
        assert state["status"] == "ended" and state["port_free"] is True and not processes.session_members(processes.parse(state["server"]))
        assert not Path(state["live"]).parent.exists(), "its temporary folder is left"
    assert set(os.listdir("/dev/shm")) <= shared_before
    for file in good.folder.parent.rglob("*"):
        if file.is_file():
            raw = file.read_bytes()
            assert not [secret for secret in SECRETS.values() if secret.encode() in raw], file
