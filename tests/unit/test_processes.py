"""Processes and the supervisor, with real process trees and a small server of our own in vLLM's place."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from conftest import python, runs, until
from fakeserver import FAKE

from fieldbook import processes, server, starting
from fieldbook.command import CommandLine
from fieldbook.errors import BadInput, GateFailed

# A leader that starts a child, which starts a grandchild. The grandchild loses its parent, renames itself, and ignores SIGTERM if asked.
TREE = """
import ctypes, os, signal, sys, time
deaf = "deaf" in sys.argv
if deaf:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
read, write = os.pipe()
if os.fork() == 0:
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"VLLM::) R 1 (Wo", 0, 0, 0)
        os.write(write, f"{os.getpid()}\\n".encode())
        time.sleep(300)
    time.sleep(0.1)
    os._exit(0)
orphan = os.read(read, 100).decode().strip()
os.wait()
print(os.getpid(), orphan, flush=True)
time.sleep(300)
"""


@pytest.fixture
def tree(spawned):
    def start(*words):
        leader = spawned(python(TREE, *words), stdout=subprocess.PIPE, text=True)
        pid, orphan = map(int, leader.stdout.readline().split())
        assert pid == leader.pid
        return leader, orphan

    return start


def test_identify_tells_a_process_by_its_start_time(spawned):
    process = spawned(["sleep", "100"])
    found = processes.identify(process.pid)
    # Start time from the boot clock, as ps computes it.
    ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    assert found == processes.ProcessId(process.pid, ticks) and processes.is_alive(found)
    assert abs(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")) < 10
    assert processes.parse(str(found)) == found
    process.kill()
    until(lambda: not runs(process.pid))
    # A zombie, not waited for yet, runs no more.
    assert processes.identify(process.pid) is None and not processes.is_alive(found)
    process.wait()
    assert processes.identify(process.pid) is None


def test_a_reused_pid_is_someone_else(spawned):
    process = spawned(["sleep", "100"])
    now = processes.identify(process.pid)
    earlier = processes.ProcessId(process.pid, now.start_ticks - 1)
    assert not processes.is_alive(earlier) and processes.session_members(earlier) == []
    processes.end_session(earlier, 0.1)
    assert runs(process.pid)


@pytest.mark.parametrize("text", ["", "12", "12:", ":3", "a:b", "1:2:3"])
def test_parse_refuses_what_is_no_process(text):
    with pytest.raises(ValueError):
        processes.parse(text)


def test_a_process_may_have_any_name(tree):
    _, orphan = tree()
    # Its name holds ") R 1 (": reading the fields from the first parenthesis on would give nonsense.
    assert "(VLLM::) R 1 (Wo)" in Path(f"/proc/{orphan}/stat").read_text()
    assert processes.identify(orphan).pid == orphan


def test_session_members_are_found_when_orphaned_renamed_and_without_their_leader(tree):
    leader, orphan = tree()
    me = processes.identify(leader.pid)
    assert sorted(processes.session_members(me)) == sorted([leader.pid, orphan])
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    assert processes.session_members(me) == [orphan]
    assert os.getpid() not in processes.session_members(me)


def test_end_session_ends_the_orphans_of_a_dead_leader(tree):
    leader, orphan = tree()
    me = processes.identify(leader.pid)
    os.kill(leader.pid, signal.SIGKILL)
    leader.wait()
    processes.end_session(me, 0.2)
    assert not runs(orphan) and processes.session_members(me) == []
    processes.end_session(me, 0.2)


def test_end_session_kills_who_does_not_listen(tree):
    leader, orphan = tree("deaf")
    start = time.monotonic()
    processes.end_session(processes.identify(leader.pid), 0.5)
    assert not runs(leader.pid) and not runs(orphan) and 0.5 <= time.monotonic() - start < 5


def test_end_session_lets_a_server_that_listens_end_by_itself(spawned, tmp_path):
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: (open(sys.argv[1], 'w').write('bye'), sys.exit(0))); print('up', flush=True); time.sleep(100)"
    )
    process = spawned(python(code, tmp_path / "bye"), stdout=subprocess.PIPE)
    process.stdout.readline()
    start = time.monotonic()
    processes.end_session(processes.identify(process.pid), 20)
    assert (tmp_path / "bye").read_text() == "bye" and time.monotonic() - start < 5


def test_ending_a_session_does_not_take_other_childrens_exit_status(tree):
    # The kernel that stops a server also runs the load client and waits for it.
    leader, _ = tree("deaf")
    other = subprocess.Popen(["sh", "-c", "exit 7"])
    until(lambda: not runs(other.pid))
    processes.end_session(processes.identify(leader.pid), 0.3)
    assert other.wait() == 7


def test_die_with_parent(spawned):
    code = (
        "import subprocess, time; from fieldbook import processes\n"
        "print(subprocess.Popen(['sleep', '100'], preexec_fn=processes.die_with_parent).pid, flush=True); time.sleep(100)"
    )
    parent = spawned(python(code), stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    assert runs(child)
    parent.kill()
    assert until(lambda: not runs(child))


def test_owner_named_by_the_runner(monkeypatch):
    monkeypatch.setenv("FIELDBOOK_OWNER", "12:34")
    assert processes.owner_of_servers() == processes.ProcessId(12, 34)


ASK = "from fieldbook import processes; print(processes.owner_of_servers())"


def test_owner_of_a_kernel_is_its_parent(spawned):
    code = "import subprocess, sys; print(subprocess.run([sys.executable, '-c', sys.argv[1]], capture_output=True, text=True).stdout, flush=True); input()"
    parent = spawned(python(code, ASK), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline().strip() == str(processes.identify(parent.pid))
    parent.communicate("\n")


def test_owner_of_a_papermill_kernel_is_who_called_papermill(spawned, tmp_path):
    # The grandchild's parent is a script called papermill, whose parent is the process that has to own the server.
    script = tmp_path / "papermill"
    script.write_text(f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {ASK!r}], capture_output=True, text=True).stdout, end='')")
    code = "import subprocess, sys; print(subprocess.run([sys.executable, sys.argv[1]], capture_output=True, text=True).stdout, flush=True); input()"
    shell = spawned(python(code, script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert shell.stdout.readline().strip() == str(processes.identify(shell.pid))
    shell.communicate("\n")


def test_the_state_names_exactly_the_server_that_runs(supervised):
    one = supervised().up()
    state = one.state()
    assert processes.parse(state["server"]) == processes.identify(one.server_pid) and processes.parse(state["supervisor"]).pid == one.supervisor.pid
    assert one.given == "given" and os.getsid(one.worker) == one.server_pid != os.getsid(one.supervisor.pid)
    assert server.is_up(state) and server.find(one.state_file, "smollm2-135m-instruct") == state
    assert server.find(one.state_file, "another-model") is None
    assert server.find(one.state_file.with_name("none.json"), "smollm2-135m-instruct") is None
    # What the state says and what answers on the port have to agree.
    mistaken = one.state_file.with_name("mistaken.json")
    mistaken.write_text(json.dumps({**state, "model": "another-model"}))
    assert server.find(mistaken, "another-model") is None and server.find(mistaken, "smollm2-135m-instruct") is None
    assert urllib.request.urlopen(f"http://127.0.0.1:{one.port}/health", timeout=5).status == 200


def test_stop_ends_everything_and_may_be_called_again(supervised):
    one = supervised().up()
    ended = server.stop(one.state_file)
    assert (ended["status"], ended["reason"]) == ("ended", "stopped on request")
    assert one.gone(0.5) and one.supervisor.wait(5) == 0
    assert server.stop(one.state_file) == ended == one.state()
    assert not server.is_up(ended) and server.find(one.state_file, "smollm2-135m-instruct") is None
    assert server.stop_all(one.run_dir) == []


def test_killed_owner_takes_the_server_along(supervised):
    one = supervised().up()
    one.owner.kill()
    one.owner.wait()
    assert one.gone() and one.supervisor.wait(8) == 0
    assert one.state()["status"] == "ended" and f"owner (process {one.owner.pid}) is gone" in one.state()["reason"]


def test_an_owner_that_is_a_zombie_is_gone(supervised):
    one = supervised().up()
    one.owner.kill()  # not waited for
    assert one.gone()


def test_killed_owner_takes_a_deaf_server_along(supervised):
    one = supervised(argv=python("import signal; signal.signal(15, signal.SIG_IGN)\n" + FAKE + "\n", "0"), stop_timeout_s=1)
    one.up()
    one.owner.kill()
    assert one.gone()


def test_killed_supervisor_takes_the_server_along(supervised):
    one = supervised().up()
    one.supervisor.kill()
    one.supervisor.wait()
    assert until(lambda: not runs(one.server_pid))
    # The server's own worker has no one to tell it; stop finds it by the session.
    server.stop_all(one.run_dir)
    assert one.gone(1) and not server.is_up(one.state())
    assert server.stop_all(one.run_dir) == []


def test_killed_supervisor_leaves_no_worker_either(supervised):
    one = supervised().up()
    one.supervisor.kill()
    assert one.gone(), "the server's worker outlives supervisor and server"


def test_killed_server_is_noticed_with_its_workers(supervised):
    one = supervised(stop_timeout_s=1).up()
    os.kill(one.server_pid, signal.SIGKILL)
    assert one.gone() and one.supervisor.wait(8) == 0
    assert one.state()["status"] == "ended" and one.state()["reason"] == "the server was killed by SIGKILL" and one.state()["returncode"] == -9


def test_a_server_that_dies_at_once_is_reported_with_its_status(supervised):
    one = supervised(argv=["sh", "-c", "exit 3"])
    assert until(lambda: one.state()["status"] == "ended")
    assert one.state()["returncode"] == 3 and "status 3" in one.state()["reason"]
    with pytest.raises(GateFailed, match="did not start: the server ended by itself with status 3"):
        starting.wait_ready(one.state_file, 10)


def test_a_program_that_is_not_there_is_reported_soon(supervised):
    one = supervised(argv=["/nonexistent/python"])
    start = time.monotonic()
    with pytest.raises(GateFailed, match="did not start: .*(nonexistent|No such file)"):
        starting.wait_ready(one.state_file, 2)
    assert time.monotonic() - start < 10


def test_two_servers_of_one_run_are_stopped_together(supervised):
    one, two = supervised().up(), supervised().up()
    assert server.stop_all(one.run_dir) == sorted([one.state_file.stem, two.state_file.stem])
    assert one.gone(1) and two.gone(1)


def test_a_damaged_state_file_does_not_keep_the_others_running(supervised):
    one = supervised().up()
    (one.run_dir / "servers" / "aaa.json").write_text("{")
    try:
        server.stop_all(one.run_dir)
    except BadInput as error:
        assert "aaa.json" in str(error)
    assert one.gone(1)


def test_wait_ready_tells_phases_and_gives_up_in_time(supervised):
    one, said = supervised(), []
    waited, phases = starting.wait_ready(one.state_file, 10, said.append)
    assert 0 < waited < 10 and sorted(name for name, _ in phases) == ["first token", "healthy", "serving"] and phases[-1][0] == "first token"
    assert said[0].startswith(f"{one.state_file.stem}: ")
    never = supervised(argv=["sleep", "300"])
    until(lambda: never.state()["status"] == "running")
    pid = processes.parse(never.state()["server"]).pid
    with pytest.raises(GateFailed, match="did not start: not ready after 1 s; its log is servers/"):
        starting.wait_ready(never.state_file, 1)
    assert not runs(pid) and never.state()["status"] == "ended"


def test_wait_ready_names_the_root_error_of_the_log(supervised):
    one = supervised(argv=["sh", "-c", "echo 'ValueError: no such model'; exit 1"])
    with pytest.raises(GateFailed, match="did not start: ValueError: no such model; its log is"):
        starting.wait_ready(one.state_file, 10)


def test_a_missing_state_is_one_line(tmp_path):
    with pytest.raises(BadInput, match="no server state"):
        server.read_state(tmp_path / "none.json")


def test_launch_writes_state_before_it_returns_and_the_server_follows_its_owner(changed, tmp_path, monkeypatch, spawned):
    """launch as the walk calls it; only the command that it starts is ours."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    owner = spawned(["sleep", "300"])
    monkeypatch.setenv("FIELDBOOK_OWNER", str(processes.identify(owner.pid)))
    monkeypatch.setattr(server, "command_line", lambda params, arm, split, port, box=None: CommandLine(tuple(map(str, python(FAKE, port))), {}))
    box = changed({"model.path": str(model), "server.stop_timeout_s": 2})
    state_file = server.launch(box, box.parallel, (15, 15), tmp_path, "candidate-1")
    assert state_file == tmp_path / "servers" / "candidate-1.json" and json.loads(state_file.read_text())["owner"] == str(processes.identify(owner.pid))
    try:
        waited, _ = starting.wait_ready(state_file, 10)
        state = server.read_state(state_file)
        assert waited < 10 and server.find(state_file, "smollm2-135m-instruct") == state
        threading.Timer(0.1, owner.kill).start()
        assert until(lambda: server.read_state(state_file)["status"] == "ended") and not runs(processes.parse(state["server"]).pid)
    finally:
        server.stop(state_file)


def test_launch_without_weights_is_one_line(changed, tmp_path):
    box = changed({"model.path": str(tmp_path)})
    with pytest.raises(BadInput, match="model.path: no config.json"):
        server.launch(box, box.parallel, (15, 15), tmp_path, "x")
    assert not (tmp_path / "servers").exists()


def test_a_port_that_is_taken_is_refused():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(GateFailed, match=f"server.port: {other.getsockname()[1]} .*taken"):
            server.free_port(other.getsockname()[1])
    assert 1024 <= server.free_port(0) <= 65535

def test_wait_ready_says_what_a_known_cause_means_and_the_way_out(supervised):
    one = supervised(argv=["sh", "-c", "echo 'ValueError: sum(partitions)=77 does not match num_hidden_layers=78.'; exit 1"])
    with pytest.raises(GateFailed) as failed:
        starting.wait_ready(one.state_file, 10)
    said = str(failed.value)
    assert "did not start: ValueError: sum(partitions)=77" in said and "\n" not in said
    assert said.endswith("add up to 78; `fieldbook partition FILE` finds the best")
