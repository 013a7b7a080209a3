"""Notebook kernels over Unix sockets: a real kernel is started, restarted and stopped."""

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest
from conftest import ROOT, runs, until
from jupyter_client import KernelManager
from jupyter_client.kernelspec import KernelSpecManager

from fieldbook import kernel, processes

SOCKETS = "fieldbook-kernel-*"


@pytest.fixture
def manager(tmp_path, monkeypatch):
    """A manager of the kernelspec as this checkout ships it, with sockets under a folder of the test's."""
    specs = tmp_path / "kernels"
    shutil.copytree(ROOT / "lib" / "fieldbook" / "kernelspec", specs / "fieldbook")
    sockets = Path("/tmp") / f"fb-test-{os.getpid()}"
    sockets.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(sockets))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    made = KernelManager(kernel_name="fieldbook", kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(specs)]))
    made.sockets = sockets
    yield made
    if made.has_kernel:
        made.shutdown_kernel(now=True)
    shutil.rmtree(sockets)


def asked(manager, code):
    """What the kernel prints for this code."""
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=30)
        printed = []
        client.execute_interactive(code, timeout=30, output_hook=lambda message: printed.append(message["content"].get("text", "")))
        return "".join(printed).strip()
    finally:
        client.stop_channels()


def test_a_kernel_talks_over_sockets_that_only_this_user_can_open(manager):
    manager.start_kernel()
    assert manager.transport == "ipc" and asked(manager, "print(6 * 7)") == "42"
    (folder,) = manager.sockets.glob(SOCKETS)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert all(stat.S_ISSOCK(p.stat().st_mode) for p in folder.iterdir()) and len(list(folder.iterdir())) == 5
    pid = int(asked(manager, "import os; print(os.getpid())"))
    # No channel listens on TCP (ipykernel's debugger alone keeps a port of its own, bound for 127.0.0.1).
    inodes = {
        os.readlink(f"/proc/{pid}/fd/{name}")[8:-1] for name in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    }
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    listening = [row[1] for row in rows if row[3] == "0A" and row[9] in inodes]
    assert len(listening) <= 1 and all(address.startswith("0100007F:") for address in listening)
    # A restarted kernel answers too, and nothing stays when it goes.
    manager.restart_kernel(now=True)
    assert asked(manager, "print('again')") == "again"
    manager.shutdown_kernel(now=True)
    assert until(lambda: not runs(pid))
    assert list(manager.sockets.glob(SOCKETS)) == []


def test_sockets_of_a_killed_starter_go_with_the_next_kernel(manager):
    """A walk that is killed cannot remove its kernel's sockets; those of processes that run, and sockets somebody listens on, stay."""
    import socket

    own = processes.identify(os.getpid())
    names = ("fieldbook-kernel-1-2-abc", "fieldbook-kernel-1-2-abd", f"fieldbook-kernel-{own.pid}-{own.start_ticks}-abe", "fieldbook-x")
    left, listened, running, other = (manager.sockets / name for name in names)
    for folder in (left, listened, running, other):
        folder.mkdir()
        with socket.socket(socket.AF_UNIX) as ended:
            ended.bind(str(folder / "ipc-1"))
    # What cannot be looked into, as another user's folder, keeps no kernel from starting.
    (manager.sockets / "fieldbook-kernel-1-2-abf").write_text("")
    with socket.socket(socket.AF_UNIX) as alive:
        alive.bind(str(listened / "ipc-2"))
        alive.listen()
        manager.start_kernel()
        assert not left.exists() and listened.is_dir() and running.is_dir() and other.is_dir()
    assert asked(manager, "print(1)") == "1"
    manager.shutdown_kernel(now=True)
    for folder in (listened, running, other):
        shutil.rmtree(folder)
    (manager.sockets / "fieldbook-kernel-1-2-abf").unlink()


def test_a_path_too_long_for_a_socket_falls_back(manager, monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    manager.start_kernel()
    assert manager.transport == "tcp" and list(deep.iterdir()) == [] and asked(manager, "print(1)") == "1"


def test_longest_path_fits_a_socket_address(tmp_path):
    import socket

    folder = "/tmp/" + "x" * (kernel.LONGEST_SOCKET_PATH - len("/tmp/") - len("/ipc-1"))
    os.mkdir(folder)
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.bind(f"{folder}/ipc-5")
    finally:
        shutil.rmtree(folder)


def test_the_kernelspec_and_its_provisioner_are_installed():
    from importlib.metadata import entry_points

    (entry,) = [e for e in entry_points(group="jupyter_client.kernel_provisioners") if e.name == "fieldbook-ipc"]
    assert entry.load() is kernel.IpcProvisioner
    installed = Path(sys.prefix) / "share" / "jupyter" / "kernels" / "fieldbook" / "kernel.json"
    assert installed.read_text() == (ROOT / "lib" / "fieldbook" / "kernelspec" / "kernel.json").read_text()
