"""Processes by pid and start time: a pid alone can be reused, the pair cannot."""

import contextlib
import ctypes
import os
import signal
import time
from dataclasses import dataclass

import psutil

# Long enough for a resource tracker to notice that it is alone, and to tidy up.
TRACKER_S = 3.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


@dataclass(frozen=True)
class ProcessId:
    """A process: pid and start time in clock ticks since boot (field 22 of /proc/<pid>/stat)."""

    pid: int
    start_ticks: int

    def __str__(self) -> str:
        return f"{self.pid}:{self.start_ticks}"


def stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the third on (state, ppid, pgrp, session, ...); None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The command name stands in parentheses and may hold spaces and parentheses itself.
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def identify(pid: int) -> ProcessId | None:
    """The process that has this pid now; None when there is none, or only a zombie."""
    fields = stat(pid)
    return ProcessId(pid, int(fields[19])) if fields and fields[0] not in "ZX" else None


def parent_of(pid: int) -> int:
    """Its parent's pid; 0 when there is no such process."""
    fields = stat(pid)
    return int(fields[1]) if fields else 0


def parse(text: str) -> ProcessId:
    """'123:456' -> ProcessId. Raises ValueError otherwise."""
    pid, _, ticks = text.partition(":")
    return ProcessId(int(pid), int(ticks))


def is_alive(process: ProcessId) -> bool:
    """True while exactly that process runs."""
    return identify(process.pid) == process


def owner_of_servers() -> ProcessId:
    """The process whose end ends the servers started from here.

    The runner names itself in FIELDBOOK_OWNER. A notebook in JupyterLab belongs to the Jupyter server, its kernel's parent. A notebook run
    by plain papermill belongs to whoever called papermill, so that the next notebook, run by the next papermill, still finds the server.
    """
    if os.environ.get("FIELDBOOK_OWNER"):
        return parse(os.environ["FIELDBOOK_OWNER"])
    parent = psutil.Process(os.getppid())
    if any("papermill" in os.path.basename(word) for word in parent.cmdline()[:3]) and parent.ppid() > 1:
        parent = psutil.Process(parent.ppid())
    return identify(parent.pid) or identify(os.getpid())


def die_with_parent() -> None:
    """For preexec_fn: the kernel sends SIGKILL to this process when its parent ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the one that inherits orphaned descendants, so that it can reap and see them."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def session_members(leader: ProcessId) -> list[int]:
    """Pids of all processes in the session that `leader` started, also after the leader has died.

    vLLM's engine and workers rename themselves and lose their parent, but stay in the session. The number of a session is not given to
    a new process while members are left, so a leader with another start time means the session is someone else's: then the list is empty.
    """
    present = identify(leader.pid)
    if present is not None and present != leader:
        return []
    members = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            fields = stat(int(name))
            if fields and fields[0] not in "ZX" and int(fields[3]) == leader.pid and int(fields[19]) >= leader.start_ticks:
                members.append(int(name))
    return members


def end_session(leader: ProcessId, timeout_s: float) -> None:
    """SIGTERM to the leader, wait, then SIGKILL whatever of the session is left. Returns when none is left."""
    if is_alive(leader):
        _send(leader.pid, signal.SIGTERM)
    else:
        # Nobody is left to tell the others to end; they get a moment to notice.
        timeout_s = min(timeout_s, 2)
    deadline = time.monotonic() + timeout_s
    while session_members(leader) and time.monotonic() < deadline:
        time.sleep(0.1)
    spared_until = time.monotonic() + TRACKER_S
    for _ in range(100):
        members = session_members(leader)
        if not members:
            return
        for pid in members:
            if not (_is_resource_tracker(pid) and time.monotonic() < spared_until):
                _send(pid, signal.SIGKILL)
        time.sleep(0.1)


def _is_resource_tracker(pid: int) -> bool:
    """Python's own process that removes the semaphores and shared memory of a program once all its processes are gone: killed, it could not.

    The semaphores are files that nobody has mapped any more, so nobody else could tell whose they are.
    """
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"multiprocessing.resource_tracker" in file.read()
    except OSError:
        return False


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
