"""Notebook kernels that talk over IPC sockets: files only this user can open, instead of TCP ports any local user can read.

Registered as the kernel provisioner of the kernelspec `fieldbook`, so it holds for JupyterLab, plain papermill, nbval and the runner alike.
"""

import contextlib
import os
import re
import shutil
import socket
import tempfile
from pathlib import Path

from jupyter_client.provisioning import LocalProvisioner

from . import processes

# sun_path of a Unix socket holds 108 bytes with the final zero; jupyter appends '-1' to '-5'.
LONGEST_SOCKET_PATH = 104


# The folders name the process that made them, so that those of a killed one are found.
PREFIX = "fieldbook-kernel-"
_OWNER = re.compile(rf"{PREFIX}(\d+)-(\d+)-\w+")


def _sweep(place: Path) -> None:
    """Remove the sockets of kernels whose starter was killed and so could not: each time, the next one does it."""
    for folder in place.glob(f"{PREFIX}*"):
        owner = _OWNER.fullmatch(folder.name)
        gone = owner and not processes.is_alive(processes.ProcessId(int(owner[1]), int(owner[2])))
        # Another user's cannot be looked into, and must not keep this kernel from starting.
        with contextlib.suppress(OSError):
            # The kernel may outlive its starter; and where a folder is shared by containers, a process of another one is not seen.
            if gone and not any(_listens(file) for file in folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)


def _listens(file: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(str(file)) == 0


class IpcProvisioner(LocalProvisioner):
    """Starts a kernel as usual, but on Unix sockets in a folder of its own that goes when the kernel goes."""

    socket_dir: str | None = None

    async def pre_launch(self, **kwargs):
        """Choose the sockets before the connection file is written. Falls back to what was asked for when the path would be too long."""
        manager = self.parent
        if manager is not None and manager.transport == "tcp" and self.socket_dir is None:
            runtime = os.environ.get("XDG_RUNTIME_DIR", "")
            place = runtime if os.path.isdir(runtime) and os.access(runtime, os.W_OK) else None
            _sweep(Path(place or tempfile.gettempdir()))
            own = processes.identify(os.getpid())
            # mkdtemp makes the folder with mode 0700.
            folder = tempfile.mkdtemp(prefix=f"{PREFIX}{own.pid}-{own.start_ticks}-" if own else PREFIX, dir=place)
            if len(folder) + len("/ipc-1") <= LONGEST_SOCKET_PATH:
                self.socket_dir = folder
                manager.transport, manager.ip = "ipc", os.path.join(folder, "ipc")
                # Port numbers of a TCP connection mean nothing here.
                manager.cache_ports = False
            else:
                os.rmdir(folder)
        return await super().pre_launch(**kwargs)

    async def cleanup(self, restart: bool = False) -> None:
        """Remove the sockets when the kernel is not coming back."""
        await super().cleanup(restart)
        if self.socket_dir and not restart:
            shutil.rmtree(self.socket_dir, ignore_errors=True)
            self.socket_dir = None
