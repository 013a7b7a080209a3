"""Shared memory that a server's processes make in /dev/shm and that nobody removes when they are killed."""

import contextlib
import os
import time
from pathlib import Path

from . import processes
from .processes import ProcessId

FOLDER = Path("/dev/shm")
# Segments are made while a server starts; the maps of its processes are long, and reading them holds those processes up.
FIRST_S, OFTEN_S, SELDOM_S = 180.0, 0.5, 15.0


class Shared:
    """The segments of one server: files directly in /dev/shm, of this user, that were not there before it and that one of its processes has mapped.

    What lies deeper is somebody's data: a checkpoint may be kept in /dev/shm.
    """

    def __init__(self):
        self._before, self._own = set(_names()), set()
        self._started_s = self._looked_s = time.monotonic()
        self._count = -1

    def look(self, members: list[int] | None, leader: ProcessId | None = None, at_once: bool = False) -> None:
        """Remember what these processes, or those of a leader's session, have mapped now; seldom once the server has come up, unless `at_once`."""
        now = time.monotonic()
        often = now - self._started_s < FIRST_S or (members is not None and len(members) != self._count)
        if not at_once and now - self._looked_s < (OFTEN_S if often else SELDOM_S):
            return
        self._looked_s = now
        members = processes.session_members(leader) if members is None else members
        self._count = len(members)
        if set(_names()) - self._before - self._own:
            for pid in members:
                self._own |= mapped(pid) - self._before

    def remove(self) -> None:
        """Unlink what is still there."""
        for name in self._own:
            with contextlib.suppress(OSError):
                if (FOLDER / name).stat().st_uid == os.getuid():
                    (FOLDER / name).unlink()


def _names() -> list[str]:
    try:
        return os.listdir(FOLDER)
    except OSError:
        return []


def mapped(pid: int) -> set[str]:
    """Names of the files directly in /dev/shm that a process has mapped now."""
    prefix, found = f"{FOLDER}/", set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            name = line.split(maxsplit=5)[5].strip() if prefix in line else ""
            if name.startswith(prefix) and "/" not in name[len(prefix) :] and not name.endswith(" (deleted)"):
                found.add(name[len(prefix) :])
    return found
