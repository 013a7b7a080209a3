"""A small process beside each server: it starts the server, watches the owner, and ends the server when the owner is gone.

Run as `python -m fieldbook.supervisor STATE.json`. The state file is how everyone else finds the server: pid, start time, port, model.
It must survive the kernel that launched it, and must not survive the owner by more than a few seconds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import files, processes

POLL_S = 0.5


def main(state_file: Path) -> None:
    """Start the server described in the state file and stay until it has ended. Writes status, pid, return code and reason back."""
    state = json.loads(state_file.read_text())
    owner = processes.parse(state["owner"])
    wanted = {"stop": False}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: wanted.update(stop=True))
    processes.adopt_orphans()
    with open(state["log"], "ab") as log:
        # A session of its own makes every descendant findable; die_with_parent covers a killed supervisor.
        server = subprocess.Popen(
            state["argv"],
            env={**os.environ, **state["env"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=processes.die_with_parent,
        )
    leader = processes.identify(server.pid) or processes.ProcessId(server.pid, 0)
    own = processes.identify(os.getpid())
    state.update(status="running", server=str(leader), supervisor=str(own), returncode=None, reason=None)
    files.write_json(state_file, state)

    reason = None
    while reason is None:
        time.sleep(POLL_S)
        if server.poll() is not None:
            reason = f"the server ended by itself with status {server.returncode}"
        elif wanted["stop"]:
            reason = "stopped on request"
        elif not processes.is_alive(owner):
            reason = f"its owner (process {owner.pid}) is gone"
    returncode = server.returncode
    processes.end_session(leader, state["stop_timeout_s"])
    state.update(status="ended", returncode=returncode, reason=reason)
    files.write_json(state_file, state)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
