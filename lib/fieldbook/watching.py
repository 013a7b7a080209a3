"""Signs of life of a server's processes: which of them died, whether they do anything, and whether all they held is free again."""

import contextlib
import os
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from . import processes
from .command import LOCAL
from .processes import ProcessId

GIB = 2**30
# Below this share of one core, and so many bytes read a second, a server waits: the pollings of its processes take as much.
IDLE_CORES = 0.05
IDLE_READ_BYTES_S = 1 << 16
# How long ports and device memory may take to be given back, and how much more than before may stay in use: contexts of others come and go.
SETTLE_S = 20.0
SETTLED_BYTES = 64 << 20


def title_of(pid: int) -> str:
    """What a process calls itself: vLLM's processes are named VLLM::EngineCore, VLLM::Worker_PP0 and so on."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:
        return ""


def _kind(title: str) -> str:
    """What comes before the rank: VLLM::Worker, which is a worker's name until it knows its rank."""
    return title.partition("_")[0]


def oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory so far, of this machine or control group; 0 where it does not tell."""
    for file, key in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        with contextlib.suppress(OSError, ValueError, StopIteration):
            return next(int(line.split()[1]) for line in Path(file).read_text().splitlines() if line.split()[:1] == [key])
    return 0


class Crew:
    """vLLM's processes of one session, as long as they live."""

    def __init__(self, leader: ProcessId):
        self._leader, self._known, self._oom = leader, {}, oom_kills()
        self._handles, self._died = {}, []

    def wait(self, seconds: float) -> None:
        """Sleep, but notice at once when one of them dies: what its death brings down follows within milliseconds."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            poller = select.poll()
            for handle in self._handles.values():
                poller.register(handle, select.POLLIN)
            dead = {handle for handle, _ in poller.poll(left * 1000)}
            for pid in [pid for pid, handle in self._handles.items() if handle in dead]:
                self._died.append(pid)
                os.close(self._handles.pop(pid))

    def _hold(self) -> None:
        """A handle on each known process, where the system has such (Linux 5.3); on others the order of deaths is not known."""
        for pid in self._known:
            if pid not in self._handles and pid not in self._died:
                with contextlib.suppress(OSError, AttributeError):
                    self._handles[pid] = os.pidfd_open(pid)

    def lost(self, members: list[int]) -> list[dict[str, Any]]:
        """Those of it that are not among the session's members any more, with what may have killed them.

        Only processes that vLLM names count, and none whose parent is of the same kind: what a worker starts (compilers, lscpu) has the worker's name until it
        has become what it is, and comes and goes. A process that is being killed stays a member for a moment without a title: it keeps the one it had.
        """
        titles = {pid: title_of(pid) or self._known.get(pid, "") for pid in members}
        now = {pid: title for pid, title in titles.items() if title.startswith("VLLM::") and _kind(title) != _kind(title_of(processes.parent_of(pid)))}
        gone = [(pid, title) for pid, title in self._known.items() if pid not in titles]
        gone.sort(key=lambda one: self._died.index(one[0]) if one[0] in self._died else len(self._died))
        self._known = now
        self._hold()
        if not gone or not processes.is_alive(self._leader):
            return []
        kills, free = oom_kills() - self._oom, psutil.virtual_memory().available
        self._oom += kills
        return [{"process": title, "pid": pid, "oom_kills": kills, "memory_available_bytes": free, "at": time.time()} for pid, title in gone]


def lost_text(one: dict[str, Any]) -> str:
    """A lost process in words: free host memory tells a crash from the kernel's killing for lack of it."""
    free = f"{one['memory_available_bytes'] / GIB:.1f} GiB of host memory free"
    why = f"the kernel killed it for lack of memory ({free})" if one["oom_kills"] else f"not for lack of memory ({free})"
    return f"{one['process']} (process {one['pid']}) died: {why}"


@dataclass(frozen=True)
class Pulse:
    """What a session has done so far: bytes logged, CPU seconds, bytes read; and its processes that are stopped by a signal."""

    at_s: float
    logged_bytes: int
    cpu_s: float
    read_bytes: int
    stopped: tuple[str, ...]

    def reads_since(self, before: "Pulse") -> bool:
        """Whether more has been read than waiting takes."""
        return abs(self.read_bytes - before.read_bytes) / max(self.at_s - before.at_s, 1e-6) > IDLE_READ_BYTES_S

    def quiet_since(self, before: "Pulse") -> bool:
        """Whether nothing has been done since: no line, no read, and less computing than waiting takes."""
        seconds = max(self.at_s - before.at_s, 1e-6)
        # Less than before: a process has ended, which is not nothing.
        busy = abs(self.cpu_s - before.cpu_s) / seconds > IDLE_CORES
        return self.logged_bytes == before.logged_bytes and not self.reads_since(before) and not busy


def pulse(leader: ProcessId, log: Path) -> Pulse:
    """The session's pulse now, by /proc."""
    ticks, read, stopped = 0, 0, []
    for pid in processes.session_members(leader):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = processes.stat(pid) or []
            ticks += int(fields[11]) + int(fields[12])
            if fields[0] in "Tt":
                stopped.append(f"{title_of(pid) or 'process'} (process {pid})")
            # rchar: what it asked for, also from the page cache; read_bytes: what came from a disk, also by a memory map.
            read += sum(int(line.split()[1]) for line in Path(f"/proc/{pid}/io").read_text().splitlines() if line.startswith(("rchar", "read_bytes")))
    size = log.stat().st_size if log.is_file() else 0
    return Pulse(time.monotonic(), size, ticks / os.sysconf("SC_CLK_TCK"), read, tuple(stopped))


def gpu_memory_bytes(gpus: list[int] | None = None) -> dict[int, int]:
    """Memory in use of each of these GPUs, of all without a list, by NVML; empty without GPUs."""
    from .inventory import gpu_memory_used

    return {gpu: used for gpu, used in gpu_memory_used().items() if gpus is None or gpu in gpus}


def port_of(wanted: int, host: str = LOCAL) -> int:
    """The wanted port, or any free one for 0. Raises OSError where a server could not listen there."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, wanted))
        return probe.getsockname()[1]


def port_is_free(port: int, host: str = LOCAL) -> bool:
    """Whether a server could listen there now."""
    try:
        return port_of(port, host) == port
    except OSError:
        return False


def settled(state: dict[str, Any], used_before: dict[int, int]) -> dict[str, Any]:
    """Wait until the port is free and the GPUs use no more than before the launch: {"port_free", "device_memory_free" (None without GPUs), "settled_s"}."""
    start = time.monotonic()
    while True:
        free = port_is_free(state["port"], state.get("host", LOCAL))
        used = gpu_memory_bytes(list(used_before)) if used_before else {}
        given_back = all(used.get(gpu, 0) <= before + SETTLED_BYTES for gpu, before in used_before.items()) if used_before else None
        waited = time.monotonic() - start
        if (free and given_back is not False) or waited > SETTLE_S:
            return {"port_free": free, "device_memory_free": given_back, "settled_s": round(waited, 1)}
        time.sleep(0.2)


def what_is_left(state: dict[str, Any], members: list[int]) -> str:
    """What an ended server still holds, in words; '' where all is given back."""
    left = [f"processes {', '.join(map(str, members))} cannot be ended"] if members else []
    left += [] if state["port_free"] else [f"port {state['port']} is still taken"]
    left += ["the GPUs have not got all of their memory back"] if state["device_memory_free"] is False else []
    return "; ".join(left)
