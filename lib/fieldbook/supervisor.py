"""A small process beside each server: it starts the server, watches the owner, and ends the server when the owner is gone.

Run as `python -m fieldbook.supervisor STATE.json`. The state file is how everyone else finds the server: pid, start time, port, model.
It must survive the kernel that launched it, and must not survive the owner by more than a few seconds. What the server prints passes through it into the
log, without the environment's secrets.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import files, live, processes, secrecy, sharedmemory, watching
from .logcopy import LogCopy

POLL_S = 0.5
CRIPPLED_S = 2
# A server gets these from the params alone: one left over in a shell would change it in silence.
DECIDED = (
    "VLLM_PP_LAYER_PARTITION", "VLLM_USE_V2_MODEL_RUNNER", "VLLM_API_KEY", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND", "VLLM_HOST_IP",
    "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME",
)  # fmt: skip


def environment_of(state: dict, scratch: str) -> dict[str, str]:
    """The server's whole environment: what is inherited, without what the params decide, then what Fieldbook sets, secrets in place of their names."""
    inherited = {key: value for key, value in os.environ.items() if key not in DECIDED}
    environment = {**inherited, "TMPDIR": scratch, **secrecy.resolved(state["env"], os.environ, "server.extra_env")}
    # It goes with the folder, and answers only when it is asked.
    return environment | live.plant(Path(scratch) / "live", environment)


def main(state_file: Path) -> None:
    """Start the server described in the state file and stay until it has ended. Writes status, pid, return code and reason back."""
    state = json.loads(state_file.read_text())
    wanted = {"stop": False}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: wanted.update(stop=True))
    processes.adopt_orphans()
    # First of all it says that it is there: who launched it can then wait for it, and stop it.
    own = processes.identify(os.getpid())
    state.update(supervisor=str(own))
    files.write_json(state_file, state)
    # vLLM leaves sockets and rendezvous files in its temporary folder, so it gets one of its own.
    scratch = ""
    try:
        scratch = tempfile.mkdtemp(prefix="fieldbook-server-")
        _run(state_file, state, own, scratch, wanted)
    except Exception as error:
        state.update(status="ended", returncode=None, reason=f"it cannot be started: {error}")
        state.setdefault("server", None)
        files.write_json(state_file, state)
    finally:
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)


def _run(state_file: Path, state: dict[str, Any], own: processes.ProcessId, scratch: str, wanted: dict[str, bool]) -> None:
    owner = processes.parse(state["owner"])
    environment = environment_of(state, scratch)
    used_before = watching.gpu_memory_bytes(state.get("gpus")) if state.get("device") == "cuda" else {}
    shared = sharedmemory.Shared()
    kills_before = watching.oom_kills()
    secrets = (*secrecy.secret_values({**os.environ, **environment}), *secrecy.referenced(state["env"], os.environ))
    reads, writes = os.pipe()
    if wanted["stop"]:
        raise RuntimeError("stopped before it was started")
    # A session of its own makes every descendant findable; die_with_parent covers a killed supervisor.
    server = subprocess.Popen(
        state["argv"], env=environment, stdin=subprocess.DEVNULL, stdout=writes, stderr=writes, start_new_session=True, preexec_fn=processes.die_with_parent
    )
    os.close(writes)
    leader = processes.identify(server.pid) or processes.ProcessId(server.pid, 0)
    guard = _guard(own, leader, scratch, reads, shared)
    log = LogCopy(reads, Path(state["log"]), secrets)
    state.update(status="running", server=str(leader), returncode=None, reason=None, live=str(Path(scratch) / "live"), lost=[], oom_kills=0)
    files.write_json(state_file, state)

    reason, crew = None, watching.Crew(leader)
    while reason is None:
        crew.wait(POLL_S)
        members = processes.session_members(leader)
        shared.look(members)
        lost = [] if wanted["stop"] else crew.lost(members)
        if lost:
            state["lost"] += lost
            files.write_json(state_file, state)
        if server.poll() is not None or not processes.is_alive(leader):
            # A killed process is dead some moments before the last of its threads is, and only then has it a status.
            server.wait()
            reason = _how_it_ended(server.returncode)
        elif wanted["stop"]:
            reason = "stopped on request"
        elif not processes.is_alive(owner):
            reason = f"its owner (process {owner.pid}) is gone"
    returncode, kills = server.returncode, watching.oom_kills() - kills_before
    # What it made since the last look is known only as long as one of its processes has it.
    shared.look(processes.session_members(leader), at_once=True)
    # What has lost a process cannot end in order any more.
    processes.end_session(leader, min(state["stop_timeout_s"], CRIPPLED_S) if state["lost"] else state["stop_timeout_s"])
    # It has nothing left to guard, and would notice only at its next look.
    os.kill(guard, signal.SIGKILL)
    os.waitpid(guard, 0)
    log.finish()
    shared.remove()
    state.update(watching.settled(state, used_before), oom_kills=kills, log_bytes_lost=log.lost_bytes)
    left = watching.what_is_left(state, processes.session_members(leader))
    state.update(status="ended", returncode=returncode, reason=f"{reason}; {left}" if left else reason)
    files.write_json(state_file, state)


def _how_it_ended(returncode: int) -> str:
    return f"the server was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"the server ended by itself with status {returncode}"


def _guard(supervisor: processes.ProcessId, leader: processes.ProcessId, scratch: str, log_pipe: int, shared: sharedmemory.Shared) -> int:
    """A second watcher, forked off: when the supervisor itself is killed, it ends the engine and the workers, which only their leader would have.

    Returns its pid.
    """
    if pid := os.fork():
        return pid
    try:
        # Held open here, the pipe of a killed supervisor would make the server wait for a reader.
        os.close(log_pipe)
        while processes.is_alive(supervisor):
            time.sleep(POLL_S)
            # All processes of the machine are gone through only when it is time to look at the maps again.
            shared.look(None, leader)
        shared.look(None, leader, at_once=True)
        processes.end_session(leader, 0)
        shared.remove()
        shutil.rmtree(scratch, ignore_errors=True)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
