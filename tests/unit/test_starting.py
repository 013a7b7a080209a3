"""A start that goes wrong is named soon and for what it is, its server is gone, and no secret of the environment reaches a file."""

import http.server
import json
import mmap
import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, python, runs, until
from fakeserver import FAKE

from fieldbook import diagnosis, onewalk, processes, secrecy, server, sharedmemory, starting, watching
from fieldbook.command import CommandLine
from fieldbook.errors import BadInput, FieldbookError, GateFailed
from fieldbook.logcopy import LogCopy

# Longer than any of these faults may take to be named: evidence and ten seconds.
SOON_S = 10


def failure(one, timeout_s=60, since=None):
    """What wait_ready says, and how long after the evidence."""
    since = since or time.monotonic()
    with pytest.raises(GateFailed) as failed:
        starting.wait_ready(one.state_file, timeout_s)
    named_s = time.monotonic() - since
    state = one.state()
    assert state["status"] == "ended" and not [pid for pid in [processes.parse(state["server"]).pid] if runs(pid)]
    text = str(failed.value)
    assert "\n" not in text and text.startswith(f"server {one.state_file.stem} did not start: ")
    return text, named_s


def test_a_server_that_dies_while_loading(supervised):
    said, named_s = failure(supervised(argv=["sh", "-c", "echo 'INFO 11-29 10:00:01 [x.py:1] Starting to load model'; sleep 1; exit 3"]))
    assert "the server ended by itself with status 3" in said and named_s < SOON_S


@pytest.mark.parametrize(("number", "cause"), [(signal.SIGILL, "more instructions"), (signal.SIGSEGV, "native code"), (signal.SIGKILL, "somebody killed it")])
def test_a_server_that_a_signal_ends(supervised, number, cause):
    said, named_s = failure(supervised(argv=["sh", "-c", f"sleep 1; kill -{int(number)} $$"]))
    assert f"killed by {number.name}" in said and cause in said and named_s < SOON_S


def test_a_server_that_hangs_while_it_starts(supervised):
    one = supervised(argv=["sh", "-c", "echo 'INFO 11-29 10:00:01 [x.py:1] Starting to load model'; exec sleep 300"], stall_timeout_s=3)
    said, named_s = failure(one)
    assert "it hangs: it came to 'ranks up, loading weights' and for 3 s has logged, computed and read nothing" in said and named_s < 3 + SOON_S


BUSY = (
    "while True: pass",
    "import time\nwhile True: open('/bin/sh', 'rb').read(); time.sleep(0.2)",
    "import time\nwhile True: print('.', flush=True); time.sleep(1)",
)


@pytest.mark.parametrize("busy", BUSY, ids=["computes", "reads", "logs"])
def test_a_server_that_does_something_is_not_taken_for_one_that_hangs(supervised, busy):
    said, _ = failure(supervised(argv=python(busy), stall_timeout_s=2), timeout_s=6)
    assert "not ready after 6 s" in said


def test_a_stopped_process_is_named(supervised):
    one = supervised().up()
    os.kill(one.worker, signal.SIGSTOP)
    stopped = time.monotonic()
    # Its fake API server answers all the same; a real one waits for the worker.
    one.state_file.write_text(json.dumps({**one.state(), "port": 1}))
    said, named_s = failure(one, since=stopped)
    assert f"sleep (process {one.worker}) is stopped by a signal" in said and named_s < SOON_S


def test_a_worker_that_dies_is_named_with_what_the_memory_says(supervised):
    named = FAKE.replace('["sleep", "300"]', '["VLLM::Worker_PP1", "300"], executable="/bin/sleep"')
    code = named.replace("httpd.serve_forever()", "time.sleep(300)")
    one = supervised(argv=python(code, 0)).up()
    assert until(lambda: watching.title_of(one.worker) == "VLLM::Worker_PP1")
    time.sleep(2 * 0.5)
    os.kill(one.worker, signal.SIGKILL)
    said, named_s = failure(one)
    assert f"VLLM::Worker_PP1 (process {one.worker}) died: not for lack of memory" in said and "GiB of host memory free" in said
    assert named_s < SOON_S


ANSWERS = [
    (500, "no\nway", "answered with status 500: no way"),
    (401, '{"error": "Unauthorized"}', "answered with status 401"),
    (200, " ", "status 200 and no JSON object"),
    (200, "[]", "status 200 and no JSON object"),
    (200, "{}", "was asked for one token and answered with None"),
    (200, '{"choices": [], "usage": {"completion_tokens": 1}}', "was asked for one token"),
    (200, '{"choices": [{}], "usage": {"completion_tokens": 0}}', "answered with 0"),
    (200, '{"choices": [{}], "usage": [1]}', "answered with None"),
]


@pytest.fixture
def answering():
    """An HTTP server of this process whose next answer is set: (its state, set)."""
    told = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            body = told["body"].encode()
            self.send_response(told["status"])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    yield {"name": "x", "model": "m", "port": httpd.server_address[1]}, told.update
    httpd.shutdown()
    httpd.server_close()


CREW = """
import os, subprocess, sys, time
def start(name):
    return subprocess.Popen([name, "300"], executable="/bin/sleep").pid
first, second = start("VLLM::Worker_PP0"), start("VLLM::Worker_PP1")
print("worker", first, second, flush=True)
print("(APIServer pid=1) INFO:     Application startup complete.", flush=True)
# As vLLM does: when one is gone, the others are told to end, which takes them some time.
os.wait()
time.sleep(0.3)
os.kill(first, 9)
time.sleep(300)
"""


def test_of_several_deaths_the_first_is_named(supervised):
    one = supervised(argv=python(CREW))
    assert until(lambda: one.log.is_file() and "complete" in one.log.read_text())
    second = int(one.log.read_text().split()[2])
    time.sleep(3 * 0.5)
    os.kill(second, signal.SIGKILL)
    assert until(lambda: len(one.state()["lost"]) == 2)
    assert [lost["process"] for lost in one.state()["lost"]] == ["VLLM::Worker_PP1", "VLLM::Worker_PP0"]


def test_a_worker_caught_while_it_is_being_killed_is_lost_all_the_same(monkeypatch):
    # A killed process is listed for some moments after its memory, and with it its title, is gone.
    leader = processes.identify(os.getpid())
    titles = {11: "VLLM::EngineCore", 12: "VLLM::Worker_PP0", 13: "VLLM::Worker_PP1"}
    monkeypatch.setattr(watching, "title_of", lambda pid: titles.get(pid, ""))
    monkeypatch.setattr(processes, "parent_of", lambda pid: 11 if pid > 11 else 1)
    crew = watching.Crew(leader)
    assert crew.lost([11, 12, 13]) == []
    titles[13] = ""
    assert crew.lost([11, 12, 13]) == []
    assert [(one["process"], one["pid"]) for one in crew.lost([11, 12])] == [("VLLM::Worker_PP1", 13)]
    assert crew.lost([11, 12]) == []


def test_what_has_its_starters_older_name_is_no_worker(monkeypatch):
    titles = {11: "VLLM::EngineCore", 12: "VLLM::Worker_PP0", 14: "VLLM::Worker"}
    monkeypatch.setattr(watching, "title_of", lambda pid: titles.get(pid, ""))
    monkeypatch.setattr(processes, "parent_of", lambda pid: {11: 1, 12: 11, 14: 12}[pid])
    crew = watching.Crew(processes.identify(os.getpid()))
    assert crew.lost([11, 12, 14]) == [] and crew.lost([11, 12]) == []


SHORT = """
import ctypes, os, subprocess, sys, time
# A worker as vLLM has it: a title of its own. What it starts is a copy of it until it has become something else.
os.execv("/bin/bash", ["VLLM::Worker_PP0", "-c", "echo complete; for i in $(seq 200); do (sleep 0.01); done; sleep 300"])
"""


def test_what_a_worker_starts_and_ends_is_no_loss(supervised):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHORT!r}])"
    one = supervised(argv=python(code))
    assert until(lambda: one.log.is_file() and "complete" in one.log.read_text())
    time.sleep(4)
    assert one.state()["status"] == "running" and one.state()["lost"] == []


@pytest.mark.parametrize(("status", "body", "words"), ANSWERS)
def test_an_answer_without_a_token_is_none(answering, status, body, words):
    state, answer = answering
    answer(status=status, body=body)
    with pytest.raises(GateFailed) as failed:
        server.first_token(state, 5)
    assert words in str(failed.value) and "\n" not in str(failed.value)
    answer(status=200, body='{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}')
    server.first_token(state, 5)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FAKE_STATUS": "500", "FAKE_ANSWER": "no\nway"}, "answered with status 500: no way"),
        ({"FAKE_STATUS": "0"}, "it hangs: it was asked for a token and for 3 s has logged, computed and read nothing"),
    ],
)
def test_a_server_that_says_it_is_healthy_and_gives_no_token(supervised, environment, words):
    said, named_s = failure(supervised(env=environment, stall_timeout_s=3))
    assert words in said and named_s < 3 + SOON_S


def test_health_that_is_an_error_is_named(supervised):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    sick = FAKE.replace("self.send_response(200)", "self.send_response(503)", 1)
    said, named_s = failure(supervised(argv=python(sick, port), port=port))
    assert "/health answers with status 503" in said and named_s < SOON_S


def test_without_the_first_token_health_is_enough(supervised):
    one = supervised(env={"FAKE_STATUS": "500"})
    _, phases = starting.wait_ready(one.state_file, 20, first_token=False)
    assert "first token" not in dict(phases) and "healthy" in dict(phases)


def test_after_the_stop_the_port_is_free_and_that_is_kept(supervised):
    one = supervised().up()
    assert not watching.port_is_free(one.port)
    ended = server.stop(one.state_file)
    assert ended["port_free"] is True and ended["device_memory_free"] is None and watching.port_is_free(one.port)
    # Nothing of the supervisor is left either, its second watcher included.
    assert not [p for p in Path("/proc").iterdir() if p.name.isdigit() and str(one.state_file).encode() in _cmdline(p)]


def _cmdline(process):
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_checkpoint_in_shared_memory_stays_and_what_the_server_made_goes(supervised, tmp_path):
    folder = Path(f"/dev/shm/fieldbook-test-{os.getpid()}")
    folder.mkdir()
    kept = [folder / "model.safetensors", Path(f"/dev/shm/fieldbook-before-{os.getpid()}")]
    made = Path(f"/dev/shm/fieldbook-made-{os.getpid()}")
    code = f"""
import mmap, time
held = []
for name in {[str(f) for f in (*kept, made)]!r}:
    file = open(name, "a+b"); file.truncate(4096); held.append(mmap.mmap(file.fileno(), 4096))
print("complete", flush=True)
time.sleep(300)
"""
    try:
        for file in kept:
            file.write_bytes(b"x" * 4096)
        one = supervised(argv=python(code))
        assert until(lambda: one.log.is_file() and "complete" in one.log.read_text())
        time.sleep(1.5)
        server.stop(one.state_file)
        assert all(file.is_file() for file in kept) and not made.exists()
    finally:
        for file in (*kept, made):
            file.unlink(missing_ok=True)
        folder.rmdir()


def test_a_full_disk_does_not_stop_the_server(tmp_path):
    reads, writes = os.pipe()
    copy = LogCopy(reads, Path("/dev/full"), ())
    for _ in range(64):
        os.write(writes, b"line\n" * 1000)
    os.close(writes)
    copy.finish()
    assert copy.lost_bytes == 64 * 5000


def test_a_long_line_is_not_cut_within_a_secret(tmp_path):
    secret = "planted-secret-of-some-length"
    for offset in range(0, 40, 3):
        reads, writes = os.pipe()
        copy = LogCopy(reads, tmp_path / f"log{offset}", (secret,))
        text = ("x" * (65536 - offset) + secret + "y" * 70000 + secret).encode()
        for at in range(0, len(text), 4096):
            os.write(writes, text[at : at + 4096])
        os.close(writes)
        copy.finish()
        assert (tmp_path / f"log{offset}").read_text() == "x" * (65536 - offset) + "***" + "y" * 70000 + "***"


def test_a_start_that_is_given_up_leaves_no_server(supervised):
    one = supervised(argv=["sleep", "300"])
    assert until(lambda: one.state()["status"] == "running")
    pid = processes.parse(one.state()["server"]).pid

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(2)
    with pytest.raises(KeyboardInterrupt):
        starting.wait_ready(one.state_file, 60)
    assert not runs(pid) and one.state()["status"] == "ended"


def test_an_interrupt_while_a_token_is_awaited_is_not_held_up(supervised):
    one = supervised(env={"FAKE_STATUS": "0"}, stall_timeout_s=60).up()

    def interrupt(*_):
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(4)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        starting.wait_ready(one.state_file, 60)
    assert time.monotonic() - started < 15 and one.gone()


def test_a_start_that_cannot_be_made_says_why_and_leaves_nothing(supervised, monkeypatch, tmp_path):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    one = supervised(argv=["sleep", "a\0b"])
    said, named_s = failure_without_server(one)
    assert "it cannot be started: embedded null byte" in said and named_s < SOON_S
    assert until(lambda: not list((tmp_path / "temporary").iterdir()))


def failure_without_server(one):
    start = time.monotonic()
    with pytest.raises(GateFailed) as failed:
        starting.wait_ready(one.state_file, 60)
    assert one.state()["status"] == "ended" and one.state()["server"] is None
    return str(failed.value), time.monotonic() - start


def test_a_proxy_of_the_environment_is_not_asked(supervised, monkeypatch):
    # Nobody listens there: whoever asked it would get no answer.
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    one = supervised()
    starting.wait_ready(one.state_file, 20)
    assert server.find(one.state_file, "smollm2-135m-instruct")


# Secrets.

PLANTED = {"HF_TOKEN": "hf_plantedplantedplanted", "MY_PASSWORD": "correct horse battery", "SERVER_KEY": "sk-planted-planted-planted"}
TALKATIVE = """
import os, sys, time
print("token", os.environ["HF_TOKEN"], "key", os.environ.get("VLLM_API_KEY"), os.environ["MY_PASSWORD"], flush=True)
# Put together here, since the state file has this text.
hidden, bearer = "ge" + "heim", "abcdefg" + "hijklm"
sys.stderr.write(f"https://me:{hidden}@host/x?token={hidden}2 Authorization: Bearer {bearer}\\r"); sys.stderr.flush()
print("x" * 70000, os.environ["HF_TOKEN"], end="", flush=True)
time.sleep(300)
"""


def test_secrets_of_the_environment_reach_no_file(supervised, monkeypatch, tmp_path):
    for name, value in PLANTED.items():
        monkeypatch.setenv(name, value)
    one = supervised(argv=python(TALKATIVE), env={"HF_TOKEN": "$HF_TOKEN", "VLLM_API_KEY": "$SERVER_KEY"}, api_key="$SERVER_KEY")
    assert until(lambda: one.log.is_file() and one.log.stat().st_size > 70000)
    assert server.headers(one.state()) == {"Authorization": f"Bearer {PLANTED['SERVER_KEY']}"}
    server.stop(one.state_file)
    text = one.log.read_text()
    assert text.startswith("token *** key *** ***\n") and "https://***@host/x?*** Authorization: Bearer ***" in text
    for file in tmp_path.rglob("*"):
        if file.is_file():
            raw = file.read_bytes()
            assert not [secret for secret in (*PLANTED.values(), "geheim", "abcdefghijklm") if secret.encode() in raw], file
    assert json.loads(one.state_file.read_text())["env"]["VLLM_API_KEY"] == "$SERVER_KEY"


def test_a_secret_that_is_not_set_is_one_line_before_anything_starts(changed, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    box = changed({"model.path": str(model), "server.extra_env": {"HF_TOKEN": "$NOT_SET_ANYWHERE"}})
    with pytest.raises(BadInput, match=r"server.extra_env.HF_TOKEN: \$NOT_SET_ANYWHERE is not set"):
        server.launch(box, box.parallel, (15, 15), tmp_path, "x")
    assert not (tmp_path / "servers").exists()


def test_what_is_shown_of_a_command_holds_no_secret():
    words = ("/usr/bin/python", "-m", "x", "--hf-token", "geheim", "--url=http://a:geheim@b")
    command = CommandLine(words, {"A_KEY": "$A_KEY", "B_TOKEN": "geheim", "C": "c d"})
    assert "geheim" not in command.shown() and "geheim" not in json.dumps(command.document())
    assert 'A_KEY="$A_KEY"' in command.shown() and command.document()["env"]["A_KEY"] == "$A_KEY" and command.document()["argv"][4] == "***"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("http://user:pass@host:80/", "http://***@host:80/"),
        ("see https://host/a?b=1&api_key=xyz&c=2", "see https://host/a?b=1&***&c=2"),
        ("Authorization: Bearer abcdefgh1234", "Authorization: Bearer ***"),
        ("hf_abcdefghijklmnopqrst", "***"),
        # None of these is one.
        ("http://host:8000/v1", "http://host:8000/v1"),
        ("tcp://127.0.0.1:51234", "tcp://127.0.0.1:51234"),
        ("max_num_batched_tokens=2048 token 5", "max_num_batched_tokens=2048 token 5"),
        ("sk-learn", "sk-learn"),
    ],
)
def test_forms_of_secrets(text, left):
    assert secrecy.scrubbed(text, ()) == left and secrecy.has_form_of_secret(text) == (text != left)


def test_names_of_secrets():
    for name in ("HF_TOKEN", "--api-key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "--hf-token"):
        assert secrecy.is_secret(name), name
    for name in ("--max-num-batched-tokens", "TOKENIZERS_PARALLELISM", "--tokenizer", "PATH", "VLLM_PP_LAYER_PARTITION", "--max-logprobs"):
        assert not secrecy.is_secret(name), name


# What is left over in a shell.


def test_variables_that_the_params_decide_are_not_inherited(supervised, monkeypatch):
    for name, value in {"VLLM_PP_LAYER_PARTITION": "1,29", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_API_KEY": "leftover-key"}.items():
        monkeypatch.setenv(name, value)
    code = "import os; print([k for k in sorted(os.environ) if k in ('VLLM_PP_LAYER_PARTITION', 'VLLM_USE_V2_MODEL_RUNNER', 'VLLM_API_KEY')])"
    one = supervised(argv=python(code), env={"VLLM_USE_V2_MODEL_RUNNER": "1"})
    assert until(lambda: one.state()["status"] == "ended") and one.log.read_text() == "['VLLM_USE_V2_MODEL_RUNNER']\n"


# How a process ended, without a word in its log.


ENDS = [
    (-4, 0, "wrong-processor-build"), (132, 0, "wrong-processor-build"), (-11, 0, "crash-in-native-code"), (139, 0, "crash-in-native-code"),
    (-7, 0, "shared-memory-full"), (-9, 1, "out-of-host-memory"), (137, 0, "killed-from-outside"), (1, 0, "none"), (0, 0, "none"),
    (None, 2, "out-of-host-memory"),
]  # fmt: skip


@pytest.mark.parametrize(("status", "oom", "cause"), ENDS)
def test_cause_by_the_exit_status(status, oom, cause):
    assert diagnosis.diagnose_end("INFO 11-29 10:00:01 [x.py:1] fine\n", status, oom, 5 * 2**30).cause == cause


def test_the_log_goes_before_the_exit_status(command, tmp_path):
    log = "ValueError: sum(partitions)=77 does not match num_hidden_layers=78.\n"
    assert diagnosis.diagnose_end(log, -9, 1).cause == "partition-sum"
    file = tmp_path / "log"
    file.write_text("INFO 11-29 10:00:01 [x.py:1] fine\n")
    status, out, _ = command("diagnose", file, "--exit-status", "-4", "--json")
    assert status == 0 and json.loads(out)["cause"] == "wrong-processor-build"
    assert command("diagnose", file, "--exit-status", "137")[1].startswith("killed-from-outside")


# Two walks at once.


def test_a_second_walk_waits_for_the_first(spawned, monkeypatch):
    monkeypatch.setattr(onewalk, "NAME", f"\0fieldbook-test-{os.getpid()}")
    monkeypatch.setattr(onewalk, "POLL_S", 0.1)
    code = f"""
import sys, time
sys.path.insert(0, {str(ROOT / "lib")!r})
from fieldbook import onewalk
onewalk.NAME = {onewalk.NAME!r}
with onewalk.alone(print):
    print("alone", flush=True)
    time.sleep(float(sys.argv[1]))
"""
    assert onewalk.running() is None
    first = spawned(python(code, 2), stdout=-1, text=True)
    assert first.stdout.readline() == "alone\n" and onewalk.running() == first.pid
    said, started = [], time.monotonic()
    with onewalk.alone(said.append):
        assert time.monotonic() - started > 0.5 and onewalk.running() == os.getpid()
    assert len(said) == 1 and f"(process {first.pid})" in said[0] and onewalk.running() is None


def test_a_walk_may_be_asked_for_again_and_again(monkeypatch):
    monkeypatch.setattr(onewalk, "NAME", f"\0fieldbook-test-{os.getpid()}")
    with onewalk.alone(print):
        assert {onewalk.running() for _ in range(200)} <= {os.getpid(), 0}
    assert onewalk.running() is None


def test_a_walk_that_waits_can_be_interrupted(monkeypatch):
    monkeypatch.setattr(onewalk, "NAME", f"\0fieldbook-test-{os.getpid()}")
    with onewalk.alone(print), pytest.raises(FieldbookError, match="interrupted by SIGTERM while waiting"):
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.alarm(1)
        with onewalk.alone(lambda text: None):
            pass


def test_shared_memory_made_just_before_the_end_goes_as_well():
    shared, name = sharedmemory.Shared(), f"fieldbook-late-{os.getpid()}"
    with open(f"/dev/shm/{name}", "wb+") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            shared.look([os.getpid()])  # too soon after the look before
            shared.remove()
            assert name in os.listdir("/dev/shm")
            shared.look([os.getpid()], at_once=True)
    shared.remove()
    assert name not in os.listdir("/dev/shm")
