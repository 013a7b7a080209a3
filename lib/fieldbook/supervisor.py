"""A small process beside each server: it starts the server, watches the owner, and ends the server when the owner is gone.

Run as `python -m fieldbook.supervisor STATE.json`. The state file is how everyone else finds the server: pid, start time, port, model.
It must survive the kernel that launched it, and must not survive the owner by more than a few seconds.
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

from . import files, live, processes

POLL_S = 0.5


def main(state_file: Path) -> None:
    """Start the server described in the state file and stay until it has ended. Writes status, pid, return code and reason back."""
    state = json.loads(state_file.read_text())
    owner = processes.parse(state["owner"])
    wanted = {"stop": False}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: wanted.update(stop=True))
    processes.adopt_orphans()
    # vLLM leaves sockets and rendezvous files in its temporary folder, so it gets one of its own.
    scratch = tempfile.mkdtemp(prefix="fieldbook-server-")
    environment = {**os.environ, "TMPDIR": scratch, **state["env"]}
    # It goes with the folder, and answers only when it is asked.
    environment |= live.plant(Path(scratch) / "live", environment)
    try:
        with open(state["log"], "ab") as log:
            # A session of its own makes every descendant findable; die_with_parent covers a killed supervisor.
            server = subprocess.Popen(
                state["argv"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )
    except OSError as error:
        state.update(status="ended", server=None, returncode=None, reason=f"it cannot be started: {error}")
        files.write_json(state_file, state)
        shutil.rmtree(scratch, ignore_errors=True)
        return
    leader = processes.identify(server.pid) or processes.ProcessId(server.pid, 0)
    own = processes.identify(os.getpid())
    _guard(own, leader, scratch)
    state.update(status="running", server=str(leader), supervisor=str(own), returncode=None, reason=None, live=str(Path(scratch) / "live"))
    files.write_json(state_file, state)

    reason, shared = None, set()
    while reason is None:
        time.sleep(POLL_S)
        shared |= processes.shared_memory_of(leader)
        if server.poll() is not None or not processes.is_alive(leader):
            # A killed process is dead some moments before the last of its threads is, and only then has it a status.
            server.wait()
            reason = _how_it_ended(server.returncode)
        elif wanted["stop"]:
            reason = "stopped on request"
        elif not processes.is_alive(owner):
            reason = f"its owner (process {owner.pid}) is gone"
    returncode = server.returncode
    processes.end_session(leader, state["stop_timeout_s"])
    _clean(scratch, shared)
    state.update(status="ended", returncode=returncode, reason=reason)
    files.write_json(state_file, state)


def _how_it_ended(returncode: int) -> str:
    return f"the server was killed by {signal.Signals(-returncode).name}" if returncode < 0 else f"the server ended by itself with status {returncode}"


def _clean(scratch: str, shared: set[str]) -> None:
    """Remove what ended processes leave: their temporary folder, and shared memory that they had mapped and nobody unlinked."""
    shutil.rmtree(scratch, ignore_errors=True)
    for name in shared:
        Path(name).unlink(missing_ok=True)


def _guard(supervisor: processes.ProcessId, leader: processes.ProcessId, scratch: str) -> None:
    """A second watcher, forked off: when the supervisor itself is killed, it ends the engine and the workers, which only their leader would have."""
    if os.fork():
        return
    try:
        shared = set()
        while processes.is_alive(supervisor):
            time.sleep(POLL_S)
            shared |= processes.shared_memory_of(leader)
        processes.end_session(leader, 0)
        _clean(scratch, shared)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
